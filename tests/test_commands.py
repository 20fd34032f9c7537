"""Tests that commands in forks of one process give the same results as in new processes."""

import os

import pytest

from tests import commands, tiny

WRONG = ["--config=digits", "--config.batch_size=36", "--workdir=none"]


@pytest.mark.parametrize("line", [["lamb_tpu.train", *WRONG], ["lamb_tpu.completion", "bash"]])
def test_fork_and_fresh_process(line: list[str]) -> None:
    forked, fresh = (tiny.command(*line, devices=8, fresh=fresh) for fresh in (False, True))
    assert vars(forked) == vars(fresh)


def environment() -> dict[str, str]:
    """Returns the environment, with the server's values of the variables that are read at start-up.

    Another test in this process may have loaded a library that sets some of these variables.
    """
    current = dict(os.environ)
    early = commands.early(current)
    return {key: value for key, value in current.items() if key not in early} | (
        commands._server().early
    )


def test_environment_of_a_command() -> None:
    """A variable that Python or JAX reads at start-up needs a new process; a fork gets other variables."""
    line = ["tests.print_config", "--config=digits:smoke", "--print-config"]
    before = commands.spent
    outcome = commands.run(line, environment() | {"HOME": "/nowhere"}, 60)
    assert outcome is not None and outcome["status"] == 0, outcome
    assert commands.spent > before
    assert commands.run(line, environment() | {"JAX_ENABLE_X64": "1"}, 60) is None
    fewer = {key: value for key, value in environment().items() if key != "XLA_FLAGS"}
    assert commands.run(line, fewer, 60) is None


def test_a_command_that_does_not_end() -> None:
    outcome = commands.run(["timeit", "-n", "1", "while True: pass"], environment(), 0.3)
    assert outcome is not None and outcome["status"] == -9
