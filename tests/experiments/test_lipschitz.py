"""The picture of the local Lipschitz estimate, from runs' folders."""

import pathlib

import pytest

from experiments.legw import lipschitz
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.workdir import Workdir
from tests import tiny


def fake(folder: pathlib.Path, batch: int, values: list[float]) -> str:
    """A workdir with a record after every two updates."""
    config = tiny.digits(batch_size=batch, log__lipschitz_rows=64)
    run = Workdir(folder)
    run.check(config)
    run.write_config(config)
    with MetricsWriter(folder, 0, tensorboard=False) as writer:
        for number, value in enumerate(values, start=1):
            writer.write(2 * number, "train", {
                "loss": 1.0, "epoch": 2 * number * batch / 256, "lipschitz": value,
                "learning_rate": 0.1 * min(number, 2),
            })
    return str(folder)


def test_peaks_are_found_and_marked(tmp_path: pathlib.Path) -> None:
    given = [
        fake(tmp_path / "large", 128, [1.0, 2.0, 8.0, 4.0]),
        fake(tmp_path / "small", 32, [1.0, 5.0, 3.0]),
    ]
    path = tmp_path / "lipschitz.svg"
    lipschitz.main(lipschitz._parse([*given, f"--output={path}"]))
    assert path.read_text().startswith("<?xml")
    found = [lipschitz.read(run) for run in given]
    assert [lipschitz.peak(run) for run in found] == [2, 1]
    assert lipschitz.table(found).splitlines()[2:] == [
        "| 128 | 8 | 3 | 6 | 0.2 of 0.2 | 1 | 4 | 4 |",
        "| 32 | 5 | 0.5 | 4 | 0.2 of 0.2 | 1 | 3 | 0.75 |",
    ]
    by_epoch, by_update = lipschitz.picture(found).axes
    markers = [line for line in by_epoch.lines if len(line.get_xdata()) == 1]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in markers] == [(3, 8), (0.5, 5)]
    assert "over the same 64\ntraining examples" in lipschitz.page(found)


def test_a_run_without_the_estimate(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="has no record with the local Lipschitz estimate; train"):
        lipschitz.read(fake(tmp_path, 32, []))
