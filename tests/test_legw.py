"""The command `legw`: its table, warnings, curves, and one sentence for each mistake."""

import contextlib
import io
import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

from lamb_tpu import legw
from lamb_tpu.errors import UserError

BASE = {
    "base-batch": "20",
    "base-lr": "1.0",
    "base-warmup-epochs": "0.2",
    "batches": "20..640",
    "num-examples": "46460",
    "epochs": "13",
}


def call(**changes: str | None) -> tuple[str, str]:
    """Runs the command in this process; returns its output and its warnings."""
    given = BASE | {key.replace("_", "-"): value for key, value in changes.items()}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        legw.main(legw._parse([f"--{k}={v}" for k, v in given.items() if v is not None]))
    return out.getvalue(), err.getvalue()


def test_the_rule_of_the_paper() -> None:
    found = legw.rows(20, 1.0, 0.2, [20, 40, 640], 46_460, 13.0)
    base, double, last = found
    assert base == (20, 1.0, 0.2, pytest.approx(464.6), 2323.0, 30_199)
    assert double.learning_rate == pytest.approx(2**0.5) and double.warmup_epochs == 0.4
    assert last.learning_rate == pytest.approx(32**0.5)
    assert last.warmup_epochs == pytest.approx(6.4)
    # 13 x 46,460 / 640 = 943.7, and the last update is a whole one.
    assert last.updates_per_epoch == pytest.approx(72.59375) and last.updates == 944
    assert {round(row.warmup_updates, 9) for row in found} == {464.6}


def test_table() -> None:
    text, told = call(batches="20,640")
    assert told == "" and text == (
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
    text, told = call(epochs="4")
    assert " 640 " in text and " ".join(told.split()) == (
        "warning: at batch 640 the warm-up of 6.4 epochs is longer than the training of 4, so the "
        "rate never reaches 5.65685"
    )
    rows = legw.rows(20, 1.0, 0.2, [640], 46_460, 4.0)
    (line,) = legw.picture(rows, 4.0).axes[0].lines
    assert list(line.get_xdata()) == [0, 4, 4]
    assert line.get_ydata()[-1] == pytest.approx(32**0.5 * 4 / 6.4)


def test_curves(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "legw.svg"
    text, _ = call(output=str(path))
    assert text.endswith(f"{path}\n")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    by_epoch, by_update = legw.picture(legw.rows(20, 1.0, 0.2, [20, 80], 46_460)).axes
    # Without a length the curves go on for a quarter of the longest warm-up, or in updates for as
    # many as the warm-up has, if there are so many.
    ends = (0.2, 0.8), (464.6, 464.6)
    lasts = (1.0, 1.0), (929.2, 580.75)
    for axes, warmups, last in zip((by_epoch, by_update), ends, lasts, strict=True):
        for line, *places, peak in zip(axes.lines, warmups, last, (1, 2), strict=True):
            assert list(line.get_xdata()) == pytest.approx([0, *places])
            assert list(line.get_ydata()) == pytest.approx([0, peak, peak])


def test_no_warm_up() -> None:
    rows = legw.rows(20, 1.0, 0.0, [20, 80], 46_460)
    assert [row.warmup_updates for row in rows] == [0, 0]
    (first, _) = legw.picture(rows).axes[0].lines
    assert list(first.get_ydata()) == [0, 1, 1] and list(first.get_xdata()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batches": "20..650"},
            "--batches is '20..650'; doubling 20 does not reach 650: give an end "
            "that it reaches, such as 20..640, or a list of batches",
        ),
        ({"batches": "40..20"}, "doubling 40 does not reach 20: give an end that it reaches, or a"),
        (
            {"batches": "0..640"},
            "--batches has '0'; it must be a whole number of examples above 0, a ",
        ),
        ({"batches": "20,-40"}, "--batches has '-40'; it must be a whole number"),
        ({"batches": "20..40..80"}, "--batches has '40..80'; it must be a whole number"),
        (
            {"base_batch": "0"},
            "--base-batch has '0'; it must be a whole number of examples above 0$",
        ),
        ({"base_batch": "1e3"}, "--base-batch has '1e3'; it must be a whole number"),
        ({"base_lr": "-1"}, "--base-lr is '-1'; it must be a number above 0, at most a million"),
        ({"base_lr": "nan"}, "--base-lr is 'nan'; it must be a number above 0"),
        (
            {"base_warmup_epochs": "-0.1"},
            "--base-warmup-epochs is '-0.1'; it must be a number of at l",
        ),
        (
            {"base_warmup_epochs": "1e400"},
            "is '1e400'; it must be a number of at least 0, at most a m",
        ),
        ({"epochs": "0"}, "--epochs is '0'; it must be a number above 0"),
        (
            {"num_examples": "600"},
            "--batches has 640, more than the --num-examples=600 of an epoch",
        ),
        ({"num_examples": ""}, "--num-examples is empty; give a value"),
        ({"num_examples": None}, "--num-examples"),
        ({"output": "legw.png"}, "--output legw.png must be an .svg file in a folder that exists"),
    ],
)
def test_mistakes(change: dict[str, str | None], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        call(**change)
