"""Guards on the numbers of a run's updates, on the host."""

import math
import pathlib
import re
import shutil
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data, optim
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import Run
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.guards import Diverged, Guards, SpikeDetector
from tests import tiny
from tests.watch.observing import record, start


def observed(detector: SpikeDetector, losses: list[float]) -> list[float | None]:
    return [detector.observe(loss) for loss in losses]


def test_spike_is_told_with_the_median_before_it() -> None:
    detector = SpikeDetector(3.0, window=5, enough=3)
    assert observed(detector, [1.0, 2.0, 3.0, 6.0]) == [None] * 4  # 6 is not above 3 * 2
    assert detector.observe(7.6) == 2.5  # of 1, 2, 3, 6
    assert detector.observe(9.0) is None  # of 1, 2, 3, 6, 7.6 it is 3
    assert detector.observe(18.1) == 6.0  # of 2, 3, 6, 7.6, 9: the window has lost its oldest


def test_spike_is_above_all_recent_losses() -> None:
    detector = SpikeDetector(3.0, window=6, enough=3)
    observed(detector, [5.0, 1.0, 1.0, 1.0])
    assert detector.observe(5.0) is None
    assert detector.observe(5.1) == 1.0


def test_nothing_is_a_spike_before_there_are_enough() -> None:
    detector = SpikeDetector(2.0, window=10, enough=4)
    assert observed(detector, [1.0, 1.0, 100.0, 1.0]) == [None] * 4
    assert detector.observe(101.0) == 1.0


def test_nothing_up_to_the_floor_is_a_spike() -> None:
    detector = SpikeDetector(10.0, floor=1.0, window=5, enough=3)
    assert observed(detector, [0.01, 0.02, 0.01, 0.5, 1.0]) == [None] * 5
    assert detector.observe(1.1) == 0.02


def test_falling_loss_and_its_noise_are_none() -> None:
    noise = np.random.default_rng(0).uniform(0.6, 1.5, 2000)
    losses = (2.3 * np.exp(-np.arange(2000) / 300) + 0.1) * noise
    assert observed(SpikeDetector(3.0), list(losses)) == [None] * 2000


def test_lasting_change_is_told_once() -> None:
    told = observed(SpikeDetector(3.0, window=10, enough=5), [1.0] * 10 + [10.0] * 20)
    assert told == [None] * 10 + [1.0] + [None] * 19


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_counts_for_nothing(value: float) -> None:
    detector = SpikeDetector(3.0, window=3, enough=3)
    assert observed(detector, [1.0, value, 2.0, value, 3.0, value]) == [None] * 6
    assert detector.observe(6.1) == 2.0


@pytest.mark.parametrize("usual", [0.0, -2.0])
def test_median_that_is_not_positive_has_no_multiples(usual: float) -> None:
    assert observed(SpikeDetector(3.0, enough=2), [usual] * 5 + [50.0]) == [None] * 6


def test_factor_of_zero_tells_nothing() -> None:
    assert observed(SpikeDetector(0.0, enough=1), [1.0, 1e9]) == [None] * 2


def guards(
    max_skipped: int = 0, factor: float = 3.0, skipped: int = 0, floor: float = 0.0
) -> tuple[Guards, list[str]]:
    """Guards of a run at the rates 0.1, 0.2, ..., and what they warn of."""
    told: list[str] = []
    config = SimpleNamespace(max_skipped=max_skipped, spike_factor=factor, spike_floor=floor)
    guard = Guards(config, lambda step: 0.1 * (step + 1), told.append, lambda text: None)
    guard.started(start(skipped=skipped))
    return guard, told


def spikes(guard: Guards, updates: Iterable[tuple[int, Any]]) -> dict[int, dict[str, float]]:
    """Returns the guard's records of some updates, by update."""
    records = guard._start.records
    records.found.clear()
    guard.fetched(updates)
    assert {each.pop("kind") for each in records.found} <= {"spike"}
    return {each.pop("step"): each for each in records.found}


def update(loss: float, weight: float = 4.0, **others: Any) -> dict[str, tuple[float, float]]:
    """An update's sums as they are fetched; the mean loss is `loss`."""
    return {
        "loss": (np.float32(loss * weight), np.float32(weight)),
        **{name: (np.float32(value), np.float32(1)) for name, value in others.items()},
    }


LEFT_OUT = update(0.0, weight=0.0, skipped=1.0) | {"grad_norm": (np.float32(0), np.float32(0))}


def test_finite_numbers_pass() -> None:
    guard, told = guards()
    steady = [(step, update(1.0, grad_norm=2.0)) for step in range(1, 31)]
    assert spikes(guard, steady) == {} and not told and guard.skipped == 0


@pytest.mark.parametrize("max_skipped", [0, 5])
@pytest.mark.parametrize(
    "name, value, told", [("loss", np.inf, "inf"), ("param_norm", np.nan, "nan")]
)
def test_number_that_is_not_finite_ends_the_run(
    name: str, value: float, told: str, max_skipped: int
) -> None:
    guard, _ = guards(max_skipped)
    updates = [(41, update(1.0)), (42, update(1.0) | {name: (np.float32(value), np.float32(1))})]
    with pytest.raises(
        Diverged,
        match=rf"^{name} became {told} at update 42, at the learning rate "
        r"4\.2; the last checkpoint is runs/x/40\. Try, in a new --workdir",
    ):
        spikes(guard, updates)


def test_updates_left_out_are_told_and_counted_up_to_the_limit() -> None:
    guard, told = guards(max_skipped=3, skipped=1)  # one before the run was resumed
    assert spikes(guard, [(41, update(1.0, skipped=0.0)), (42, LEFT_OUT), (43, LEFT_OUT)]) == {}
    assert guard.skipped == 3
    assert told == [
        "update 42 is left out, its gradient is not finite: 2 left out, and "
        "config.guards.max_skipped is 3",
        "update 43 is left out, its gradient is not finite: 3 left out, and "
        "config.guards.max_skipped is 3",
    ]
    with pytest.raises(
        Diverged,
        match=r"^the gradient is not finite at update 44; 4 updates were "
        r"left out for that, and config\.guards\.max_skipped is 3, at the learning "
        r"rate 4\.4; the last checkpoint is runs/x/40",
    ):
        spikes(guard, [(44, LEFT_OUT)])


def test_count_of_a_run_resumed_without_the_guard_ends_nothing() -> None:
    guard, told = guards(max_skipped=0, skipped=2)
    assert spikes(guard, [(1, update(1.0))]) == {} and not told


def test_spikes_come_back_with_their_updates() -> None:
    guard, told = guards(factor=3.0)
    assert spikes(guard, [(step, update(0.5)) for step in range(1, 41)]) == {}
    found = spikes(
        guard,
        [(41, update(2.0)), (42, update(0.5)), (43, update(8.0, weight=2.0)), (44, update(1.4))],
    )
    assert found == {41: {"loss": 2.0, "median": 0.5}, 43: {"loss": 8.0, "median": 0.5}}
    assert not told


def test_floor_of_the_config_is_heeded() -> None:
    guard, _ = guards(factor=3.0, floor=2.0)
    spikes(guard, [(step, update(0.5)) for step in range(1, 41)])
    found = spikes(guard, [(41, update(2.0)), (42, update(2.5))])
    assert found == {42: {"loss": 2.5, "median": 0.5}}


def test_update_left_out_has_no_loss() -> None:
    guard, told = guards(max_skipped=100)
    spikes(guard, [(step, update(1.0)) for step in range(1, 31)])
    spikes(guard, [(step, LEFT_OUT) for step in range(31, 61)])
    assert spikes(guard, [(61, update(3.1))]) == {61: {"loss": pytest.approx(3.1), "median": 1.0}}


def test_record_has_the_count_of_the_whole_run() -> None:
    guard, _ = guards(max_skipped=9, skipped=4)
    spikes(guard, [(41, LEFT_OUT)])
    found = record(41, {"loss": 1.0, "skipped": 0.5})
    guard.recorded(found)
    assert found.values == {"loss": 1.0, "skipped": 5}


def test_resumed_guards_know_the_recent_losses() -> None:
    before, _ = guards()
    spikes(before, [(step, update(0.5)) for step in range(1, 41)])
    after, _ = guards()
    after.restore(before.state())
    assert spikes(after, [(41, update(2.0))]) == {41: {"loss": 2.0, "median": 0.5}}


BAD_EXAMPLE = 12


@pytest.fixture
def bad_example(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """One training example is not a number; gives the updates that have it in their batch."""
    load = data.load

    def loaded(name: str, split: str, **options: Any) -> data.Source:
        source = load(name, split, **options)
        if split == "test":
            return source
        image = source.arrays["image"].astype(np.float32)
        image[BAD_EXAMPLE] = np.nan
        return data.ArraySource(source.name, source.arrays | {"image": image}, source.num_classes)

    monkeypatch.setattr(data, "load", loaded)
    order = data.global_indices(0, 0, 64 * 12, 256)
    return {place // 64 + 1 for place in np.flatnonzero(order == BAD_EXAMPLE)}


@pytest.mark.long
def test_bad_example_costs_its_updates_alone(
    tmp_path: pathlib.Path, bad_example: set[int], capsys: pytest.CaptureFixture
) -> None:
    """Under shard_map with the optimizer's state split; jit is below."""
    config = tiny.digits(
        guards__max_skipped=3,
        ema__decay=0.9,
        parallel__backend="shard_map",
        parallel__optimizer_state="zero1",
    )
    train(config, tmp_path, quiet=True)
    left_out = sorted(bad_example)
    assert len(left_out) == 3  # once an epoch
    state, _ = tiny.restored(config, tmp_path)
    assert int(state.step) == 12 and int(state.skipped) == 3
    for tree in (state.params, state.opt_state, state.ema):
        assert all(np.isfinite(leaf).all() for leaf in tiny.arrays(tree).values())
    warnings = capsys.readouterr().err
    told = re.findall(r"^(update \d+) is left out", warnings, re.MULTILINE)
    named = f"image[0, 0, 0] of example {BAD_EXAMPLE} of digits:train[:256] (split 'train[:256]')"
    assert tiny.unbroken(warnings).count(f"{named} is nan; it must be finite") == len(told)
    assert told == [f"update {step}" for step in left_out]
    records = read_records(tmp_path / "metrics.jsonl", "train")
    assert [r["step"] for r in records if "loss" not in r] == left_out
    assert [r["skipped"] for r in records] == [
        sum(step <= r["step"] for step in left_out) for r in records
    ]
    # A run resumed in the middle goes on counting.
    for step in (8, 12):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    train(config, tmp_path, quiet=True)
    assert ": 3 left out" in tiny.unbroken(capsys.readouterr().err)
    tiny.assert_equal(tiny.restored(config, tmp_path)[0], state)


@pytest.mark.long
def test_one_update_too_many_ends_the_run_and_names_the_example(
    tmp_path: pathlib.Path, bad_example: set[int]
) -> None:
    last = sorted(bad_example)[2]
    config = tiny.digits(guards__max_skipped=2, checkpoint__every="1 steps")
    message = (
        f"^the gradient is not finite at update {last}; 3 updates were left out.* and its batch "
        f"may be the cause: image.0, 0, 0. of example {BAD_EXAMPLE} of digits:.* is nan; it must "
        "be finite as float32"
    )
    with pytest.raises(UserError, match=message):
        train(config, tmp_path, quiet=True)
    assert int(tiny.restored(config, tmp_path)[0].step) == last - 1


def test_run_that_skips_nothing_rejects_the_example_at_once(
    tmp_path: pathlib.Path, bad_example: set[int]
) -> None:
    with pytest.raises(UserError, match=f"^image.* of example {BAD_EXAMPLE} of digits:"):
        train(tiny.digits(), tmp_path, quiet=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_batch_to_blame_is_named_instead_of_the_rate() -> None:
    """The guard asks for the batch of the update whose number is not finite."""
    asked = []

    def examine(step: int) -> None:
        asked.append(step)
        raise UserError("image of example 5 is 1e+30")

    config = SimpleNamespace(max_skipped=0, spike_factor=0.0, spike_floor=0.0)
    guard = Guards(config, lambda step: 0.1, print, print, examine)
    guard.started(start())
    with pytest.raises(
        UserError,
        match="^loss became inf at update 7, and its batch may be the "
        "cause: image of example 5 is 1e.30; the last checkpoint is runs/x/40$",
    ):
        guard.fetched([(7, update(math.inf))])
    assert asked == [7]


@pytest.mark.long
def test_spike_of_a_run_is_written_down(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shard_batch, numbers = Run.shard_batch, iter(range(1, 49))

    def shard(run: Run, batch: data.Batch) -> dict[str, Any]:
        if next(numbers) == 35:  # far brighter than any digit
            batch = batch | {"image": np.full_like(batch["image"], 255)}
        return shard_batch(run, batch)

    monkeypatch.setattr(Run, "shard_batch", shard)
    config = tiny.digits(
        duration="48 steps", optimizer__learning_rate=0.001, guards__spike_factor=3.0
    )
    train(config, tmp_path)
    (spike,) = read_records(tmp_path / "metrics.jsonl", "spike")
    losses = [r["loss"] for r in read_records(tmp_path / "metrics.jsonl", "train")]
    assert spike["step"] == 35 and spike["loss"] == losses[34]
    assert spike["median"] == pytest.approx(np.median(losses[:34]), rel=1e-12)
    told = f"update 35: loss spike of {losses[34]:.4g}, the recent median is {spike['median']:.4g}"
    assert told in capsys.readouterr().out


@pytest.mark.long
def test_healthy_run_tells_no_spike_and_a_broken_batch_in_it_does(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The recipe as it is: near its end a batch may be a hundred times the median of 0.001."""
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config()
    config.log.tensorboard = False
    train(config, tmp_path / "healthy")
    losses = read_records(tmp_path / "healthy" / "metrics.jsonl", "train")
    assert losses[-1]["step"] == 1348 and losses[-1]["loss"] < 0.01
    assert not read_records(tmp_path / "healthy" / "metrics.jsonl", "spike")
    assert "spike" not in capsys.readouterr().out

    shard_batch, numbers = Run.shard_batch, iter(range(1, 1349))

    def shard(run: Run, batch: data.Batch) -> dict[str, Any]:
        if next(numbers) == 1000:  # labels that belong to other images
            batch = batch | {"label": np.roll(batch["label"], 1)}
        return shard_batch(run, batch)

    monkeypatch.setattr(Run, "shard_batch", shard)
    train(config, tmp_path / "broken")
    spikes = read_records(tmp_path / "broken" / "metrics.jsonl", "spike")
    assert [spike["step"] for spike in spikes] == [1000]
    assert "update 1000: loss spike of " in capsys.readouterr().out


def test_a_run_of_one_bit_that_diverges_hears_of_the_floor_and_the_mask() -> None:
    guard, _ = guards()
    params = {"w": np.ones(3, np.float32)}
    for name in ("onebit_adam", "onebit_lamb", "zero_one_adam"):
        state = optim.make_optimizer({"name": name}, 0.1).init(params)
        guard.started(start(state=SimpleNamespace(skipped=0, opt_state=state)))
        with pytest.raises(
            Diverged,
            match=r"Try, in a new --workdir, a larger config\.optimizer\."
            r"relative_floor or config\.optimizer\.eps, a mask by .*masked_rows, "
            r"a lower config\.optimizer\.learning_rate",
        ):
            spikes(guard, [(7, update(np.inf))])
