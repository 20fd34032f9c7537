"""Guards against non-finite numbers, skipped updates and loss spikes."""

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
from tests.raising import rejected
from tests.watch.observing import record, start


def observed(detector: SpikeDetector, losses: list[float]) -> dict[int, float]:
    """Returns a dict of the spikes: position in `losses` -> median that the detector returned."""
    medians = [detector.observe(loss) for loss in losses]
    return {place: median for place, median in enumerate(medians) if median is not None}


@pytest.mark.parametrize(
    "settings, losses, expected",
    [
        # The fourth loss does not exceed 3 times the median 2, and the sixth does not exceed 3 times
        # the median 3. Before the seventh, the window drops the loss 1.
        ((3.0, 0.0, 5, 3), [1.0, 2.0, 3.0, 6.0, 7.6, 9.0, 18.1], {4: 2.5, 6: 6.0}),
        # A spike exceeds all recent losses.
        ((3.0, 0.0, 6, 3), [5.0, 1.0, 1.0, 1.0, 5.0, 5.1], {5: 1.0}),
        # The first 4 losses cannot be spikes.
        ((2.0, 0.0, 10, 4), [1.0, 1.0, 100.0, 1.0, 101.0], {4: 1.0}),
        # A loss that does not exceed the floor is not a spike.
        ((10.0, 1.0, 5, 3), [0.01, 0.02, 0.01, 0.5, 1.0, 1.1], {5: 0.02}),
        # If the median is not positive, there is no spike.
        ((3.0, 0.0, 100, 2), [0.0] * 5 + [50.0], {}),
        ((3.0, 0.0, 100, 2), [-2.0] * 5 + [50.0], {}),
        # A lasting change is reported once.
        ((3.0, 0.0, 10, 5), [1.0] * 10 + [10.0] * 20, {10: 1.0}),
        # A factor of 0 disables the detector.
        ((0.0, 0.0, 100, 1), [1.0, 1e9], {}),
        *(
            ((3.0, 0.0, 3, 3), [1.0, value, 2.0, value, 3.0, value, 6.1], {6: 2.0})
            for value in (math.nan, math.inf, -math.inf)
        ),
    ],
)
def test_spikes(
    settings: tuple[float, ...], losses: list[float], expected: dict[int, float]
) -> None:
    assert observed(SpikeDetector(*settings), losses) == expected


def test_a_noisy_falling_loss_has_no_spike() -> None:
    noise = np.random.default_rng(0).uniform(0.6, 1.5, 2000)
    losses = (2.3 * np.exp(-np.arange(2000) / 300) + 0.1) * noise
    assert observed(SpikeDetector(3.0), list(losses)) == {}


def guards(
    max_skipped: int = 0, skipped: int = 0, floor: float = 0.0, **options: Any
) -> tuple[Guards, list[str]]:
    """Returns guards of a run with the learning rates 0.1, 0.2, ..., and the list of warnings."""
    output: list[str] = []
    config = SimpleNamespace(max_skipped=max_skipped, spike_factor=3.0, spike_floor=floor)
    rate = lambda step: 0.1 * (step + 1)  # noqa: E731
    guard = Guards(config, rate, output.append, lambda text: None, **options)
    guard.started(start(skipped=skipped))
    return guard, output


def spikes(guard: Guards, updates: Iterable[tuple[int, Any]]) -> dict[int, dict[str, float]]:
    records = guard._start.records
    records.actual.clear()
    guard.fetched(updates)
    assert {each.pop("kind") for each in records.actual} <= {"spike"}
    return {each.pop("step"): each for each in records.actual}


def update(loss: float, weight: float = 4.0, **others: Any) -> dict[str, tuple[float, float]]:
    """Returns the fetched sums of an update with the mean loss `loss`."""
    return {
        "loss": (np.float32(loss * weight), np.float32(weight)),
        **{name: (np.float32(value), np.float32(1)) for name, value in others.items()},
    }


LEFT_OUT = update(0.0, weight=0.0, skipped=1.0) | {"grad_norm": (np.float32(0), np.float32(0))}


def test_finite_numbers_pass() -> None:
    guard, output = guards()
    steady = [(step, update(1.0, grad_norm=2.0)) for step in range(1, 31)]
    assert spikes(guard, steady) == {} and not output and guard.skipped == 0


@pytest.mark.parametrize("max_skipped", [0, 5])
@pytest.mark.parametrize(
    "name, value, output", [("loss", np.inf, "inf"), ("param_norm", np.nan, "nan")]
)
def test_a_nonfinite_number_ends_the_run(
    name: str, value: float, output: str, max_skipped: int
) -> None:
    guard, _ = guards(max_skipped)
    updates = [(41, update(1.0)), (42, update(1.0) | {name: (np.float32(value), np.float32(1))})]
    with pytest.raises(
        Diverged,
        match=rf"^{name} became {output} at update 42 \(learning rate "
        r"4\.2\); the last checkpoint is runs/x/40\. Try, in a new --workdir",
    ):
        spikes(guard, updates)


def test_skipped_updates_are_reported_up_to_the_limit() -> None:
    guard, output = guards(max_skipped=3, skipped=1)  # the previous start skipped one update
    assert spikes(guard, [(41, update(1.0, skipped=0.0)), (42, LEFT_OUT), (43, LEFT_OUT)]) == {}
    assert guard.skipped == 3
    assert output == [
        "update 42 is skipped, because its gradient is not finite: 2 skipped so far, and "
        "config.guards.max_skipped is 3",
        "update 43 is skipped, because its gradient is not finite: 3 skipped so far, and "
        "config.guards.max_skipped is 3",
    ]
    key = "*at update 44: 4 skipped so far, and config.guards.max_skipped is 3"
    with rejected(key, ..., "(learning rate 4.4)", "is runs/x/40. Try", Diverged):
        spikes(guard, [(44, LEFT_OUT)])


def test_earlier_skipped_updates_alone_do_not_end_the_run() -> None:
    guard, output = guards(max_skipped=0, skipped=2)
    assert spikes(guard, [(1, update(1.0))]) == {} and not output


def test_spikes_are_recorded_with_their_updates() -> None:
    guard, output = guards()
    assert spikes(guard, [(step, update(0.5)) for step in range(1, 41)]) == {}
    actual = spikes(
        guard,
        [(41, update(2.0)), (42, update(0.5)), (43, update(8.0, weight=2.0)), (44, update(1.4))],
    )
    assert actual == {41: {"loss": 2.0, "median": 0.5}, 43: {"loss": 8.0, "median": 0.5}}
    assert not output


def test_floor_of_the_config() -> None:
    guard, _ = guards(floor=2.0)
    spikes(guard, [(step, update(0.5)) for step in range(1, 41)])
    actual = spikes(guard, [(41, update(2.0)), (42, update(2.5))])
    assert actual == {42: {"loss": 2.5, "median": 0.5}}


def test_a_skipped_update_has_no_loss() -> None:
    guard, output = guards(max_skipped=100)
    spikes(guard, [(step, update(1.0)) for step in range(1, 31)])
    spikes(guard, [(step, LEFT_OUT) for step in range(31, 61)])
    assert spikes(guard, [(61, update(3.1))]) == {61: {"loss": pytest.approx(3.1), "median": 1.0}}


def test_a_record_counts_skipped_updates_of_the_run() -> None:
    guard, _ = guards(max_skipped=9, skipped=4)
    spikes(guard, [(41, LEFT_OUT)])
    actual = record(41, {"loss": 1.0, "skipped": 0.5})
    guard.recorded(actual)
    assert actual.values == {"loss": 1.0, "skipped": 5}


def test_resumed_guards_have_the_recent_losses() -> None:
    before, _ = guards()
    spikes(before, [(step, update(0.5)) for step in range(1, 41)])
    after, _ = guards()
    after.restore(before.state())
    assert spikes(after, [(41, update(2.0))]) == {41: {"loss": 2.0, "median": 0.5}}


BAD_EXAMPLE = 12


@pytest.fixture
def bad_example(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sets one training example to NaN; returns the updates whose batch has this example."""
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
def test_bad_example_skips_only_its_updates(
    tmp_path: pathlib.Path, bad_example: set[int], capsys: pytest.CaptureFixture
) -> None:
    """Uses the shard_map backend with sharded optimizer state; a later test uses the jit backend."""
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
    output = re.findall(r"^(update \d+) is skipped", warnings, re.MULTILINE)
    named = f"image[0, 0, 0] of example {BAD_EXAMPLE} of digits:train[:256] (split 'train[:256]')"
    cause = f"{named} is nan, which is not finite as float32"
    assert tiny.unbroken(warnings).count(cause) == len(output)
    assert output == [f"update {step}" for step in left_out]
    records = read_records(tmp_path / "metrics.jsonl", "train")
    assert [r["step"] for r in records if "loss" not in r] == left_out
    assert [r["skipped"] for r in records] == [
        sum(step <= r["step"] for step in left_out) for r in records
    ]
    # A resumed run continues to count.
    for step in (8, 12):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    train(config, tmp_path, quiet=True)
    assert ": 3 skipped so far" in tiny.unbroken(capsys.readouterr().err)
    tiny.assert_equal(tiny.restored(config, tmp_path)[0], state)


@pytest.mark.long
def test_one_update_too_many_ends_the_run_and_names_the_example(
    tmp_path: pathlib.Path, bad_example: set[int]
) -> None:
    last = sorted(bad_example)[2]
    config = tiny.digits(guards__max_skipped=2, checkpoint__every="1 steps")
    message = (
        f"^the gradient is not finite at update {last}: 3 skipped so far.* and its batch "
        f"may be the cause: image.0, 0, 0. of example {BAD_EXAMPLE} of digits:.* is nan, which is "
        "not finite as float32"
    )
    with pytest.raises(UserError, match=message):
        train(config, tmp_path, quiet=True)
    assert int(tiny.restored(config, tmp_path)[0].step) == last - 1


def test_without_skipping_the_example_ends_the_run(
    tmp_path: pathlib.Path, bad_example: set[int]
) -> None:
    with rejected("*(split 'train[:256]')", ..., "is not finite as float32"):
        train(tiny.digits(), tmp_path, quiet=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_error_names_the_batch_instead_of_the_rate() -> None:
    """The guard examines the batch of the update with a non-finite number."""
    asked = []

    def examine(step: int) -> None:
        asked.append(step)
        raise UserError("image of example 5 is 1e+30")

    guard, _ = guards(examine=examine)
    problem = ", and its batch may be the cause: image of example 5"
    with rejected("loss became inf at update 7", ..., problem, "the last checkpoint is runs/x/40"):
        guard.fetched([(7, update(math.inf))])
    assert asked == [7]


@pytest.mark.long
def test_the_spike_of_a_run_is_recorded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shard_batch, numbers = Run.shard_batch, iter(range(1, 49))

    def shard(run: Run, batch: data.Batch, *rest: Any) -> dict[str, Any]:
        if next(numbers) == 35:  # pixel values far out of range
            batch = batch | {"image": np.full_like(batch["image"], 255)}
        return shard_batch(run, batch, *rest)

    monkeypatch.setattr(Run, "shard_batch", shard)
    config = tiny.digits(
        duration="48 steps", optimizer__learning_rate=0.001, guards__spike_factor=3.0
    )
    train(config, tmp_path)
    (spike,) = read_records(tmp_path / "metrics.jsonl", "spike")
    losses = [r["loss"] for r in read_records(tmp_path / "metrics.jsonl", "train")]
    assert spike["step"] == 35 and spike["loss"] == losses[34]
    assert spike["median"] == pytest.approx(np.median(losses[:34]), rel=1e-12)
    output = (
        f"update 35: loss spike of {losses[34]:.4g}, the recent median is {spike['median']:.4g}"
    )
    assert output in capsys.readouterr().out


@pytest.mark.long
def test_only_a_broken_batch_is_a_spike(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The test runs the unchanged recipe; its late losses can be 100 times their median of 0.001."""
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config()
    config.log.tensorboard = False
    train(config, tmp_path / "healthy")
    losses = read_records(tmp_path / "healthy" / "metrics.jsonl", "train")
    assert losses[-1]["step"] == 1348 and losses[-1]["loss"] < 0.01
    assert not read_records(tmp_path / "healthy" / "metrics.jsonl", "spike")
    assert "spike" not in capsys.readouterr().out

    shard_batch, numbers = Run.shard_batch, iter(range(1, 1349))

    def shard(run: Run, batch: data.Batch, *rest: Any) -> dict[str, Any]:
        if next(numbers) == 1000:  # assign labels to other images
            batch = batch | {"label": np.roll(batch["label"], 1)}
        return shard_batch(run, batch, *rest)

    monkeypatch.setattr(Run, "shard_batch", shard)
    train(config, tmp_path / "broken")
    spikes = read_records(tmp_path / "broken" / "metrics.jsonl", "spike")
    assert [spike["step"] for spike in spikes] == [1000]
    assert "update 1000: loss spike of " in capsys.readouterr().out


def test_advice_for_diverged_one_bit_runs() -> None:
    guard, _ = guards()
    params = {"w": np.ones(3, np.float32)}
    for name in ("onebit_adam", "onebit_lamb", "zero_one_adam"):
        state = optim.make_optimizer({"name": name}, 0.1).init(params)
        guard.started(start(state=SimpleNamespace(skipped=0, opt_state=state)))
        remedy = (
            "Try, in a new --workdir, a larger config.optimizer.relative_floor or config.optimizer"
        )
        with rejected("loss became inf at update 7", ..., "(learning rate 0.7)", remedy):
            spikes(guard, [(7, update(np.inf))])
