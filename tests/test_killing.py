"""Tests that runs killed near changes of the batch size, or with a residual, equal undisturbed runs."""

import importlib
import pathlib
import random
import signal

import jax
import numpy as np
import pytest

from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import deciding, faults, keeping, tiny
from tests.test_train import without_seconds


def survive(
    module: str,
    name: str,
    moments: list[tuple[int, float]],
    tmp_path: pathlib.Path,
    devices: int = 1,
) -> None:
    """Asserts that a run killed at `moments`, pairs (updates, seconds), equals an undisturbed run."""
    full, killed = tmp_path / "full", tmp_path / "killed"

    def start(folder: pathlib.Path, *moment: str) -> int:
        process = tiny.start("tests.killing", module, name, str(folder), *moment, devices=devices)
        _, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        return process.returncode

    assert start(full) == 0
    print("\n| killed after update | delay, ms | last record | checkpoints |\n|--:|--:|--:|---|")
    for update, seconds in moments:
        assert start(killed, str(update), f"{seconds:.4f}") == -signal.SIGKILL
        metrics = killed / "metrics.jsonl"
        records = read_records(metrics) if metrics.exists() else []
        last = records[-1]["step"] if records else 0
        there = ", ".join(map(str, sorted(faults.checkpoints(killed))))
        print(f"| {update} | {1000 * seconds:.0f} | {last} | {there} |")
    assert start(killed) == 0
    config = importlib.import_module(module).config(name)
    tiny.same_state(config, killed, full)
    batches = [tiny.restored(config, folder)[1]["batches"] for folder in (full, killed)]
    assert batches[0] == batches[1]
    assert without_seconds(killed) == without_seconds(full)


@pytest.mark.long
@pytest.mark.parametrize("rule", deciding.RULES)
def test_killed_around_changes_of_the_batch(rule: str, tmp_path: pathlib.Path) -> None:
    """Kills one run 20 times, at most 30 ms after the start of an update near a batch size change."""
    generator, decided = random.Random(3), tmp_path / "decided"
    train(deciding.config(rule), decided, quiet=True)
    _, position = tiny.restored(deciding.config(rule), decided)
    changes = [first for first, _ in position["batches"]["pieces"][1:]]
    print(f"\n{rule}: the batch changes after updates {changes}")
    survive(
        "tests.deciding",
        rule,
        sorted(
            (
                max(0, generator.choice(changes[:-2]) + generator.choice((-1, 0, 1))),
                generator.uniform(0, 0.03),
            )
            for _ in range(20)
        ),
        tmp_path,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", keeping.METHODS)
def test_killed_with_a_residual(name: str, tmp_path: pathlib.Path) -> None:
    """Kills one run 20 times: twice around each change of the compiled program, then at random updates."""
    generator = random.Random(4)
    updates = [change + more for change in keeping.CHANGES[name] for more in (-1, 0)]
    updates += [generator.randrange(keeping.UPDATES - 1) for _ in range(20 - len(updates))]
    moments = sorted((update, generator.uniform(0, 0.03)) for update in updates)
    survive("tests.keeping", name, moments, tmp_path, devices=8)
    state, _ = tiny.restored(keeping.config(name), tmp_path / "killed")
    residual = jax.tree.leaves(state.parts["residual"]["kept"].device)
    assert residual and all(np.abs(leaf).max() > 0 for leaf in residual)
