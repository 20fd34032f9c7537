"""Tests the figures of a run: its curves and, with config.optimizer.collect, its layers."""

import itertools
import pathlib
import shutil

import matplotlib.image
import numpy as np
import pytest

from lamb_tpu import plots
from lamb_tpu.optim import parameters
from lamb_tpu.store import runs
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny


def _history(layers=("a", "b[0]", "b[1]"), steps=(1, 2, 4)):
    values = {"ratios": 2.0, "update_norms": 0.5, "weight_norms": 4.0}
    each = {f"{name}/{layer}": value for layer in layers for name, value in values.items()}
    return [(step, {name: value * step for name, value in each.items()}) for step in steps]


def _meshes(figure):
    return [axes.collections[0].get_array() for axes in figure.axes[2:4]]


def test_a_row_for_each_layer_and_a_column_for_each_update():
    ratios, lengths = _meshes(plots.layer_figure(_history()))
    np.testing.assert_allclose(ratios, 2.0 * np.tile([1, 2, 4], (3, 1)))
    np.testing.assert_allclose(lengths, 0.125)


def test_zeros_and_what_is_not_finite_are_left_out():
    history = _history()
    for _, values in history:
        values["weight_norms/a"] = 0.0
        values["ratios/b[0]"] = float("nan")
    ratios, lengths = _meshes(plots.layer_figure(history))
    assert lengths.mask[0].all() and not lengths.mask[1:].any()
    assert ratios.mask[1].all() and not ratios.mask[[0, 2]].any()


def test_lines_over_training_show_the_same():
    figure = plots.layer_figure(_history())
    left, right = figure.axes[:2]
    assert [line.get_label() for line in left.lines] == ["a", "b[0]", "b[1]"]
    for line in left.lines:
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 4])
        np.testing.assert_allclose(line.get_ydata(), [2, 4, 8])
    np.testing.assert_allclose(right.lines[0].get_ydata(), 0.125)


def test_layers_that_are_asked_for_in_their_order():
    figure = plots.layer_figure(_history(), ["b[1]", "a"], "digits, a network")
    assert [text.get_text() for text in figure.axes[2].get_yticklabels()] == ["b[1]", "a"]
    assert figure.axes[2].get_ylim() == (2, 0)  # the first layer at the top
    assert figure.get_suptitle() == "digits, a network"
    assert figure.axes[2].get_xlabel() == "completed updates"


@pytest.mark.parametrize("count", [1, 12, 75, pytest.param(400, marks=pytest.mark.long)])
def test_labels_of_many_layers_do_not_overlap(count):
    layers = [f"encoder/layer_{i}/attention/query/kernel" for i in range(count)]
    figure = plots.layer_figure(_history(layers))
    figure.canvas.draw()
    labels = figure.axes[2].get_yticklabels()
    assert min(count, 130) <= len(labels) <= 160 or count == 1
    boxes = [label.get_window_extent() for label in labels]
    for above, below in itertools.pairwise(boxes):
        assert above.y0 >= below.y1 - 1  # one pixel for the frame around the letters
    assert len(figure.axes[0].lines) == count + (count > 8)


def test_one_reading():
    plots.layer_figure(_history(steps=(7,))).canvas.draw()


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
    return tiny.command("lamb_tpu.plots", *map(str, arguments))


@pytest.mark.long
def test_of_a_run(collected):
    records = read_records(collected / "metrics.jsonl", "layers")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["update_norms/hidden0/kernel"] == 0.0  # warm-up: the first rate is 0
    assert records[1]["update_norms/hidden0/kernel"] > 0.0
    assert records[0]["ratios/hidden0/bias"] == 1.0  # by the rules, biases do not adapt
    done = _draw(f"--workdir={collected}")
    assert done.returncode == 0
    assert done.stdout.split() == [str(collected / "curves.png"), str(collected / "layers.png")]
    assert matplotlib.image.imread(collected / "layers.png").std() > 0.05


@pytest.mark.long
def test_a_run_shows_the_layers_that_adapt_in_the_network_s_order(tmp_path):
    sizes = (8,) * 11  # hidden10 sorts before hidden2
    config = tiny.digits(optimizer__collect=True, duration="2 steps", model__hidden_sizes=sizes)
    train(config, tmp_path, quiet=True)
    records = read_records(tmp_path / "metrics.jsonl", "layers")
    history = [(record["step"], record) for record in records]
    figure = plots._of_run(runs.read(tmp_path), history)
    labels = [text.get_text() for text in figure.axes[2].get_yticklabels()]
    assert labels == [f"hidden{number}" for number in range(11)] + ["output"]  # no bias
    assert figure.get_suptitle() == "mlp on digits, LAMB, batch 64: the 12 adaptive layers"


def test_stacked_layers_adapt_by_their_parameter():
    table = parameters.table(
        {"layers": {"kernel": np.ones((2, 3, 3)), "bias": np.ones((2, 3))}},
        [("bias$", {"adapt": False, "layer_axes": (0,)}), ("", {"layer_axes": (0,)})],
    )
    layers = ["layers/bias[0]", "layers/kernel[0]", "layers/bias[1]", "layers/kernel[1]"]
    assert plots._adapting(layers, table) == ["layers/kernel[0]", "layers/kernel[1]"]


def test_network_without_layers_that_adapt_gets_curves_and_a_line(collected, tmp_path):
    shutil.copytree(collected, tmp_path / "run")
    (tmp_path / "run" / "layers.png").unlink(missing_ok=True)  # from another test
    table = (tmp_path / "run" / "parameters.txt").read_text()
    (tmp_path / "run" / "parameters.txt").write_text(table.replace("yes    yes", "yes    no "))
    done = _draw(f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "not drawn: trust ratios, because" in done.stdout and "is adaptive" in done.stdout
    assert (tmp_path / "run" / "curves.png").exists()
    assert not (tmp_path / "run" / "layers.png").exists()


def test_default_run_gets_curves(copy, tmp_path):
    """Without config.optimizer.collect, the command draws only the curves."""
    done = _draw(f"--workdir={copy}", f"--out={tmp_path / 'x.png'}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(tmp_path / "x.png") and "train with" in done.stdout
    assert matplotlib.image.imread(tmp_path / "x.png").std() > 0.05
    assert max(map(len, lines[1:])) <= 80


def test_help_names_the_flags():
    output = _draw("--help").stdout
    assert "--workdir: " in output and "--out: " in output


@pytest.mark.long
def test_errors_are_one_sentence(collected, trained, tmp_path):
    (tmp_path / "of_phases" / "phase_1").mkdir(parents=True)
    (tmp_path / "of_phases" / "phase_1" / "metrics.jsonl").touch()
    for arguments, said in (
        ([f"--workdir={tmp_path / 'of_phases'}"], "holds the phases phase_1; give the folder of"),
        ([f"--workdir={tmp_path}"], "holds no run: config.json is missing"),
        ([f"--workdir={collected}", "--out=x.jpg"], "--out='x.jpg' is not a .png file"),
        ([], "--workdir is missing"),
    ):
        done = _draw(*arguments)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


SAME = {"kind": "train", "learning_rate": 0.1, "grad_norm": 1.0, "seconds": 1.0}
TRAINED = [
    {"step": step, "loss": 2.0 / step, "accuracy": 0.1 * step, "epoch": step / 4, **SAME}
    for step in (1, 2, 4)
]
EVALUATED = [{"step": 4, "kind": "eval", "accuracy": 0.6, "loss": 0.7, "epoch": 1.0}]


def test_a_panel_for_each_quantity() -> None:
    figure = plots.curve_figure(TRAINED, EVALUATED, "a run")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["loss", "accuracy", "learning rate", "gradient norm"]
    loss = figure.axes[0]
    assert [line.get_label() for line in loss.lines] == ["training", "evaluation"]
    assert list(loss.lines[0].get_xdata()) == [1, 2, 4]
    assert list(loss.lines[0].get_ydata()) == [2.0, 1.0, 0.5]
    assert list(loss.lines[1].get_ydata()) == [0.7]
    assert figure.get_suptitle() == "a run" and not plots.missing(TRAINED, EVALUATED)


def test_what_is_not_recorded_is_left_out_and_named() -> None:
    bare = [{"step": 1, "kind": "train", "loss": 1.0}]
    figure = plots.curve_figure(bare, [])
    assert [axes.get_title() for axes in figure.axes] == ["loss"]
    names = plots.missing(bare, [])
    assert names == ["learning rate", "gradient norm", "metrics of an evaluation"]
    assert plots.panels([], EVALUATED) == ["loss", "accuracy"]
    with pytest.raises(ValueError, match="no numbers to plot"):
        plots.curve_figure([], [])


def test_quantities_of_some_runs() -> None:
    changing = [{**record, "batch_size": 64, "noise_scale": 100.0} for record in TRAINED]
    figure = plots.curve_figure(changing, EVALUATED)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[-2:] == ["batch size", "noise scale (examples)"]
