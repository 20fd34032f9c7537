"""The figure of the local Lipschitz estimate, made from the folders of runs."""

import pathlib

import pytest

from experiments.legw import lipschitz
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.workdir import Workdir
from tests import figures, tiny


def fake(folder: pathlib.Path, batch: int, values: list[float]) -> str:
    """Writes a workdir with a record after every two updates."""
    config = tiny.digits(batch_size=batch, log__lipschitz_rows=64)
    run = Workdir(folder)
    run.check(config)
    run.write_config(config)
    with MetricsWriter(folder, 0, tensorboard=False) as writer:
        for number, value in enumerate(values, start=1):
            writer.write(
                2 * number,
                "train",
                {
                    "loss": 1.0,
                    "epoch": 2 * number * batch / 256,
                    "lipschitz": value,
                    "learning_rate": 0.1 * min(number, 2),
                },
            )
    return str(folder)


def test_peaks_are_marked(tmp_path: pathlib.Path) -> None:
    given = [
        fake(tmp_path / "large", 128, [1.0, 90.0, 2.0, 2.5, 8.0, 7.0, 9.0, 3.0]),
        fake(tmp_path / "small", 32, [1.0, 5.0, 3.0, 2.0, 1.0]),
    ]
    path = tmp_path / "lipschitz.svg"
    lipschitz.main(lipschitz._parse([*given, f"--output={path}"]))
    assert path.read_text().startswith("<?xml")
    actual = [lipschitz.read(run) for run in given]
    # The second estimate of the first run is an outlier, which does not affect a median of five.
    assert lipschitz.smooth(actual[0]["lipschitz"]) == [2, 2.25, 2.5, 7, 7, 7, 7.5, 7]
    assert [lipschitz.peak(run) for run in actual] == [6, 0]
    assert lipschitz.table(actual).splitlines()[2:] == [
        "| 128 | 7.5 | 7 | 14 | 0.2 of 0.2 | 4 | 90, 2 | 1 | 8 |",
        "| 32 | 3 | 0.25 | 2 | 0.1 of 0.2 | 0.25 | 5, 0.5 | 1 | 1.25 |",
    ]
    figure = lipschitz.draw(actual)
    figures.check_space(figure)
    by_epoch, by_update = figure.axes
    for axes, positions in ((by_epoch, (7, 0.25)), (by_update, (14, 2))):
        markers = [line for line in axes.lines if len(line.get_xdata()) == 1]
        assert [line.get_xdata()[0] for line in markers] == list(positions)
        assert [line.get_ydata()[0] for line in markers] == [7.5, 3]
    assert "on the same\n64 training examples" in lipschitz.page(actual)


def test_a_run_without_the_estimate(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="has no record with a local Lipschitz estimate; train"):
        lipschitz.read(fake(tmp_path, 32, []))
