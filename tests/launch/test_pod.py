"""The slices of a run, and the checks of their options."""

from typing import Any

import pytest

from lamb_tpu.launch.pod import make_pod
from tests.raising import rejected


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
    # test_jobset.py has other generations and their shapes.
    [("v2-8", 1, 4), ("v3-2048", 256, 4), ("v5e-4", 1, 4), ("v5litepod-16", 4, 4)],
)
def test_hosts(topology: str, hosts: int, chips: int) -> None:
    actual = pod(topology=topology, workdir="gs://b/x")
    assert (actual.hosts, actual.chips_per_host) == (hosts, chips)


@pytest.mark.parametrize(
    "options, key, problem, remedy",
    [
        ({"topology": "v9-8"}, "--topology", "is not a slice", "use v2, v3"),
        ({"topology": "v4-9"}, "--topology", "has 9 cores, unlike", "use v4-8 or v4-16"),
        ({"topology": "tpu7x-128"}, "--topology", "the Cloud TPU API has no TPU tpu7x", "compute"),
        ({"kind": "compute"}, "--topology", "Compute Engine has no TPU v4", "use the kind jobset"),
        ({"kind": "jobset", "topology": "v2-8"}, "--topology", "GKE has no TPU v2", "tpu-vm or"),
        *(
            ({"name": name}, "--name", "is not a name that", "use 1 to 63 lower-case")
            for name in ("My_pod", "pod-", "a" * 64, "$(reboot)")
        ),
        ({"topology": "v4-16"}, "--workdir", "is a local folder, and the 2 hosts", "in a bucket"),
        ({"kind": "queued-resource", "slices": 2}, "--workdir", "and the 2 hosts must", "bucket"),
        ({"kind": "jobset"}, "--workdir", "is deleted with its pod", "use --workdir=gs"),
        ({"kind": "jobset", "shared_workdir": True}, "--workdir", "is deleted with its pod", ""),
        ({"workdir": "~/runs"}, "--workdir", "begins with ~", "give an absolute path"),
        ({"workdir": ""}, "--workdir", "is missing in the arguments after --", "see --help"),
    ],
)
def test_errors(options: dict[str, Any], key: str, problem: str, remedy: str) -> None:
    with rejected(key, problem=problem, remedy=remedy):
        pod(**options)


def test_description() -> None:
    assert pod(topology="v5e-8").description == "a slice v5e-8, 1 host of 8 chip(s) each"
    actual = pod("jobset", "v4-32", workdir="gs://b/x", slices=2)
    assert actual.description == "2 slices v4-32, 4 hosts of 4 chip(s) each"


def test_valid_workdirs() -> None:
    assert pod(topology="v4-16", workdir="/mnt/nfs/x", shared_workdir=True).hosts == 2
    assert pod(kind="queued-resource", slices=2, workdir="gs://b/x").slices == 2
    assert pod(topology="v5e-8").workdir == "runs/x"  # one host
