"""Records of training and evaluation."""

from types import SimpleNamespace

from lamb_tpu.batching.path import Path
from lamb_tpu.watch.records import Records
from tests.watch.observing import record, start


def test_what_is_written() -> None:
    records = Records(SimpleNamespace(epoch=lambda step: step / 4, path=None))
    begun = start(clock=SimpleNamespace(seconds=2.5))
    records.started(begun)
    one = record(6, {"loss": 0.5})
    one.rates["examples_per_second"] = 640.0
    records.recorded(one)
    records.evaluated(8, {"accuracy": 0.9})
    assert begun.records.found == [
        {
            "step": 6,
            "kind": "train",
            "loss": 0.5,
            "epoch": 1.5,
            "updates": 1,
            "seconds": 2.5,
            "examples_per_second": 640.0,
        },
        {"step": 8, "kind": "eval", "accuracy": 0.9, "epoch": 2.0},
    ]
    assert one.values == {"loss": 0.5} and not begun.records.is_closed
    records.completed(8)
    assert begun.records.is_closed


def test_a_batch_that_changes_is_written() -> None:
    """The batch of the newest update, and the examples of all."""
    path = Path(32, total=448)
    path.change(4, 64)
    records = Records(
        SimpleNamespace(
            epoch=lambda step: step / 4, path=path, batch=path.batch, examples=path.examples
        )
    )
    begun = start()
    records.started(begun)
    for step in (4, 5):
        records.recorded(record(step))
    found = [(kept["batch_size"], kept["examples"]) for kept in begun.records.found]
    assert found == [(32, 128), (64, 192)]
