"""Tests the command `legw`: its table, warnings, curves and errors."""

import contextlib
import io
import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

from lamb_tpu import legw
from tests import figures
from tests.raising import rejected

BASE = {
    "base-batch": "20",
    "base-lr": "1.0",
    "base-warmup-epochs": "0.2",
    "batches": "20..640",
    "num-examples": "46460",
    "epochs": "13",
}


def call(**changes: str | None) -> tuple[str, str]:
    given = BASE | {key.replace("_", "-"): value for key, value in changes.items()}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        legw.main(legw._parse([f"--{k}={v}" for k, v in given.items() if v is not None]))
    return out.getvalue(), err.getvalue()


def test_the_rule_of_the_paper() -> None:
    actual = legw.rows(20, 1.0, 0.2, [20, 40, 640], 46_460, 13.0)
    base, double, last = actual
    assert base == (20, 1.0, 0.2, pytest.approx(464.6), 2323.0, 30_199)
    assert double.learning_rate == pytest.approx(2**0.5) and double.warmup_epochs == 0.4
    assert last.learning_rate == pytest.approx(32**0.5)
    assert last.warmup_epochs == pytest.approx(6.4)
    # 13 x 46,460 / 640 = 943.7, rounded up.
    assert last.updates_per_epoch == pytest.approx(72.59375) and last.updates == 944
    assert {round(row.warmup_updates, 9) for row in actual} == {464.6}


def test_table() -> None:
    text, printed = call(batches="20,640")
    assert printed == "" and text == (
        "  batch     rate  warm-up epochs  warm-up updates  updates/epoch  updates\n"
        "     20        1             0.2            464.6          2,323   30,199\n"
        "    640  5.65685             6.4            464.6           72.6      944\n"
    )
    assert "  updates\n" not in call(epochs=None)[0]


def test_batches() -> None:
    assert legw.read_batches("20..160") == [20, 40, 80, 160]
    assert legw.read_batches("512..512") == [512]
    assert legw.read_batches("128, 1_000") == [128, 1000]


def test_warm_up_longer_than_the_training() -> None:
    text, printed = call(epochs="4")
    assert " 640 " in text and " ".join(printed.split()) == (
        "warning: at batch 640 the warm-up of 6.4 epochs is longer than the training of 4 epochs, "
        "so the rate never reaches 5.65685"
    )
    rows = legw.rows(20, 1.0, 0.2, [640], 46_460, 4.0)
    (line,) = legw.curve_figure(rows, 4.0).axes[0].lines
    assert list(line.get_xdata()) == [0, 4, 4]
    assert line.get_ydata()[-1] == pytest.approx(32**0.5 * 4 / 6.4)


def test_curves(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "legw.svg"
    text, _ = call(output=str(path))
    assert text.endswith(f"{path}\n")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    by_epoch, by_update = legw.curve_figure(legw.rows(20, 1.0, 0.2, [20, 80], 46_460)).axes
    # Without a length, the curves over epochs end a quarter beyond the longest warm-up. The curves
    # over updates end at twice the warm-up, or at the end of the curve over epochs if that is earlier.
    ends = (0.2, 0.8), (464.6, 464.6)
    lasts = (1.0, 1.0), (929.2, 580.75)
    for axes, warmups, last in zip((by_epoch, by_update), ends, lasts, strict=True):
        for line, *positions, peak in zip(axes.lines, warmups, last, (1, 2), strict=True):
            assert list(line.get_xdata()) == pytest.approx([0, *positions])
            assert list(line.get_ydata()) == pytest.approx([0, peak, peak])


def test_no_warm_up() -> None:
    rows = legw.rows(20, 1.0, 0.0, [20, 80], 46_460)
    assert [row.warmup_updates for row in rows] == [0, 0]
    (first, _) = legw.curve_figure(rows).axes[0].lines
    assert list(first.get_ydata()) == [0, 1, 1] and list(first.get_xdata()) == [0, 0, 1]


NOT_EXAMPLES = "is not a whole number of examples above 0"


@pytest.mark.parametrize(
    ("change", "value", "problem", "remedy"),
    [
        ({"batches": "20..650"}, "20..650", "doubling 20 does not reach 650", "20..640, or a list"),
        (
            {"batches": "40..20"},
            "40..20",
            "doubling 40 does not reach 20",
            "give a list of batches",
        ),
        ({"batches": "0..640"}, "0", NOT_EXAMPLES, "20..640 or 20,100,640"),
        ({"batches": "20,-40"}, "-40", NOT_EXAMPLES, "20..640"),
        ({"batches": "20..40..80"}, "40..80", NOT_EXAMPLES, "20..640"),
        ({"base_batch": "0"}, "0", NOT_EXAMPLES, "give a value such as 128"),
        ({"base_batch": "1e3"}, "1e3", NOT_EXAMPLES, "give a value such as 128"),
        ({"base_lr": "-1"}, "-1", "is out of range", "use a number above 0 and at most a million"),
        ({"base_lr": "nan"}, "nan", "is out of range", "use a number above 0"),
        ({"base_warmup_epochs": "-0.1"}, "-0.1", "is out of range", "use a number of at least 0"),
        ({"base_warmup_epochs": "1e400"}, "1e400", "is out of range", "at most a million"),
        ({"epochs": "0"}, "0", "is out of range", "use a number above 0"),
        (
            {"batches": "640", "num_examples": "600"},
            640,
            "is larger than an epoch (--num-examples=600)",
            "600",
        ),
        ({"num_examples": ""}, ..., "is empty", "give a value"),
        ({"output": "legw.png"}, pathlib.Path("legw.png"), "is not an .svg file", "give another"),
    ],
)
def test_errors(change: dict[str, str], value: object, problem: str, remedy: str) -> None:
    with rejected(f"--{next(iter(change)).replace('_', '-')}", value, problem, remedy):
        call(**change)


def test_missing_option() -> None:
    with rejected("the following arguments are required", ..., "--num-examples", "see --help"):
        call(num_examples=None)


@pytest.mark.parametrize("number, panels", [(6, 1), (12, 2)])
def test_figure_of_many_batches_has_axes_of_few(number: int, panels: int) -> None:
    rows = legw.rows(20, 1.0, 0.1, [20 * 2**n for n in range(number)], 1_000_000, 4.0)
    figure = legw.curve_figure(rows, 4.0)
    figures.check(figure)
    assert figures.names(figure) == [f"{row.batch:,}" for row in rows]
    assert len(figure.axes) == 2 * panels
    assert len({axes.get_xlim() for axes in figure.axes[::2]}) == 1
