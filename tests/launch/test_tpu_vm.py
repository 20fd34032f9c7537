"""Steps on TPU VMs, with a fake gcloud and hosts that run their commands."""

import pathlib
import re
import sys

import pytest

from lamb_tpu.launch import local_steps, tpu_vm
from lamb_tpu.launch import pod as pod_lib
from lamb_tpu.launch import steps as steps_lib
from tests.launch.fakes import Cloud, checkout, read
from tests.raising import rejected
from tests.tiny import ROOT

# Arguments that would break a command without correct (single or double) quoting.
HOSTILE = [
    "--config=digits",
    "--config.note=two words",
    '--a=it\'s "both"',
    "--b=$(touch pwned)",
    "--c=`touch pwned`",
    "--d=$HOME;touch pwned",
    "--e=a\\b",
    "--f=*",
    "--g=",
    "--h=line\nbreak",
    "--i=''",
    "--j=!x",
    "--k=%s #",
    "-",
    "plain & word",
]
ZONE, PROJECT = "us-central2-b", "my project"
WHERE = [f"--zone={ZONE}", f"--project={PROJECT}"]


def planned(
    kind: str = "tpu-vm",
    topology: str = "v4-8",
    train: list[str] | None = None,
    workdir: str = "runs/it's $(x)",
    slices: int = 1,
    spot: bool = False,
    image: str | None = None,
    **options: object,
) -> list[steps_lib.Step]:
    train = [*(HOSTILE if train is None else train), f"--workdir={workdir}"]
    pod = pod_lib.make_pod(kind, topology, "pod-1", train, slices, spot, image)
    return tpu_vm.steps(pod, kind, ZONE, **({"project": PROJECT} | options))


def run(steps: list[steps_lib.Step], start: int = 2, delete: bool = False) -> int:
    """Runs step number `start` and all later steps; by default, all steps except the check of the config."""
    again = ["python", "-m", "lamb_tpu.launch", "tpu-vm", "--run", "--", *HOSTILE]
    return steps_lib.run(steps, start, delete, again)


def test_order_and_quoting_of_all_calls(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    steps = planned(spot=True, create_flags=["--network=my net", "--reserved"])
    (cloud.hosts[0] / "lamb_tpu" / "runs" / "it's $(x)").mkdir(parents=True)
    (cloud.hosts[0] / "lamb_tpu" / "runs" / "it's $(x)" / "metrics.jsonl").write_text("{}\n")
    assert run(steps, delete=True) == 0, capfd.readouterr().err
    group = ["compute", "tpus", "tpu-vm"]
    create, copy, install, start, follow, fetch, delete = cloud.calls()
    assert create == [
        *group,
        "create",
        "pod-1",
        *WHERE,
        *"--accelerator-type=v4-8 --version=tpu-ubuntu2204-base --spot".split(),
        "--network=my net",
        "--reserved",
    ]
    assert copy == [*group, "scp", "pod-1.tar.gz", "pod-1:", *WHERE, "--worker=all"]
    for call, worker in ((install, "all"), (start, "all"), (follow, "0"), (fetch, "0")):
        assert call[:-1] == [*group, "ssh", "pod-1", *WHERE, f"--worker={worker}"]
        assert call[-1].startswith("--command=")
    assert delete == [*group, "delete", "pod-1", *WHERE, "--quiet"]
    # The host has the code of the commit, and training received its arguments unchanged.
    assert (cloud.hosts[0] / "lamb_tpu" / "code.py").read_text() == "1\n"
    assert cloud.trained() == [[*HOSTILE, "--workdir=runs/it's $(x)"]]
    assert not list(cloud.folder.parent.rglob("pwned"))
    assert pathlib.Path("runs/it's $(x)/metrics.jsonl").read_text() == "{}\n"
    assert not pathlib.Path("pod-1.tar.gz").exists()
    shown = capfd.readouterr().out
    numbers = re.findall(r"^# (\d)\. ", shown, re.MULTILINE)
    assert numbers == [str(number) for number in range(2, len(steps) + 1)]
    # A step is printed before its output.
    assert shown.index("# 7. ") < shown.index("\ntraining\n") < shown.index("# 8. ")


@pytest.mark.parametrize("hosts", [2])
def test_all_slices_and_hosts_of_a_queued_resource(
    cloud: Cloud, capfd: pytest.CaptureFixture
) -> None:
    (cloud.folder / "states").write_text("ACCEPTED WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    steps = planned("queued-resource", "v5e-16", slices=2, workdir="gs://bucket/my run")
    assert run(steps, delete=True) == 0
    group, calls = ["compute", "tpus", "queued-resources"], cloud.calls()
    assert calls[0] == [
        *group,
        "create",
        "pod-1",
        *WHERE,
        *"--node-count=2 --node-prefix=pod-1 --accelerator-type=v5litepod-16".split(),
        "--runtime-version=v2-alpha-tpuv5-lite",
    ]
    assert calls[1:5] == [[*group, "describe", "pod-1", *WHERE, "--format=value(state.state)"]] * 4
    assert calls[5] == [
        *group,
        *"scp pod-1.tar.gz pod-1:".split(),
        *WHERE,
        "--node=all",
        "--worker=all",
    ]
    for call, which in zip(calls[6:9], ("all", "all", "0"), strict=True):
        assert call[:-1] == [*group, "ssh", "pod-1", *WHERE, f"--node={which}", f"--worker={which}"]
    assert calls[9] == ["storage", "rsync", "gs://bucket/my run", "runs/my run", "--recursive"]
    assert calls[10] == [*group, "delete", "pod-1", *WHERE, "--force", "--quiet"]
    assert len(calls) == 11
    for host in range(2):
        assert cloud.trained(host) == [[*HOSTILE, "--workdir=gs://bucket/my run"]]
    assert "PROVISIONING\nACTIVE\n" in capfd.readouterr().out


def test_one_slice_of_a_queued_resource_has_the_name(cloud: Cloud) -> None:
    create = planned("queued-resource", "v6e-8")[2].command
    assert "--node-id=pod-1" in create and "--node-count" not in create


def test_unavailable_resources_end_the_wait(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    (cloud.folder / "states").write_text("ACCEPTED FAILED ACTIVE")
    assert run(planned("queued-resource", "v6e-8")) == 1
    assert [call[3] for call in cloud.calls()] == ["create", "describe", "describe"]
    assert "step 4 (wait until the slices exist) failed with status 1" in capfd.readouterr().err


def test_a_preempted_run_is_restarted(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    (cloud.hosts[0] / "statuses").write_text("75 143 0")
    assert run(planned(workdir="gs://bucket/run")) == 0
    assert cloud.trained() == [[*HOSTILE, "--workdir=gs://bucket/run"]] * 3
    out = capfd.readouterr().out
    assert "preempted (status 75): starting again" in out and "(status 143)" in out


def test_a_failed_run_is_not_restarted(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    (cloud.hosts[0] / "statuses").write_text("3 0")
    steps = planned(workdir="gs://bucket/run")
    assert run(steps) == 1
    assert len(cloud.trained()) == 1
    err = capfd.readouterr().err
    assert "step 7 (show the output of the first host until the run ends) failed with st" in err
    assert "status 3" in err


def test_run_outlives_the_connection_that_started_it(
    cloud: Cloud, capfd: pytest.CaptureFixture
) -> None:
    steps = planned(workdir="gs://bucket/run")
    (cloud.hosts[0] / "waits").touch()
    started = [step for step in steps if not step.title.startswith(("show", "fetch", "delete"))]
    assert run(started) == 0  # all processes that the shell waits for have ended
    assert (cloud.hosts[0] / "lamb_tpu" / "run.lock").exists()
    # Repeating the step starts no second run.
    assert run(started, start=len(started)) == 0
    assert "the run is already active" in capfd.readouterr().out
    assert not (cloud.hosts[0] / "lamb_tpu" / "run.status").exists()
    (cloud.hosts[0] / "goes_on").touch()
    assert run(steps, start=len(started) + 1) == 0
    assert len(cloud.trained()) == 1


@pytest.mark.parametrize(
    "step, verb",
    [(3, "create"), (4, "scp"), (5, "ssh"), (6, "ssh"), (7, "ssh"), (8, "rsync"), (9, "delete")],
)
def test_failure_stops_at_the_step(
    cloud: Cloud,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    verb: str,
) -> None:
    monkeypatch.setenv("FAILS", "1")
    steps = planned(workdir="gs://bucket/run")
    assert run(steps, start=step, delete=True) == 1
    (call,) = cloud.calls()
    assert verb in call
    output = capfd.readouterr().err.splitlines()
    (error,) = (line for line in output if line.startswith("error: "))
    title = steps[step - 1].title
    assert f"error: step {step} ({title}) failed with status 7; continue from there with: " in error
    assert f"python -m lamb_tpu.launch tpu-vm --run --from-step={step} -- --config=digits" in error
    delete = "gcloud compute tpus tpu-vm delete pod-1 --zone=us-central2-b --project='my project'"
    assert f"the machines cost money until this deletes them: {delete} --quiet" in output


def test_continues_from_the_failed_step(
    cloud: Cloud, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = planned(workdir="gs://bucket/run")
    monkeypatch.setenv("FAILS", "3")
    assert run(steps) == 1 and "--from-step=5 " in capfd.readouterr().err
    assert run(steps, start=5) == 0
    assert [call[3] for call in cloud.calls()[:-1]] == ["create", "scp", *["ssh"] * 4]
    assert len(cloud.trained()) == 1


def test_nothing_is_deleted_without_a_request(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    assert run(planned(workdir="gs://bucket/run")) == 0
    assert all("delete" not in call for call in cloud.calls())
    assert "cost money until this deletes them: gcloud compute tpus tpu-vm delete pod-1 " in (
        capfd.readouterr().err
    )


def test_image_instead_of_a_copy(cloud: Cloud) -> None:
    image = "us-docker.pkg.dev/project/repository/lamb_tpu:1"
    steps = planned(image=image, workdir="/mnt/disk")
    assert run(steps[:-2]) == 0
    assert not any("scp" in call for call in cloud.calls())
    folder = str(cloud.hosts[0] / "lamb_tpu")
    pulled, trained = read(cloud.hosts[0] / "docker.jsonl")
    assert pulled == ["pull", "--quiet", image]
    assert trained == [
        *"run --rm --privileged --user=root --network=host".split(),
        f"--volume={folder}:{folder}",
        f"--workdir={folder}",
        "--volume=/mnt/disk:/mnt/disk",
        image,
        *"python -u -m lamb_tpu.train".split(),
        *HOSTILE,
        "--workdir=/mnt/disk",
    ]
    # Only Google's registries need authentication.
    assert ["auth", "configure-docker", "us-docker.pkg.dev", "--quiet"] in cloud.calls()
    assert "configure-docker" not in planned(image="python:3.12")[2].command


def test_data_of_a_bucket(cloud: Cloud) -> None:
    steps = planned(data="gs://bucket/my text")
    (step,) = (step for step in steps if step.title == "copy the data to all hosts")
    assert steps.index(step) == 5 and "--worker=all" in step.command
    assert steps_lib.run([step], 1, False, []) == 0
    assert cloud.calls()[1] == [
        "storage",
        "rsync",
        "gs://bucket/my text",
        "lamb_tpu/data",
        "--recursive",
    ]
    assert (cloud.hosts[0] / "lamb_tpu" / "data").is_dir()
    with rejected("--data", "text", "is not in a bucket"):
        planned(data="text")


@pytest.mark.long
def test_an_error_in_the_config_creates_nothing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    steps = planned(train=["--config=digits", "--config.batchsize=3"], workdir="gs://bucket/run")
    assert run(steps, start=1) == 1
    assert not cloud.calls()
    output = capfd.readouterr().err
    assert "config.batchsize" in output and "step 1 (check the config on this machine) f" in output
    assert "cost money" not in output
    assert sys.executable in steps[0].command


@pytest.mark.parametrize(
    "topology, accelerator, version",
    [
        ("v2-8", "v2-8", "tpu-ubuntu2204-base"),
        ("v3-32", "v3-32", "tpu-ubuntu2204-base"),
        ("v5p-256", "v5p-256", "v2-alpha-tpuv5"),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5litepod-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-256", "v6e-256", "v2-alpha-tpuv6e"),
    ],
)
def test_software_version_of_the_generation(topology: str, accelerator: str, version: str) -> None:
    create = planned(topology=topology, workdir="gs://bucket/run")[2].command
    assert f"--accelerator-type={accelerator} " in create and f"--version={version}" in create
    other = planned(topology=topology, workdir="gs://bucket/run", version="my-version")[2].command
    assert "--version=my-version" in other and version not in other


def test_no_checkout_to_copy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_steps, "__file__", str(tmp_path / "a" / "b" / "x.py"))
    with rejected("--image", problem=f"is missing, and {tmp_path} is not a git checkout"):
        planned()
    assert planned(image="python:3.12")


def test_uncommitted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_steps, "__file__", str(checkout(tmp_path)))
    assert not local_steps.uncommitted()
    (tmp_path / "code.py").write_text("2\n")
    assert local_steps.uncommitted()
