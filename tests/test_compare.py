"""Tests comparisons of runs: differences between configs, metrics, and curves."""

import contextlib
import io
import pathlib
import warnings
from typing import Any

import matplotlib.image
import pytest

from lamb_tpu import compare
from lamb_tpu.compare import Run
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import MetricsWriter
from tests.raising import rejected
from tests.store.test_runs import fake


def call(*arguments: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        compare.main(compare._parse([str(argument) for argument in arguments]))
    return out.getvalue()


@pytest.fixture
def actual(tmp_path: pathlib.Path) -> list[Run]:
    fake(tmp_path / "deep" / "first", [0.5, 0.7, 0.6])
    fake(tmp_path / "second", [0.4], optimizer__b2=0.5, seed=3)
    return compare.read([f"{tmp_path}/deep/first", str(tmp_path / "second")])


def test_tables(actual: list[Run]) -> None:
    (table,) = compare.tables(actual, ("accuracy", "higher"))
    assert table == [
        ["run", "b2", "seed", "best accuracy", "at epoch", "last", "updates", "time", "device", ""],
        ["deep/first", "0.999", "0", "0.7000", "2", "0.6000", "12", "1:00", "2 x cpu", ""],
        ["second", "0.5", "3", "0.4000", "1", "0.4000", "12", "1:00", "2 x cpu",
         "has no evaluation at its end"],
    ]  # fmt: skip
    ((_, first, second),) = compare.tables(actual, ("loss", "lower"))
    assert first[3:6] == ["0.7083", "3", "0.7083"] and second[3:6] == ["2.1250", "1", "2.1250"]


def test_many_differing_keys_have_a_separate_table(tmp_path: pathlib.Path) -> None:
    fake(tmp_path / "a", [0.5])
    fake(
        tmp_path / "b",
        [],
        end=0,
        optimizer__b2=0.5,
        seed=3,
        ema__decay=0.5,
        data__name="mnist",
        model__hidden_sizes=(8,) * 9,
        optimizer__weight_decay=0.0,
        log__every="1 steps",
    )
    runs, keys = compare.tables(
        compare.read([str(tmp_path / "a"), str(tmp_path / "b")]), ("accuracy", "higher")
    )
    assert runs[0][:2] == ["run", "best accuracy"]
    assert runs[2] == ["b", "", "", "", "0", "", "2 x cpu", "has no evaluation at its end"]
    assert keys == [
        ["config", "a", "b"], ["data.name", "digits", "mnist"], ["ema.decay", "0.0", "0.5"],
        ["model.hidden_sizes", "(16,)", "(8, 8, 8, 8, 8, 8, 8,..."],
        ["optimizer.b2", "0.999", "0.5"], ["optimizer.weight_decay", "0.01", "0.0"],
        ["seed", "0", "3"],
    ]  # fmt: skip


def test_a_key_of_another_optimizer_and_a_custom_key(tmp_path: pathlib.Path) -> None:
    fake(tmp_path / "a", [0.5], optimizer__preset="paper")
    fake(tmp_path / "b", [0.5], optimizer__name="gone:Optimizer")
    keys = compare.differing(compare.read([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert keys["optimizer.preset"] == ["paper", "-"]


def test_values_that_differ_beyond_what_is_shown(tmp_path: pathlib.Path) -> None:
    for name, last in (("a", 1), ("b", 2)):
        fake(tmp_path / name, [0.5], model__hidden_sizes=(8,) * 9 + (last,))
    keys = compare.differing(compare.read([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert list(keys) == ["model.hidden_sizes"]


def test_metric(actual: list[Run], tmp_path: pathlib.Path) -> None:
    assert compare.choose_metric(actual) == ("accuracy", "higher")
    assert compare.choose_metric(actual, "loss") == ("loss", "lower")
    fake(tmp_path / "new", [], end=0)
    new = compare.read([str(tmp_path / "new")])
    assert compare.choose_metric([*new, *actual]) == ("accuracy", "higher")
    assert compare.choose_metric(new) is None
    with rejected("--metric", "f1", "no run has an evaluation yet"):
        compare.choose_metric(new, "f1")
    other = [actual[0]._replace(evaluations=[{"step": 1, "epoch": 1.0, "kind": "eval", "f1": 0.5}])]
    with rejected("RUN", ..., "have no metric in common"):
        compare.choose_metric([*actual, *other])


@pytest.mark.parametrize(
    "against, positions",
    [("epochs", [1, 2, 3]), ("updates", [4, 8, 12]), ("examples", [256, 512, 768])],
)
def test_figure(actual: list[Run], against: str, positions: list[int]) -> None:
    figure = compare.draw(actual, ("accuracy", "higher"), against)
    loss, accuracy = figure.axes
    assert [list(line.get_xdata()) for line in loss.lines] == [positions, positions]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[0.5, 0.7, 0.6], [0.4]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["deep/first", "second"]
    assert loss.get_yscale() == "log" and against in loss.get_xlabel()
    assert len(compare.draw(actual, None, against).axes) == 1


def test_the_best_of_many_runs_are_named(tmp_path: pathlib.Path) -> None:
    for number in range(14):
        fake(tmp_path / f"{number:02}", [number / 20])
    actual = compare.read([str(path) for path in sorted(tmp_path.iterdir())])
    for metric, named in ((("accuracy", "higher"), range(6, 14)), (None, range(8))):
        figure = compare.draw(actual, metric, "epochs")
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len({(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}) == 9
        assert len({str(line._dash_pattern) for line in figure.legends[0].legend_handles}) == 8
        assert set(texts) == {*(f"{number:02}" for number in named), "6 other runs"}
    history = compare.history(actual, "loss", "updates")
    assert len(history.legends[0].get_texts()) == 9 and len(history.axes[0].lines) == 14
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")


def test_values_that_an_axis_cannot_show(tmp_path: pathlib.Path) -> None:
    fake(tmp_path / "a", [1e300, 0.5])
    figure = compare.draw(compare.read([str(tmp_path / "a")]), ("accuracy", "higher"), "epochs")
    assert list(figure.axes[1].lines[0].get_ydata()) == [0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")


def recorded(folder: pathlib.Path, noise: list[float], sizes: list[int]) -> None:
    """Writes a run with noise scales; its batch size changes if `sizes` are given."""
    fake(folder, [], end=0)
    with MetricsWriter(folder, 0, tensorboard=False) as writer:
        for step, scale in enumerate(noise, 1):
            changing = (
                {"batch_size": sizes[step - 1], "examples": sum(sizes[:step])} if sizes else {}
            )
            writer.write(
                step,
                "train",
                {"loss": 1.0, "epoch": step / 4, "seconds": 1.0, "noise_scale": scale, **changing},
            )
        writer.write(4, "eval", {"accuracy": 0.5, "loss": 1.0, "epoch": 1.0})


def test_a_metric_of_the_training_records(tmp_path: pathlib.Path) -> None:
    recorded(tmp_path / "a", [20.0, float("inf"), 80.0], [32, 64, 96])
    recorded(tmp_path / "b", [50.0, 60.0], [])
    actual = compare.read([str(tmp_path / "a"), str(tmp_path / "b")])
    assert compare.is_recorded(actual, "noise_scale")
    for metric in ("loss", "accuracy", "f1", None):  # evaluations have a loss too
        assert not compare.is_recorded(actual, metric)
    noise, sizes = compare.history(actual, "noise_scale", "examples").axes
    assert [list(line.get_xdata()) for line in noise.lines] == [[32, 192], [64, 128]]
    assert [list(line.get_ydata()) for line in noise.lines] == [[20, 80], [50, 60]]
    assert [list(line.get_xdata()) for line in sizes.lines] == [[32, 96, 192], [64, 128]]
    assert [list(line.get_ydata()) for line in sizes.lines] == [[32, 64, 96], [64, 64]]
    assert noise.get_yscale() == sizes.get_yscale() == "log"
    assert noise.get_xlabel() == sizes.get_xlabel() == "examples seen"
    _, accuracy = compare.draw(actual, ("accuracy", "higher"), "examples").axes
    # An evaluation has no example count. For the first run, the count follows from the epoch.
    assert [list(line.get_xdata()) for line in accuracy.lines] == [[128], [256]]
    updates, _ = compare.history(actual[:1], "noise_scale", "updates").axes
    assert list(updates.lines[0].get_xdata()) == [1, 3]
    folders = [run.files.folder.path for run in actual]
    output = call(*folders, "--metric=noise_scale", f"--output={tmp_path / 'x.png'}")
    assert "best accuracy" in output
    with pytest.raises(
        UserError, match="accuracy.*loss; or a metric of the training records: noise_scale"
    ):
        call(*folders, "--metric=noise", f"--output={tmp_path / 'x.png'}")
    assert matplotlib.image.imread(tmp_path / "x.png").std() > 0.05


def test_command(actual: list[Run], tmp_path: pathlib.Path) -> None:
    folders = [run.files.folder.path for run in actual]
    output = call(*folders, f"--output={tmp_path / 'x.png'}")
    assert "  run         b2     seed  best accuracy" in output
    assert output.endswith(f"\n\n{tmp_path / 'x.png'}\n")
    assert matplotlib.image.imread(tmp_path / "x.png").std() > 0.05


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{0}", "{0}"], "RUN .*first is given 2 times; give it once"),
        (["{0}", "/nowhere"], "RUN /nowhere holds no run: config.json is missing"),
        (["{0}", "--metric=f1"], "--metric.*'f1'.*accuracy.*loss"),
        (["{0}", "--output=x.jpg"], "--output=.x.jpg. is not a .png file in a folder that exists"),
        (["{0}", "--output="], "--output is empty"),
    ],
)
def test_errors(actual: list[Run], arguments: list[str], message: str, tmp_path: Any) -> None:
    first = actual[0].files.folder.path
    with pytest.raises(UserError, match=message):
        call(f"--output={tmp_path / 'x.png'}", *(text.format(first) for text in arguments))
    assert not (tmp_path / "x.png").exists()
