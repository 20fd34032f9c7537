"""The text of the commands for hosts; test_tpu_vm.py runs the commands."""

import pytest

from lamb_tpu.launch import compute, remote, steps
from lamb_tpu.launch.pod import make_pod
from tests.launch import shell

TRAIN = ["--config=digits", "--a=it's $(x)"]
COMMANDS = {
    "install": remote.install("pod.tar.gz", remote.TPU_VM),
    "pull": remote.pull("us-docker.pkg.dev/a/b/c:1", remote.TPU_VM),
    "start": remote.start(remote.train(TRAIN, None, "runs/x", remote.TPU_VM), remote.TPU_VM),
    "start with an image": remote.start(
        remote.train(TRAIN, "image:1", "/mnt/x", remote.TPU_VM), remote.TPU_VM
    ),
    "follow": remote.follow(),
    "pack": remote.pack("runs/it's"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_shells_read_it(name: str) -> None:
    shell.checked(COMMANDS[name])


def test_install_pins_versions() -> None:
    assert "--constraint=requirements.txt" in COMMANDS["install"]
    assert "[train,tpu]" in COMMANDS["install"] and "--python=3.12" in COMMANDS["install"]


@pytest.mark.parametrize(
    "workdir, extras", [("gs://bucket/run", "train,tpu,gcs"), ("runs/x", "train,tpu")]
)
def test_hosts_with_a_bucket_install_its_library(workdir: str, extras: str) -> None:
    pod = make_pod("compute", "v6e-1", "a", [f"--workdir={workdir}"])
    text = steps.script(compute.steps(pod, "us-east5-a"))
    assert f'-e ".[{extras}]"' in text
    # A container needs no installation.
    pod = make_pod("compute", "v6e-1", "a", [f"--workdir={workdir}"], image="a/b:1")
    assert "pip install" not in steps.script(compute.steps(pod, "us-east5-a"))
