"""The list of observers of a run."""

from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.watch.observers import make_observers
from lamb_tpu.watch.progress import RunProgress
from tests import tiny


def test_checkpoints_hold_the_states_of_four() -> None:
    run = prepare(tiny.digits(checkpoint__best="accuracy"), None)
    current = CurrentRecipe(run.recipe)
    observers = make_observers(run, current, RunProgress("train", current))
    assert set(observers.state()) == {"best", "target", "guards", "batches"}
    assert observers.saves_evaluations and not observers.may_end_run


def test_observers_add_to_a_record_before_it_is_written() -> None:
    run = prepare(tiny.digits(), None)
    current = CurrentRecipe(run.recipe)
    observers = make_observers(run, current, RunProgress("train", current))
    names = [type(each).__name__ for each in observers._all]
    for first in ("Guards", "Ratios", "Lipschitz", "Throughput"):
        assert names.index(first) < names.index("Records") < names.index("RunProgress")
    assert names.index("Target") < names.index("MLPerfLog")  # logs Target's result
