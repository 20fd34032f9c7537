"""The list of observers of a run."""

from lamb_tpu.run.build import prepare
from lamb_tpu.watch.observers import make_observers
from lamb_tpu.watch.progress import RunProgress
from tests import tiny


def test_checkpoints_hold_the_states_of_four() -> None:
    run = prepare(tiny.digits(checkpoint__best="accuracy"), None)
    observers = make_observers(run, RunProgress("train", run.recipe))
    assert set(observers.state()) == {"best", "target", "guards", "batches"}
    assert observers.saves_evaluations and not observers.may_end_run


def test_those_that_add_to_a_record_stand_before_those_that_write_it() -> None:
    run = prepare(tiny.digits(), None)
    names = [
        type(each).__name__ for each in make_observers(run, RunProgress("train", run.recipe))._all
    ]
    for first in ("Guards", "Ratios", "Lipschitz", "Throughput"):
        assert names.index(first) < names.index("Records") < names.index("RunProgress")
    assert names.index("Target") < names.index("MLPerfLog")  # which asks it
