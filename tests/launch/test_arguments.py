"""The launcher finds the workdir among the train arguments."""

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.launch import arguments


@pytest.mark.parametrize(
    "given, workdir",
    [
        (["--workdir=a", "-workdir=b c"], "b c"),
        (["--config", "c.py", "--workdir", "gs://x/y", "z"], "gs://x/y"),
        (["--config.workdir=a"], None),
        (["--workdir="], None),
        ([], None),
    ],
)
def test_workdir_that_train_would_use(given: list[str], workdir: str | None) -> None:
    assert arguments.workdir(given) == workdir
    if workdir is None:
        with pytest.raises(UserError, match="--workdir is missing among the arguments behind --"):
            arguments.needed_workdir(given)
    else:
        assert arguments.needed_workdir(given) == workdir
