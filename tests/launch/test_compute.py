"""Steps on Compute Engine, with a fake gcloud and hosts that run their commands."""

import json
import pathlib

import pytest

from lamb_tpu.launch import compute
from lamb_tpu.launch import pod as pod_lib
from lamb_tpu.launch import steps as steps_lib
from tests.launch import shell
from tests.launch.fakes import Cloud, read
from tests.launch.test_tpu_vm import HOSTILE
from tests.raising import rejected

ZONE, PROJECT = "us-east5-a", "my-project"
WHERE = [f"--zone={ZONE}", f"--project={PROJECT}"]
PLACE = ["--region=us-east5", f"--project={PROJECT}"]
IMAGE = ["--image-project=ubuntu-os-accelerator-images"]


def planned(
    topology: str = "v6e-4",
    workdir: str = "gs://bucket/my run",
    image: str | None = None,
    train: list[str] | None = None,
    **options: object,
) -> list[steps_lib.Step]:
    train = [*(HOSTILE if train is None else train), f"--workdir={workdir}"]
    pod = pod_lib.make_pod("compute", topology, "pod-1", train, image=image)
    return compute.steps(pod, ZONE, **({"project": PROJECT} | options))


def run(steps: list[steps_lib.Step]) -> int:
    """Runs all steps except the first, which checks the config; test_tpu_vm.py tests that step."""
    return steps_lib.run(steps, 2, True, ["python", "-m", "lamb_tpu.launch", "compute", "--run"])


def test_one_host_is_an_instance(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    steps = planned(workdir="runs/it's $(x)", create_flags=["--network=my net"])
    (cloud.hosts[0] / "lamb_tpu" / "runs" / "it's $(x)").mkdir(parents=True)
    (cloud.hosts[0] / "lamb_tpu" / "runs" / "it's $(x)" / "metrics.jsonl").write_text("{}\n")
    assert run(steps) == 0, capfd.readouterr().err
    create, answer, copy, install, start, follow, fetch, delete = cloud.calls()
    assert create == [
        *"compute instances create pod-1".split(),
        *WHERE,
        "--machine-type=ct6e-standard-4t",
        *IMAGE,
        *"--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e --boot-disk-size=200GB".split(),
        *"--maintenance-policy=TERMINATE --scopes=cloud-platform".split(),
        "--network=my net",
    ]
    assert answer == ["compute", "ssh", "pod-1", *WHERE, "--command=true"]
    assert copy == ["compute", "scp", "pod-1.tar.gz", "pod-1:", *WHERE]
    for call in (install, start, follow, fetch):
        assert call[:-1] == ["compute", "ssh", "pod-1", *WHERE]
    assert delete == ["compute", "instances", "delete", "pod-1", *WHERE, "--quiet"]
    assert cloud.trained() == [[*HOSTILE, "--workdir=runs/it's $(x)"]]
    assert not list(cloud.folder.parent.rglob("pwned"))
    assert pathlib.Path("runs/it's $(x)/metrics.jsonl").read_text() == "{}\n"
    # A single process needs no coordinator.
    assert not json.loads((cloud.hosts[0] / "variables.json").read_text())


@pytest.mark.parametrize("hosts", [2])
def test_slice_of_several_hosts_is_a_group(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    steps = planned("tpu7x-16", capacity=compute.Capacity(flex_start="7d"))
    assert run(steps) == 0, capfd.readouterr().err
    calls = [call for call in cloud.calls() if "list-instances" not in call]
    group = ["compute", "instance-groups", "managed"]
    assert calls[0] == [
        *"compute resource-policies create workload-policy pod-1".split(),
        *PLACE,
        *"--type=HIGH_THROUGHPUT --accelerator-topology=2x2x2".split(),
        "--accelerator-topology-mode=AUTO_CONNECT",
    ]
    assert calls[1] == [
        *"compute instance-templates create pod-1".split(),
        f"--project={PROJECT}",
        "--instance-template-region=us-east5",
        "--machine-type=tpu7x-standard-4t",
        *IMAGE,
        *"--image-family=ubuntu-accel-2404-amd64-tpu-tpu7x --boot-disk-size=200GB".split(),
        *"--boot-disk-type=hyperdisk-balanced --maintenance-policy=TERMINATE".split(),
        *"--scopes=cloud-platform --provisioning-model=FLEX_START --max-run-duration=7d".split(),
        "--instance-termination-action=DELETE",
    ]
    path = f"projects/{PROJECT}/regions/us-east5"
    assert calls[2] == [
        *group,
        "create",
        "pod-1",
        *WHERE,
        "--size=2",
        f"--template={path}/instanceTemplates/pod-1",
        f"--workload-policy={path}/resourcePolicies/pod-1",
        "--target-size-policy-mode=bulk",
        "--default-action-on-vm-failure=do-nothing",
    ]
    assert calls[3] == [*group, "wait-until", "pod-1", *WHERE, "--stable"]
    assert calls[-3:] == [
        [*group, "delete", "pod-1", *WHERE, "--quiet"],
        ["compute", "instance-templates", "delete", "pod-1", *PLACE, "--quiet"],
        ["compute", "resource-policies", "delete", "pod-1", *PLACE, "--quiet"],
    ]
    for rank, host in enumerate(cloud.hosts):
        assert (host / "lamb_tpu" / "code.py").read_text() == "1\n"
        assert cloud.trained(rank) == [[*HOSTILE, "--workdir=gs://bucket/my run"]]
        assert json.loads((host / "variables.json").read_text()) == {
            "JAX_COORDINATOR_ADDRESS": "host0:8476",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
        }
    assert not list(cloud.folder.parent.rglob("pwned"))
    assert not list(pathlib.Path().glob("pod-1*"))


@pytest.mark.parametrize(
    "topology, machine, size, shape",
    [
        ("v5p-8", "ct5p-hightpu-4t", 1, ""),
        ("v5p-256", "ct5p-hightpu-4t", 32, "4x4x8"),
        ("v6e-1", "ct6e-standard-1t", 1, ""),
        ("v6e-4", "ct6e-standard-4t", 1, ""),
        ("v6e-8", "ct6e-standard-8t", 1, ""),
        ("v6e-256", "ct6e-standard-4t", 64, "16x16"),
        ("tpu7x-8", "tpu7x-standard-4t", 1, ""),
        ("tpu7x-128", "tpu7x-standard-4t", 16, "4x4x4"),
    ],
)
def test_machines_of_every_generation(
    cloud: Cloud, topology: str, machine: str, size: int, shape: str
) -> None:
    steps = [step for step in planned(topology, image="a/b:1") if step.title.startswith("create ")]
    assert steps_lib.run(steps, 1, False, []) == 0
    words = [word for call in cloud.calls() for word in call]
    assert words.count(f"--machine-type={machine}") == 1
    assert (f"--size={size}" in words) == (size > 1)
    assert (f"--accelerator-topology={shape}" in words) == (size > 1)


@pytest.mark.parametrize("hosts", [2])
def test_a_failed_host_fails_the_step(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (step,) = (step for step in planned("v5p-16") if step.title.startswith("install the code"))
    (cloud.hosts[0] / "pod-1.tar.gz").write_text("no archive")
    assert steps_lib.run([step], 1, False, []) == 1
    assert "failed with status" in capfd.readouterr().err


@pytest.mark.parametrize("hosts", [2])
def test_containers_get_the_variables(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    assert run(planned("v6e-16", image="us-docker.pkg.dev/p/r/lamb_tpu:1")) == 0
    pulled, trained = read(cloud.hosts[1] / "docker.jsonl")
    assert pulled == ["pull", "--quiet", "us-docker.pkg.dev/p/r/lamb_tpu:1"]
    assert [word for word in trained if word.startswith("--env=")] == [
        "--env=JAX_COORDINATOR_ADDRESS=host0:8476",
        "--env=JAX_NUM_PROCESSES=2",
        "--env=JAX_PROCESS_ID=1",
    ]
    del capfd


@pytest.mark.parametrize(
    "capacity, flags",
    [
        (compute.Capacity(), []),
        (
            compute.Capacity(spot=True),
            ["--provisioning-model=SPOT", "--instance-termination-action=DELETE"],
        ),
        (
            compute.Capacity(reservation="a"),
            [
                "--provisioning-model=RESERVATION_BOUND",
                "--instance-termination-action=DELETE",
                "--reservation-affinity=specific",
                "--reservation=a",
            ],
        ),
    ],
)
def test_capacity(capacity: compute.Capacity, flags: list[str]) -> None:
    assert capacity.flags() == flags


@pytest.mark.parametrize(
    "topology, options, key, problem",
    [
        ("v6e-4", {"capacity": compute.Capacity(True, "7d")}, "--spot", "excludes --flex-start"),
        ("v6e-4", {"capacity": compute.Capacity(False, "soon")}, "--flex-start", "is not a dura"),
        ("v6e-4", {"capacity": compute.Capacity(reservation="")}, "--reservation", "is empty"),
        ("v6e-16", {"project": None}, "--project", "is missing, and a slice of 4 hosts needs it"),
    ],
)
def test_errors(topology: str, options: dict[str, object], key: str, problem: str) -> None:
    with rejected(key, problem=problem):
        planned(topology, image="python:3.12", **options)


@pytest.mark.parametrize("topology", ["v6e-1", "v5p-256"])
def test_shells_read_all_steps(topology: str) -> None:
    shell.checked(steps_lib.script(planned(topology, image="python:3.12"), 1))
