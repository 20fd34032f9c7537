"""Calls of several updates give the same bits, records, checkpoints and errors as calls of one update."""

import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.errors import Preempted
from lamb_tpu.run import updating as updating_lib
from lamb_tpu.run.build import prepare
from lamb_tpu.run.calls import Calls, best_size
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.compatibility import check
from lamb_tpu.run.updating import make_updating
from lamb_tpu.spec import parse
from lamb_tpu.train import train
from lamb_tpu.watch.guards import Diverged
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT
from tests.raising import rejected
from tests.test_train import Interrupted, checkpoints, diverging, interrupt_at, without_seconds


@pytest.mark.parametrize(
    "distances, most, size",
    [
        ([100, 100], 50, 50),
        ([58, 59, 58], 50, 29),
        ([10, 10, 10], 50, 10),
        ([1, 1, 1], 50, 1),
        ([7], 3, 3),
        ([], 8, 1),
    ],
)
def test_size_of_calls(distances: list[int], most: int, size: int) -> None:
    assert best_size(distances, most) == size


@pytest.mark.parametrize("most", [2, 3, 7, 50, 1000])
@pytest.mark.parametrize("first", [0, 9, 10])
def test_calls_cover_the_updates_and_end_where_they_must(most: int, first: int) -> None:
    ends = {10, 20, 21, 58, 116, 117, 300}
    asked: list[int] = []

    def end(update: int) -> bool:
        asked.append(update)
        return update in ends or update == 301

    calls = Calls(most, end, first, 301)
    assert calls.size <= most and max(asked) <= 301
    asked.clear()
    step, crossed = first, []
    while step < 301:
        count = calls.count(step)
        assert count in (1, calls.size)
        crossed += [update for update in range(step + 1, step + count) if update in ends]
        step += count
    assert step == 301 and not crossed
    assert asked == sorted(set(asked))


def test_one_update_in_a_call_asks_nothing() -> None:
    def end(update: int) -> bool:
        raise AssertionError

    calls = Calls(1, end, 0, 10**8)
    assert calls.size == 1 and calls.count(0) == calls.count(7) == 1


# Records, evaluations and saves end calls at different updates.
TIMES = {
    "duration": "27 steps",
    "log__every": "9 steps",
    "eval__every": "12 steps",
    "checkpoint__every": "8 steps",
}
MODES: dict[str, dict[str, Any]] = {
    "jit": {"ema__decay": 0.9},
    "dropout": {"model": ConfigDict({"name": "lenet"})},
    "batch_norm": {"model": BATCH_NORM, "accumulation_steps": 2},
    "shard_map": {"parallel__backend": "shard_map", "guards__max_skipped": 3},
    "zero1": {
        "parallel__backend": "shard_map",
        "parallel__optimizer_state": "zero1",
        "parallel__exchange": ConfigDict({"name": "bfloat16"}),
        "mesh__data": 2,
        "mesh__fsdp": 4,
    },
    "jit zero1": {"parallel__optimizer_state": "zero1", "accumulation_steps": 2},
    "residual": {
        "parallel__backend": "shard_map",
        "parallel__exchange": ConfigDict({"name": "powersgd", "rank": 1, "start": 10}),
    },
    "stages": {
        "parallel__backend": "shard_map",
        "parallel__exchange": ConfigDict({"name": "onebit"}),
        "optimizer": ConfigDict({"name": "onebit_lamb", "learning_rate": 0.02, "freeze_step": 13}),
    },
    "statistics": {
        "model": DROPOUT,
        "accumulation_steps": 2,
        "statistics__noise_scale": True,
        "statistics__halves": True,
        "statistics__per_example": 8,
        "statistics__interval": 5,
    },
}


def same(actual: pathlib.Path, expected: pathlib.Path, config: ConfigDict) -> None:
    """Asserts that two runs saved checkpoints of the same updates, and agree as in `same_end`."""
    assert checkpoints(actual) == checkpoints(expected)
    same_end(actual, expected, config)


def same_end(actual: pathlib.Path, expected: pathlib.Path, config: ConfigDict) -> None:
    """Asserts that two runs have the same last checkpoint, bit for bit, and the same records."""
    (state, position), (wanted, place) = (
        tiny.restored(config, each) for each in (actual, expected)
    )
    tiny.assert_equal(state, wanted)
    timed = {"seconds", "startup", "starts"}
    assert {k: v for k, v in position.items() if k not in timed} == {
        k: v for k, v in place.items() if k not in timed
    }
    assert without_seconds(actual) == without_seconds(expected)


@pytest.mark.parametrize("mode", some(MODES, ("jit",)))
def test_the_same_bits_for_any_number_of_updates_in_a_call(
    tmp_path: pathlib.Path, mode: str
) -> None:
    config = tiny.digits(**TIMES, **MODES[mode])
    train(config, tmp_path / "1", quiet=True)
    # The number of updates between two ends of calls is not divisible by 4.
    for most in (50, 4) if mode == "residual" else (50,):
        several = tiny.digits(**TIMES, **MODES[mode], loop__updates_per_call=most)
        train(several, tmp_path / str(most), quiet=True)
        same(tmp_path / str(most), tmp_path / "1", config)


@pytest.mark.long
def test_a_recurrent_state_goes_from_update_to_update(tmp_path: pathlib.Path) -> None:
    folder = tiny.text(tmp_path)
    train(tiny.words(folder, **TIMES), tmp_path / "1", quiet=True)
    config = tiny.words(folder, **TIMES, loop__updates_per_call=50)
    train(config, tmp_path / "50", quiet=True)
    same(tmp_path / "50", tmp_path / "1", config)


def test_calls_of_several_updates_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one program per call size, and a call takes all its batches from the loader at once."""
    config = tiny.digits(**TIMES, loop__updates_per_call=50)
    run = prepare(config, None)
    made = []
    make = type(run).make_train_step

    def counted(self: Any, *args: Any, updates: int, **options: Any) -> Any:
        made.append(updates)
        return make(self, *args, updates=updates, **options)

    monkeypatch.setattr(type(run), "make_train_step", counted)
    loader = data.TrainLoader(run.train_set, 64, 0, run.local_rows())
    ends = {9, 18, 27}
    updating = make_updating(run, loader, calls=Calls(50, lambda step: step in ends, 0, 27))
    assert made == [1, 8]
    state, step, counts = run.first_state(), 0, []
    while step < 27:
        counts.append(updating.count(step))
        state, sums = updating(state, step, counts[-1])
        step += counts[-1]
        assert np.shape(sums["loss"][0]) == (() if counts[-1] == 1 else (counts[-1],))
    assert counts == [1, 8, 8, 1, 8, 1] and int(state.step) == 27
    assert made == [1, 8] and loader.examples == 27 * 64


def test_a_run_resumes_with_other_calls(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails, or gets SIGTERM, resumes with another number of updates per call."""
    config = tiny.digits(**TIMES)
    uninterrupted, workdir = tmp_path / "whole", tmp_path / "several"
    train(config, uninterrupted, quiet=True)
    interrupt_at(monkeypatch, 18, "train")
    with pytest.raises(Interrupted):
        train(tiny.digits(**TIMES, loop__updates_per_call=50), workdir, quiet=True)
    assert checkpoints(workdir) == [8, 16]
    with monkeypatch.context() as patch:
        # This poll follows calls of 1, 1 (which ends at a record) and 3 updates.
        tiny.preempt_at(patch, 4)
        with pytest.raises(Preempted, match="^preempted at update 21, saved"):
            train(tiny.digits(**TIMES, loop__updates_per_call=3), workdir, quiet=True)
    assert checkpoints(workdir) == [8, 16, 21]
    train(tiny.digits(**TIMES, loop__updates_per_call=7), workdir, quiet=True)
    same_end(workdir, uninterrupted, config)


@pytest.mark.long
def test_a_killed_run_resumes_with_other_calls(tmp_path: pathlib.Path) -> None:
    """A run killed during a call of 50 updates and resumed with calls of 7 equals an uninterrupted run."""
    code = (
        "import pathlib, sys, threading, os, signal, time\n"
        "from lamb_tpu.train import train\n"
        "from tests import tiny\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def kill():\n"
        "    while not (folder / 'checkpoints' / '400').is_dir():\n"
        "        time.sleep(0.001)\n"
        "    time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        "from tests.run.test_calls import LONG\n"
        "train(tiny.digits(**LONG, loop__updates_per_call=50), folder, quiet=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "killed"], cwd=tiny.ROOT, check=False
    )
    assert ended.returncode == -9
    last = max(step for step in checkpoints(tmp_path / "killed"))
    assert 400 <= last < 2000
    train(tiny.digits(**LONG, loop__updates_per_call=7), tmp_path / "killed", quiet=True)
    train(tiny.digits(**LONG), tmp_path / "whole", quiet=True)
    same(tmp_path / "killed", tmp_path / "whole", tiny.digits(**LONG))


LONG = {
    "duration": "2000 steps",
    "log__every": "100 steps",
    "eval__every": "1000 steps",
    "checkpoint__every": "200 steps",
    "checkpoint__keep": 100,
}


def test_a_run_that_diverges_ends_with_the_same_message(tmp_path: pathlib.Path) -> None:
    """The error names the update that diverged, although the call continued after that update."""
    changes = {"log__every": "12 steps", "checkpoint__every": "12 steps"}
    output = []
    for most in (1, 50):
        config = diverging(3e38, **changes, loop__updates_per_call=most)
        with pytest.raises(Diverged, match="param_norm became .* at update 2") as error:
            train(config, tmp_path / str(most), quiet=True)
        output.append(str(error.value))
        assert checkpoints(tmp_path / str(most)) == []
    assert output[0] == output[1]


def test_batches_of_several_shapes_are_rejected() -> None:
    source = SimpleNamespace(name="pairs:train", buckets=np.zeros(4, np.int8))
    problem = "those of pairs:train are cut to the length of their examples"
    with rejected("config.loop.updates_per_call", 2, problem, "use 1"):
        check(Combination(parse(tiny.digits(loop__updates_per_call=2)), train_set=source), "data")
    check(Combination(parse(tiny.digits()), train_set=source), "data")


def test_slow_convolutions_keep_calls_of_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating_lib, "are_fast_in_loops", lambda text: False)
    run, output = prepare(tiny.digits(), None), list[str]()
    loader = data.TrainLoader(run.train_set, 64, 0, run.local_rows())
    calls = Calls(50, lambda step: step % 9 == 0, 0, 27)
    updating = make_updating(run, loader, report=output.append, calls=calls)
    assert calls.size == 8 and updating.count(1) == 1
    assert output == [
        "config.loop.updates_per_call=1 is used: a CPU computes the convolutions of this network "
        "slowly within the loop over updates"
    ]
