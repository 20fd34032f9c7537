"""Counts of damaged images, reported when a run ends or is preempted."""

from types import SimpleNamespace
from typing import Any

from lamb_tpu.data.images.tally import Tally
from lamb_tpu.watch.images import Images
from tests.watch.observing import start


def ended(is_over: bool = False, hook: str = "completed", grey: int = 2) -> tuple[list, list]:
    tally = Tally("own")
    for index in range(grey):
        tally.add("grey", index)
    output: list[str] = []
    run: Any = SimpleNamespace(
        train_set=SimpleNamespace(tally=tally), eval_set=SimpleNamespace(tally=None)
    )
    pictures, begun = Images(run, output.append), start(is_over=is_over)
    pictures.started(begun)
    getattr(pictures, hook)(12)
    return output, begun.records.actual


def test_complete_run() -> None:
    output, records = ended()
    assert output == ["data set own: images read in training include 2 grey"]
    assert records == [{"step": 12, "kind": "pictures", "train_grey": 2}]


def test_preempted_start() -> None:
    assert ended(hook="preempted")[1] == []
    assert ended(hook="preempted")[0] == ended()[0]


def test_nothing_to_report() -> None:
    assert ended(is_over=True) == ([], []) and ended(hook="preempted", grey=0) == ([], [])
