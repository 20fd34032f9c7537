"""Odd pictures, told at the end of a start."""

from types import SimpleNamespace
from typing import Any

from lamb_tpu.data.images.tally import Tally
from lamb_tpu.watch.pictures import Pictures
from tests.watch.observing import start


def ended(is_over: bool = False, hook: str = "completed", grey: int = 2) -> tuple[list, list]:
    tally = Tally("own")
    for index in range(grey):
        tally.add("grey", index)
    told: list[str] = []
    run: Any = SimpleNamespace(
        train_set=SimpleNamespace(tally=tally), eval_set=SimpleNamespace(tally=None)
    )
    pictures, begun = Pictures(run, told.append), start(is_over=is_over)
    pictures.started(begun)
    getattr(pictures, hook)(12)
    return told, begun.records.found


def test_run_that_is_complete_records_them() -> None:
    told, records = ended()
    assert told == ["data set own: of the pictures read in training 2 grey"]
    assert records == [{"step": 12, "kind": "pictures", "train_grey": 2}]


def test_preempted_start_tells_them() -> None:
    assert ended(hook="preempted")[1] == []
    assert ended(hook="preempted")[0] == ended()[0]


def test_nothing_to_tell() -> None:
    assert ended(is_over=True) == ([], []) and ended(hook="preempted", grey=0) == ([], [])
