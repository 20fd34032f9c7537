"""Commands for hosts; tests/launch/test_tpu_vm.py runs them."""

import pytest

from lamb_tpu.launch import remote
from tests.launch import shell

TRAIN = ["--config=digits", "--a=it's $(x)"]
COMMANDS = {
    "install": remote.install("pod.tar.gz"),
    "pull": remote.pull("us-docker.pkg.dev/a/b/c:1"),
    "start": remote.start(remote.train(TRAIN, None, "runs/x")),
    "start with an image": remote.start(remote.train(TRAIN, "image:1", "/mnt/x")),
    "follow": remote.follow(),
    "pack": remote.pack("runs/it's"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_shells_read_it(name: str) -> None:
    shell.parsed(COMMANDS[name])
    shell.checked(COMMANDS[name])


def test_versions_are_the_pinned_ones_of_a_python_that_is_supported() -> None:
    assert "--constraint=requirements.txt" in COMMANDS["install"]
    assert "[train,tpu]" in COMMANDS["install"] and "--python=3.12" in COMMANDS["install"]
