"""Records of training and evaluation."""

from types import SimpleNamespace

from lamb_tpu.batching.path import Path
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.watch.records import Records
from tests.watch.observing import record, start


def test_records() -> None:
    records = Records(CurrentRecipe(SimpleNamespace(epoch=lambda step: step / 4, path=None)))
    begun = start(clock=SimpleNamespace(seconds=2.5))
    records.started(begun)
    one = record(6, {"loss": 0.5})
    one.rates["examples_per_second"] = 640.0
    records.recorded(one)
    records.evaluated(8, {"accuracy": 0.9})
    assert begun.records.actual == [
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


def test_records_of_a_changing_batch() -> None:
    """A record has the batch size of the newest update, and the number of examples seen so far."""
    path = Path.from_segments([(0, 32), (4, 64)], total=448)
    recipe = SimpleNamespace(
        epoch=lambda step: step / 4, path=path, batch=path.batch, examples=path.examples
    )
    records = Records(CurrentRecipe(recipe))
    begun = start()
    records.started(begun)
    for step in (4, 5):
        records.recorded(record(step))
    actual = [(kept["batch_size"], kept["examples"]) for kept in begun.records.actual]
    assert actual == [(32, 128), (64, 192)]
