"""Progress bars and lines."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.store.position import Position
from lamb_tpu.watch import progress as progress_lib
from lamb_tpu.watch.clock import Clock
from lamb_tpu.watch.progress import RunProgress, format_seconds, format_values
from tests.watch.observing import record, start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_lib.time, "monotonic", lambda: now[0])
    return now


@contextlib.contextmanager
def run(
    label: str,
    total_steps: int,
    batch_size: int,
    first: int = 1,
    after: float = 1.0,
    recipe: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[RunProgress, Any]]:
    """Yields the RunProgress of a run after its first update, and a function that adds a record to it."""
    metadata = {
        "total_steps": total_steps,
        "batch_size": batch_size,
        "epoch": lambda step: step / 100,
        "place": lambda step: step,
        "path": None,
        "decides": False,
        **(recipe or {}),
    }
    progress = RunProgress(label, CurrentRecipe(SimpleNamespace(**metadata)), **options)
    began = Clock(Position(), time.monotonic() - after)
    progress.started(start(first - 1, clock=began))
    progress.updated(first, None)
    yield progress, lambda step, values: progress.recorded(record(step, values))
    progress.ended()


def test_formats() -> None:
    assert format_values({"loss": 0.123456, "accuracy": 1.0}) == "loss 0.1235, accuracy 1"
    texts = [format_seconds(seconds) for seconds in (0, 59.9, 61, 3600, 36_061)]
    assert texts == ["0:00", "0:59", "1:01", "1:00:00", "10:01:01"]


def test_lines_without_a_terminal(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    with run("train", 1000, 64, after=2.5) as (progress, show):
        progress.message("a [bracket] and :train: stay")
        for step in range(2, 42):
            clock[0] += 0.5
            show(step, {"loss": 1 / step})
    lines = capsys.readouterr().out.splitlines()
    first = "first update after 2.5 s, reading data and compiling included"
    assert lines[:2] == [first, "a [bracket] and :train: stay"]
    # Twenty seconds at two updates a second: one line every ten seconds.
    assert lines[2:] == [
        "update 21/1000: loss 0.04762; 128 examples/s, 8:09 left",
        "update 41/1000: loss 0.02439; 128 examples/s, 7:59 left",
    ]


@pytest.mark.parametrize(
    "total, options, seconds, step, line",
    [
        # Only the updates of this start count in the rate.
        (1000, {"first": 901}, 20, 941, "update 941/1000: ; 128 examples/s, 0:29 left"),
        (1000, {"tokens": 64 * 128}, 20, 41, "update 41/1000: ; 16,384 tokens/s, 7:59 left"),
        # Later decisions change the number of updates.
        (200, {"recipe": {"decides": True}}, 10, 81, "update 81/~200: ; 512 examples/s, 0:14 left"),
    ],
)
def test_rate_and_time_left(
    clock: list[float],
    capsys: pytest.CaptureFixture,
    total: int,
    options: dict[str, Any],
    seconds: float,
    step: int,
    line: str,
) -> None:
    with run("train", total, 64, **options) as (_, show):
        clock[0] += seconds
        show(step, {})
    assert capsys.readouterr().out.splitlines()[-1] == line


def changing(step: int) -> int:
    """Returns the examples in `step` updates: 64 in each of the first 100, then 256 in each."""
    return 64 * min(step, 100) + 256 * max(step - 100, 0)


def test_time_left_with_a_changing_batch(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    options = {"path": "one", "examples": changing, "place": lambda step: changing(step) / 64}
    with run("train", 200, 64, recipe=options) as (_, show):
        clock[0] += 10
        # 80 updates took ten seconds; 19 more of this size and 100 of four times the size remain.
        show(81, {})
        clock[0] += 10
        show(101, {})
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [
        "update 81/200: ; 512 examples/s, 0:52 left",
        "update 101/200: ; 330 examples/s, 1:16 left",
    ]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[[], str]:
    """Makes rich print for a terminal of 120 columns; returns a function that reads the printed text."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    return lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)


def test_the_bar_counts_examples_if_the_batch_changes(terminal: Callable[[], str]) -> None:
    options = {"path": "one", "examples": changing, "place": lambda step: changing(step) / 64}
    with run("train", 200, 64, recipe=options) as (_, show):
        show(101, {"loss": 0.25})
    assert "6656/32000" in terminal()


@pytest.mark.parametrize("options", [{"quiet": True}, {"shown": False}])
def test_quiet(clock: list[float], capsys: pytest.CaptureFixture, options: dict[str, bool]) -> None:
    with run("train", 10, 64, **options) as (progress, show):
        progress.message("nothing")
        clock[0] += 100
        show(5, {"loss": 1.0})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_bar_on_a_terminal(terminal: Callable[[], str], quiet: bool) -> None:
    with run("seed 3", 10, 64, quiet=quiet) as (progress, show):
        progress.message("above the bar")
        show(10, {"loss": 0.25})
    shown = terminal()
    assert "seed 3" in shown and "10/10" in shown and "examples/s" in shown and "left" in shown
    assert "loss 0.25" in shown and ("above the bar" in shown) is not quiet


def test_bar_of_a_long_run_fits_80_columns(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, terminal: Callable[[], str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with run("train phase_1", 1_000_000, 65_536, tokens=65_536 * 128) as (_, show):
        clock[0] += 7200
        show(500_000, {"loss": 6.123456, "accuracy": 0.5, "learning_rate": 0.001})
    shown = terminal()
    last = re.split(r"[\r\n]+", shown.strip())[-1]
    assert len(last) <= 80 and "\u2026" not in last  # nothing is truncated
    assert re.search(r" left \d:\d\d:\d\d$", last.rstrip())
    for part in ("train phase_1", "500000/1000000", "583M tokens/s", "loss 6.123", "left"):
        assert part in last, (part, last)


def test_messages_and_warnings_fit_80_columns(capsys: pytest.CaptureFixture) -> None:
    metrics = {
        f"{kind}{name}": 0.123456
        for kind in ("", "ema_")
        for name in ("accuracy", "loss", "top5_accuracy")
    }
    with run("train", 10, 64) as (progress, _):
        progress.evaluated(1234, metrics)
        progress.warn("update 5 is left out: " + "why " * 30)
    output = capsys.readouterr()
    for lines in (output.out.splitlines(), output.err.splitlines()):
        assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert "update 1234 (epoch 12.34): accuracy 0.1235, " in output.out
    assert "ema_top5_accuracy 0.1235" in output.out


def test_hidden_even_on_a_terminal(terminal: Callable[[], str]) -> None:
    with run("train", 10, 64, shown=False) as (progress, show):
        progress.message("nothing")
        show(10, {})
    assert terminal() == ""
