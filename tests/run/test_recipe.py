"""Conversion of durations and intervals to updates, and the learning rate of each update."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import Recipe, resolve
from lamb_tpu.spec import parse
from tests import tiny


def mnist(num_examples: int = 60_000, **changes) -> Recipe:
    """Returns a recipe of 30 epochs at batch 1,024, base batch 256, with one epoch of warm-up."""
    values = {
        "batch_size": 1024,
        "duration": "30 epochs",
        "schedule__base_batch_size": 256,
        "eval__every": "1 epochs",
        "optimizer__learning_rate": 0.1,
    }
    return resolve(tiny.digits(**values | changes), num_examples)


# The rate is divided by 10 at epochs 10 and 20 of 30.
STEP = {
    "schedule__decay": "step",
    "schedule__decay_from": "zero",
    "schedule__decay_factor": 0.1,
    "schedule__boundaries": "10 epochs, 20 epochs",
}


def due(recipe: Recipe, every: float) -> list[int]:
    return [step for step in range(1, recipe.total_steps + 1) if recipe.is_due(every, step)]


def test_epochs_become_updates_by_the_true_number_of_examples() -> None:
    # 30 * 60,000 / 1,024 = 1,757.8: neither 30 * floor(58.6) = 1,740 nor 30 * ceil(58.6) = 1,770.
    assert mnist().total_steps == 1758
    assert mnist(duration="1 epochs").total_steps == 59
    assert mnist(duration="100_000 examples").total_steps == 98
    assert mnist(duration="7 steps").total_steps == 7
    assert mnist(num_examples=1024).total_steps == 30
    assert mnist().epoch(1024) == pytest.approx(1024 * 1024 / 60_000)


def test_thirty_epochs_have_thirty_evaluations() -> None:
    recipe = mnist()
    steps = due(recipe, recipe.eval_every)
    assert len(steps) == 30 and steps[-1] == 1758
    # The k-th evaluation is due at the first update at or after k epochs.
    assert steps == [-(-k * 60_000 // 1024) for k in range(1, 31)]


@pytest.mark.parametrize(
    "every, total, steps",
    [
        (4.0, 12, [4, 8, 12]),
        (5.0, 12, [5, 10, 12]),
        (0.1, 3, [1, 2, 3]),
        (100.0, 12, [12]),
        (12.0, 12, [12]),
        (1 / 3, 2, [1, 2]),
        (0.1 + 0.2, 3, [1, 2, 3]),
        (2.5, 10, [3, 5, 8, 10]),
        (0.0, 3, []),
    ],
)
def test_due(every: float, total: int, steps: list[int]) -> None:
    assert due(mnist(duration=f"{total} steps"), every) == steps


def test_intervals_of_an_exact_division_do_not_slip() -> None:
    recipe = mnist(num_examples=64_000, batch_size=1000, duration="50 epochs")
    assert due(recipe, recipe.eval_every) == list(range(64, 3201, 64))


def test_units_of_intervals() -> None:
    recipe = mnist(
        eval__every="10 percent",
        checkpoint__every="2048 examples",
        log__every="0.001 epochs",
        guards__desync_every="5120 examples",
        checkpoint__keep_every="50 percent",
    )
    assert (recipe.eval_every, recipe.checkpoint_every) == (175.8, 2.0)
    assert recipe.log_every == 1.0  # never more than once an update
    assert recipe.desync_every == 5.0 and mnist().desync_every == 0
    assert recipe.keep_every == 879.0 and mnist().keep_every == 0


@pytest.mark.parametrize(
    "scaling, rate, warmup",
    # One epoch of warm-up is 58.6 updates at 4 times the base batch, and 234.4 at the base batch.
    [
        ("identity", 0.1, 60_000 / 1024),
        ("linear", 0.4, 60_000 / 1024),
        ("sqrt", 0.2, 60_000 / 1024),
        ("random_matrix", 0.2, 60_000 / 1024),
        ("legw", 0.2, 60_000 / 256),
    ],
)
def test_rate_is_scaled_to_the_batch(scaling: str, rate: float, warmup: float) -> None:
    recipe = mnist(schedule__scaling=scaling)
    assert recipe.peak_learning_rate == pytest.approx(rate)
    assert recipe.warmup_steps == pytest.approx(warmup)
    base = mnist(schedule__scaling=scaling, batch_size=256)
    assert base.peak_learning_rate == pytest.approx(0.1)
    assert base.warmup_steps == pytest.approx(60_000 / 256)


@pytest.mark.parametrize("warmup", ["90 steps", "1 epochs", "60_000 examples", "3 percent"])
def test_legw_keeps_the_updates_of_the_warm_up(warmup: str) -> None:
    recipes = [
        mnist(schedule__scaling="legw", schedule__warmup=warmup, batch_size=size)
        for size in (256, 1024, 4096)
    ]
    base = recipes[0].warmup_steps
    assert base > 80
    for recipe in recipes[1:]:
        assert recipe.warmup_steps == pytest.approx(base, rel=1e-6)


def test_learning_rates_at_the_corners() -> None:
    recipe = mnist(duration="100 steps", schedule__warmup="10 steps", schedule__end_factor=0.1)
    rates = recipe.learning_rates
    assert rates.shape == (100,)
    np.testing.assert_allclose(rates[[0, 5, 10]], [0, 0.05, 0.1], rtol=1e-6)
    # The last update is one before the end, where the rate is a tenth of the peak.
    np.testing.assert_allclose(rates[-1], 0.01 + 0.09 / 90, rtol=1e-6)
    one_by_one = [float(recipe.learning_rate(step)) for step in range(100)]
    np.testing.assert_allclose(rates, one_by_one, rtol=1e-6)


def test_random_matrix_follows_the_optimizer() -> None:
    recipe = mnist(schedule__scaling="random_matrix", optimizer__name="momentum")
    assert recipe.peak_learning_rate == pytest.approx(0.4)


def test_step_decay_drops_at_true_epochs() -> None:
    rates = mnist(**STEP, schedule__warmup="0 steps").learning_rates
    # The boundaries are at 585.9 and 1,171.9 updates.
    np.testing.assert_allclose(
        rates[[0, 585, 586, 1171, 1172, 1757]], [0.1, 0.1, 0.01, 0.01, 0.001, 0.001], rtol=1e-6
    )


def test_exponential_decay_with_warm_up_and_hold() -> None:
    changes = {
        "duration": "100 steps",
        "schedule__warmup": "10 steps",
        "schedule__hold": "5 percent",
        "schedule__decay": "exponential",
        "schedule__decay_factor": 0.5,
        "schedule__decay_every": "20 steps",
    }
    rates = mnist(**changes).learning_rates
    expected = [0.05, 0.1, 0.1, 0.1, 0.05, 0.025]
    np.testing.assert_allclose(rates[[5, 10, 15, 34, 35, 55]], expected, rtol=1e-6)
    rates = mnist(**changes, schedule__staircase=False).learning_rates
    np.testing.assert_allclose(rates[[15, 25, 35]], [0.1, 0.1 * 0.5**0.5, 0.05], rtol=1e-6)


def test_start_floor_and_clock() -> None:
    rates = mnist(
        duration="100 steps",
        schedule__warmup="10 steps",
        schedule__start_factor=0.5,
        schedule__warmup_power=2.0,
        schedule__min_factor=0.6,
        schedule__first_step=1,
    ).learning_rates
    expected = [0.06, 0.05 + 0.05 * 0.25, 0.1, 0.06]
    np.testing.assert_allclose(rates[[0, 4, 9, 99]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "duration, scaling, decay",
    # At four times the batch size, a duration in updates covers four times the data.
    [
        ("30 epochs", "identity", 0.4),
        ("30 epochs", "sqrt", 0.2),
        ("30 epochs", "linear", 0.1),
        ("1000 steps", "identity", 0.1),
    ],
)
def test_weight_decay_that_keeps_the_timescale(duration: str, scaling: str, decay: float) -> None:
    config = tiny.digits(
        optimizer=ConfigDict({"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.1}),
        batch_size=1024,
        duration=duration,
        schedule__base_batch_size=256,
        schedule__scaling=scaling,
        schedule__weight_decay_scaling="timescale",
    )
    recipe = resolve(config, 60_000)
    assert recipe.weight_decay == pytest.approx(decay)
    assert f"; weight decay {decay:g}" in recipe.describe()
    # With gradient 0, an update at the peak is -rate * decay * w.
    recipe = dataclasses.replace(recipe, learning_rate=lambda count: 0.1)
    tx = resolve_optimizer(parse(config).optimizer).make(recipe)
    params = {"kernel": jnp.ones((1, 1))}
    updates, _ = tx.update({"kernel": jnp.zeros((1, 1))}, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * decay, rtol=1e-6)


def test_summary() -> None:
    text = mnist().describe()
    assert "1,758 updates of 1,024 examples = 30 epochs of 60,000" in text
    assert "peak 0.1, warm-up 58.5938 updates = 1 epochs; update 0: 0, last: 5.884e-05" in text
    assert "warning" not in text
    assert mnist().weight_decay is None and "weight decay" not in text


def test_a_run_that_ends_in_its_warm_up_says_so() -> None:
    recipe = mnist(duration="12 steps")
    np.testing.assert_allclose(recipe.rate(11), 0.1 * 11 * 1024 / 60_000, rtol=1e-6)
    assert recipe.describe().endswith(
        "\nwarning: the warm-up of 58.5938 updates is longer than the run of 12, so the learning "
        "rate never reaches its peak; lengthen config.duration or shorten config.schedule.warmup, "
        "e.g. to '10 percent'"
    )
    # LEGW lengthens the warm-up with the batch, perhaps beyond the end of the run.
    legw = {
        "schedule__scaling": "legw",
        "schedule__base_batch_size": 256,
        "schedule__warmup": "10 epochs",
    }
    assert "warning" in mnist(batch_size=8192, **legw).describe()
    assert "warning" not in mnist(batch_size=256, **legw).describe()
    assert "warning" not in mnist(duration="12 steps", schedule__warmup="12 steps").describe()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"duration": "30 epochs 100 steps"}, "duration: '30 epochs 100 steps'"),
        ({"duration": "0 epochs"}, "duration='0 epochs' is less than one update; use"),
        (
            {"duration": "100_000_001 steps"},
            "duration=.* is 100,000,001 updates of 1,024 examples; use at most 100,000,000 updates",
        ),
        ({"duration": "1e30 epochs"}, r"duration: a duration must be at most 1e\+18 epoch"),
        ({"schedule__warmup": "soon"}, "schedule.warmup: 'soon'"),
        ({"checkpoint__every": "0 steps"}, "checkpoint.every='0 steps' is .* use a positive"),
        (
            {"schedule__decay": "cosine", "schedule__power": 2.0},
            "schedule.power=2.0 has no effect on the decay 'cosine'; use 1.0",
        ),
        (
            {"schedule__decay": "constant", "schedule__end_factor": 0.5},
            "schedule.end_factor=0.5 has no effect on the decay 'constant'",
        ),
        ({"schedule__hold": "a while"}, "schedule.hold: 'a while'"),
        ({"schedule__warmup_power": 0.0}, "schedule.warmup_power=0.0 must be above 0"),
        ({"schedule__first_step": -1}, "schedule.first_step=-1 must be at least 0"),
        (
            {"schedule__scaling": "random_matrix", "optimizer__name": "lars"},
            "schedule.scaling: optimizer='lars' has no random-matrix rule, .* 'linear' or",
        ),
        (
            {"schedule__boundaries": "10 epochs"},
            "schedule.boundaries='10 epochs' has no effect .* decay 'polynomial'; use ''",
        ),
        (
            {"schedule__decay": "exponential", "schedule__decay_every": "1 epochs"},
            "schedule.decay_factor=1.0 is out of range for the decay 'exponential'; use a",
        ),
        (
            {"schedule__decay": "exponential", "schedule__decay_factor": 0.97},
            "schedule.decay_every: every_steps=0.0 must be above 0",
        ),
        (
            STEP | {"schedule__decay_from": "warmup"},
            "schedule.decay_from='warmup' cannot be combined with the decay 'step'.* use 'zero'",
        ),
        (STEP | {"schedule__boundaries": ""}, "schedule.boundaries: '' is not a duration"),
        (
            STEP | {"schedule__boundaries": "2 epochs, 1 epochs"},
            "schedule.boundaries: boundaries=.* must be positive and strictly increasing",
        ),
        (
            {"schedule__weight_decay_scaling": "linear"},
            "schedule.weight_decay_scaling='linear' is unknown; use identity or timescale",
        ),
    ],
)
def test_errors_name_the_key(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=f"^config.{message}"):
        mnist(**changes)
