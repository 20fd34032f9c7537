"""The benchmarks run, at small size, and print what they promise."""

import pytest

from tests import tiny
from tests.shared import shared


def test_update_speed():
    done = tiny.command("experiments.bench.update_speed", "--layers=1", "--width=64", "--rounds=1")
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["| optax.adamw", "| optax.lamb", "| lamb", "| lamb, stacked layers"]


@pytest.mark.long
def test_train_loop_compiles_once(tmp_path):
    folder = shared("data", "mnist")
    done = tiny.command(
        "experiments.bench.train_loop", f"--data_dir={folder}", f"--prepared_dir={tmp_path}",
        "--networks=lenet5", "--steps=20", "--rounds=1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("| 1 |")
