"""The arguments of a run that the launcher reads and checks."""

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.launch import arguments
from tests.raising import rejected


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
def test_workdir(given: list[str], workdir: str | None) -> None:
    assert arguments.workdir(given) == workdir
    if workdir is None:
        with rejected("--workdir", problem="is missing in the arguments after --"):
            arguments.needed_folder(given)
    else:
        assert arguments.needed_folder(given) == workdir


REPRODUCE, SWEEP = "lamb_tpu.reproduce", "lamb_tpu.sweep"


def test_folder_of_every_module() -> None:
    given = ["run", "--records=gs://b/r", "--workdir", "w"]
    assert arguments.needed_folder(given, REPRODUCE) == "gs://b/r"
    assert arguments.needed_folder(given, SWEEP) == "w"
    with rejected("--records", problem="is missing in the arguments after --"):
        arguments.needed_folder(["run", "lamb/mnist"], REPRODUCE)
    with pytest.raises(UserError, match="--records gs://b/.. has"):
        arguments.needed_folder(["run", "--records=gs://b/.."], REPRODUCE)


@pytest.mark.parametrize(
    "given, module, array, key, problem",
    [
        ([], arguments.TRAIN, 8, "--array", "would train the same run in every job"),
        (["run"], REPRODUCE, None, "--array", "is missing, and lamb_tpu.reproduce runs as"),
        ([], SWEEP, None, "--array", "is missing, and lamb_tpu.sweep runs as an array"),
        (["show", "lamb"], REPRODUCE, 2, "the arguments after --", "do not begin with run"),
        ([], REPRODUCE, 2, "the arguments after --", "do not begin with run"),
        (["run", "--index=0/2"], REPRODUCE, 2, "--index", "is set by the launcher"),
        (["--index", "0/2"], SWEEP, 2, "--index", "is set by the launcher"),
        (["-index=0/2"], SWEEP, 2, "--index", "is set by the launcher"),
    ],
)
def test_array_errors(
    given: list[str], module: str, array: int | None, key: str, problem: str
) -> None:
    with rejected(key, problem=problem):
        arguments.check_array(given, module, array)


def test_array_that_fits() -> None:
    arguments.check_array(["--a=--index"], arguments.TRAIN, None)
    arguments.check_array(["run", "lamb/mnist"], REPRODUCE, 1)
    arguments.check_array(["--search=indexed=1"], SWEEP, 3)
