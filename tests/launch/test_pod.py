"""Slices and their checks."""

from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.launch.pod import make_pod


def pod(
    kind: str = "tpu-vm",
    topology: str = "v4-8",
    name: str = "a",
    workdir: str = "runs/x",
    **options: Any,
):
    return make_pod(kind, topology, name, ["--config=digits", f"--workdir={workdir}"], **options)


@pytest.mark.parametrize(
    "topology, hosts, chips",
    [
        ("v2-8", 1, 4),
        ("v3-2048", 256, 4),
        ("v4-8", 1, 4),
        ("v5e-1", 1, 1),
        ("v5e-4", 1, 4),
        ("v5e-8", 1, 8),
        ("v5litepod-16", 4, 4),
        ("v5p-256", 32, 4),
        ("v6e-256", 64, 4),
    ],
)
def test_hosts(topology: str, hosts: int, chips: int) -> None:
    found = pod(topology=topology, workdir="gs://b/x")
    assert (found.hosts, found.chips_per_host) == (hosts, chips)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topology": "v9-8"}, "--topology is 'v9-8'; it must be one of v2, v3"),
        ({"topology": "v4-9"}, "no slice of v4 has 9 cores; the nearest are v4-8 and v4-16"),
        ({"topology": "tpu7x-128"}, "tpu7x is offered by GKE only: use the kind jobset"),
        ({"name": "My_pod"}, "--name is 'My_pod'; it must have 1 to 63 lower-case letters, digits"),
        ({"name": "pod-"}, "not end with a hyphen"),
        ({"name": "a" * 64}, "must have 1 to 63"),
        ({"name": "$(reboot)"}, "--name is"),
        ({"slices": 2}, "--slices is 2; a TPU VM is one slice: use the kind queued-resource"),
        ({"slices": 0}, "--slices is 0; it must be at least 1"),
        (
            {"topology": "v4-16"},
            "a local folder, and the 2 hosts must share it; give a folder in a",
        ),
        ({"kind": "queued-resource", "slices": 2}, "a local folder, and the 2 hosts must share it"),
        (
            {"kind": "jobset"},
            "which is lost with its pod; give a folder in a bucket, as --workdir=gs",
        ),
        ({"kind": "jobset", "shared_workdir": True}, "which is lost with its pod"),
        ({"workdir": "~/runs"}, "on another machine ~ is not your home folder"),
        ({"workdir": ""}, "--workdir is missing among the arguments behind --"),
    ],
)
def test_mistake(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        pod(**options)
    assert message in str(error.value).replace("\n", " ")


def test_what_hosts_may_share() -> None:
    assert pod(topology="v4-16", workdir="/mnt/nfs/x", shared_workdir=True).hosts == 2
    assert pod(kind="queued-resource", slices=2, workdir="gs://b/x").slices == 2
    assert pod(topology="v5e-8").workdir == "runs/x"  # one host
