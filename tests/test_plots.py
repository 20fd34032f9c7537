"""A run that collects writes its layers, and the picture shows them."""

import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from lamb_tpu import plots
from lamb_tpu.metrics import read_records
from lamb_tpu.train import train
from tests import tiny


def _history(layers=("a", "b[0]", "b[1]"), steps=(1, 2, 4)):
    return [
        (step, {
            f"{quantity}/{layer}": value * step
            for layer in layers
            for quantity, value in (("ratios", 2.0), ("update_norms", 0.5), ("weight_norms", 4.0))
        })
        for step in steps
    ]


def _meshes(figure):
    """The values that the two heat maps show."""
    return [axes.collections[0].get_array() for axes in figure.axes[:2]]


def test_a_row_for_each_layer_and_a_column_for_each_update():
    ratios, turns = _meshes(plots.layer_figure(_history()))
    np.testing.assert_allclose(ratios, 2.0 * np.tile([1, 2, 4], (3, 1)))
    np.testing.assert_allclose(turns, 0.125)


def test_zeros_and_what_is_not_finite_are_left_out():
    history = _history()
    for _, values in history:
        values["weight_norms/a"] = 0.0
        values["ratios/b[0]"] = float("nan")
    ratios, turns = _meshes(plots.layer_figure(history))
    assert turns.mask[0].all() and not turns.mask[1:].any()
    assert ratios.mask[1].all() and not ratios.mask[[0, 2]].any()


def test_one_reading_and_many_layers():
    figure = plots.layer_figure(_history([f"layer_{i}" for i in range(400)], steps=(7,)))
    assert len(figure.axes[0].get_yticklabels()) <= 60
    figure.canvas.draw()


@pytest.mark.parametrize("history", [[], [(1, {})]])
def test_nothing_to_draw(history):
    with pytest.raises(ValueError, match="collect=True"):
        plots.layer_figure(history)


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("collected")
    train(tiny.digits(optimizer__collect=True, duration="4 steps"), workdir, quiet=True)
    return workdir


def _draw(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "lamb_tpu.plots", *map(str, arguments)],
        cwd=tiny.ROOT, capture_output=True, text=True,
    )


def test_of_a_run(collected):
    records = read_records(collected / "metrics.jsonl", "layers")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["update_norms/hidden0/kernel"] == 0.0  # warm-up: the first rate is 0
    assert records[1]["update_norms/hidden0/kernel"] > 0.0
    assert records[0]["ratios/hidden0/bias"] == 1.0  # by the rules biases do not adapt
    done = _draw(f"--workdir={collected}")
    assert done.returncode == 0 and done.stdout.strip() == str(collected / "layers.png")
    assert matplotlib.image.imread(collected / "layers.png").std() > 0.05


def test_help_names_the_flags():
    told = _draw("--help").stdout
    assert "--workdir: " in told and "--out: " in told


def test_mistakes_are_one_sentence(collected, trained, tmp_path):
    (tmp_path / "of_phases" / "phase_1").mkdir(parents=True)
    (tmp_path / "of_phases" / "phase_1" / "metrics.jsonl").touch()
    for arguments, said in (
        ([f"--workdir={tmp_path / 'of_phases'}"], "holds the phases phase_1; give the folder of"),
        ([f"--workdir={trained}", f"--out={tmp_path / 'x.png'}"], "set collect=True"),
        ([f"--workdir={tmp_path}"], "there is no"),
        ([f"--workdir={collected}", "--out=x.jpg"], "--out x.jpg must be a .png"),
        ([], "--workdir is missing"),
    ):
        done = _draw(*arguments)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
