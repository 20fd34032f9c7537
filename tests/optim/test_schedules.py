"""Tests learning rates at critical updates; test_golden_schedules compares recorded rates."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.refinement import refined_schedule
from lamb_tpu.optim.schedules import (
    DECAYS,
    by_examples,
    exponential_decay,
    phases,
    step_decay,
    warmup,
)


def _values(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(steps)))


@pytest.mark.parametrize(
    "decay_from, first, before, end, last",
    [
        # Peak 1, W = 10, T = 100, power 2: updates 0, 9, 10 and 99.
        ("warmup", 0.0, 0.9, 1.0, (1 / 90) ** 2),
        ("zero", 0.0, 0.9, 0.9**2, (1 / 100) ** 2),
    ],
)
def test_rates_of_the_first_and_last_updates(decay_from, first, before, end, last):
    schedule = warmup(1.0, 100, 10, power=2.0, decay_from=decay_from)
    values = _values(schedule, [0, 9, 10, 99, 100, 1000])
    np.testing.assert_allclose(values, [first, before, end, last, 0.0, 0.0], rtol=2e-6)
    assert values[0] == 0.0 and values[4] == 0.0


def test_every_update_of_a_run_is_read_where_the_optimizer_reads_it():
    seen = []
    schedule = warmup(1.0, 4, 2)
    tx = optim.lars(schedule, momentum=0.0, weight_decay=0.0, rules=[("", {"adapt": False})])
    state = tx.init({"w": jnp.zeros(())})
    for _ in range(4):
        updates, state = tx.update({"w": jnp.ones(())}, state, {"w": jnp.zeros(())})
        seen.append(-float(updates["w"]))
    assert seen == [0.0, 0.5, 1.0, 0.5]


def test_without_warm_up_the_first_update_has_the_peak():
    assert float(warmup(0.5, 10)(0)) == 0.5


def test_a_fractional_warm_up():
    values = _values(warmup(1.0, 10.5, 2.5), [0, 1, 2, 3, 10, 11])
    np.testing.assert_allclose(values, [0, 0.4, 0.8, 7.5 / 8, 0.5 / 8, 0], rtol=1e-6)


def test_a_warm_up_as_long_as_the_run_approaches_the_peak():
    np.testing.assert_allclose(_values(warmup(1.0, 10, 10), [0, 5, 9]), [0, 0.5, 0.9], rtol=1e-6)
    # With first_step=1 the last update has the peak.
    late = warmup(1.0, 10, 10, end_value=1.0, first_step=1)
    np.testing.assert_allclose(_values(late, [0, 9]), [0.1, 1.0], rtol=1e-6)


def test_rates_stay_accurate_near_the_end_of_a_long_run():
    total = 1_000_000
    value = warmup(1.0, total, 1000, power=0.5)(total - 1)
    np.testing.assert_allclose(value, (1 / (total - 1000)) ** 0.5, rtol=1e-6)
    value = warmup(1.0, total, decay="cosine")(total - 1)
    np.testing.assert_allclose(value, math.sin(math.pi / 2 / total) ** 2, rtol=1e-6)


def test_end_value_and_cosine():
    values = _values(warmup(1.0, 8, decay="cosine", end_value=0.2), [0, 4, 8, 9])
    np.testing.assert_allclose(values, [1.0, 0.6, 0.2, 0.2], rtol=1e-6)
    values = _values(warmup(1.0, 8, 2, decay="constant"), [0, 1, 2, 7, 100])
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0, 1.0, 1.0])
    # A function as decay falls towards end_value, DeepSpeed's lower bound of the schedule.
    halves = exponential_decay(0.5, 2, staircase=False)
    values = _values(warmup(1.2, 9, 2, halves, end_value=0.2, start_value=0.2), [0, 1, 2, 4, 6])
    np.testing.assert_allclose(values, [0.2, 0.7, 1.2, 0.7, 0.45], rtol=1e-6)


def test_start_value_and_power_of_the_warm_up():
    # Goyal et al.: from 0.1, the rate of the base batch size, to 32 times this rate.
    values = _values(warmup(3.2, 90, 5, start_value=0.1), [0, 1, 4, 5])
    np.testing.assert_allclose(values, [0.1, 0.1 + 3.1 / 5, 0.1 + 3.1 * 0.8, 3.2], rtol=1e-6)
    values = _values(warmup(1.0, 10, 4, warmup_power=2), [0, 1, 2, 3, 4])
    np.testing.assert_allclose(values, [0, 1 / 16, 4 / 16, 9 / 16, 1], rtol=1e-6)


def test_hold():
    values = _values(warmup(1.0, 10, 2, hold_steps=3), range(11))
    np.testing.assert_allclose(
        values, [0, 0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0], rtol=1e-6, atol=1e-7
    )
    # A hold without a warm-up; and with decay_from='zero', so the rate drops after the hold.
    np.testing.assert_allclose(_values(warmup(1.0, 4, hold_steps=2), range(4)), [1, 1, 1, 0.5])
    values = _values(warmup(1.0, 10, 2, hold_steps=3, decay_from="zero"), [1, 4, 5, 9])
    np.testing.assert_allclose(values, [0.5, 1, 0.5, 0.1], rtol=1e-6)


def test_the_floor_lies_under_warm_up_and_decay():
    values = _values(warmup(1.0, 10, 4, min_value=0.3), [0, 1, 2, 4, 9, 10, 99])
    np.testing.assert_allclose(values, [0.3, 0.3, 0.5, 1.0, 0.3, 0.3, 0.3], rtol=1e-6)


def test_a_clock_that_starts_at_one_loses_no_update():
    values = _values(warmup(1.0, 4, 2, first_step=1), range(4))
    np.testing.assert_allclose(values, [0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    "staircase, expected",
    [(True, [1, 1, 0.5, 0.5, 0.25]), (False, [1, 0.5**0.75, 0.5, 0.5**1.75, 0.25])],
)
def test_exponential_decay(staircase, expected):
    schedule = exponential_decay(0.5, 4, staircase)
    np.testing.assert_allclose(_values(schedule, [0, 3, 4, 7, 8]), expected, rtol=1e-6)


@pytest.mark.parametrize("every", [1, 3, 7, 10, 24, 49, 100, 1251, 1251.3])
def test_stairs_lie_where_they_should(every):
    # In float32 12513 / 1251.3 is below 10; nevertheless the drop must not come one update late.
    steps = np.unique(
        [
            step
            for k in (*range(1, 60), 500, 1000)
            for step in (math.ceil(k * every) - 1, math.ceil(k * every))
        ]
    )
    values = _values(exponential_decay(0.999, every), steps)
    expected = [0.999 ** math.floor(round(step / every, 9)) for step in steps]
    np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_decays_that_are_functions_follow_the_clock_of_the_decay():
    decay = exponential_decay(0.5, 10)
    values = _values(warmup(1.0, 40, 5, decay=decay), [4, 5, 14, 15, 25, 100])
    np.testing.assert_allclose(values, [0.8, 1, 1, 0.5, 0.25, 0.5**9], rtol=1e-6)
    values = _values(warmup(1.0, 40, 5, decay=decay, decay_from="zero"), [4, 5, 9, 10, 20])
    np.testing.assert_allclose(values, [0.8, 1, 1, 0.5, 0.25], rtol=1e-6)


def test_step_decay():
    # Goyal et al. at batch 8,192: 156.4 updates per epoch, drops at epochs 30, 60 and 80.
    per_epoch = 1_281_167 / 8192
    boundaries = [epoch * per_epoch for epoch in (30, 60, 80)]
    schedule = warmup(
        3.2, 90 * per_epoch, 5 * per_epoch, decay=step_decay(boundaries, 0.1), decay_from="zero"
    )
    steps = [782, 4691, 4692, 9383, 9384, 12511, 12512, 14075]
    expected = [3.2, 3.2, 0.32, 0.32, 0.032, 0.032, 0.0032, 0.0032]
    np.testing.assert_allclose(_values(schedule, steps), expected, rtol=1e-6)
    assert float(step_decay([3], 0.5)(3)) == 0.5 and float(step_decay([3], 0.5)(2)) == 1.0


def test_phases_warm_up_again():
    schedule = phases((warmup(1.0, 4, 2), 4), (warmup(0.5, 3, 1), 3), (warmup(8.0, 2), 2))
    expected = [0, 0.5, 1, 0.5, 0, 0.5, 0.25, 8, 4, 0, 0]
    np.testing.assert_allclose(_values(schedule, range(11)), expected)
    np.testing.assert_allclose([float(schedule(t)) for t in range(11)], expected)
    alone = phases((warmup(1.0, 4, 2), 4))
    np.testing.assert_allclose(_values(alone, range(5)), [0, 0.5, 1, 0.5, 0])


def test_by_examples_is_the_schedule_in_updates_where_the_batch_is_constant():
    for options in ({}, {"decay": "cosine"}, {"decay_from": "zero"}):
        in_updates = warmup(1.0, 50, 12.5, **options)
        in_examples = by_examples(warmup(1.0, 50 * 96, 12.5 * 96, **options), 96)
        np.testing.assert_allclose(
            _values(in_examples, range(60)), _values(in_updates, range(60)), atol=1e-6
        )


def test_by_examples_follows_a_batch_that_grows():
    rate = warmup(1.0, 1_000, 300)
    pairs = [(10, 5), (30, 4), (50, 1)]
    seen = [0, *np.cumsum([10] * 5 + [30] * 4 + [50] * 30)]
    np.testing.assert_allclose(
        _values(by_examples(rate, pairs), range(40)), _values(rate, seen), rtol=1e-6
    )
    # 10,000 updates of a million examples exceed an int32.
    late = by_examples(lambda seen: seen, [(1, 1), (1_000_000, 1)])
    assert float(jax.jit(late)(10_001)) == 1e10


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": 0},
        {"warmup_steps": 10},
        {"warmup_steps": 5, "hold_steps": 5},
        {"hold_steps": 10},
        {"decay": "cosine", "warmup_steps": 10},
        {"power": 0.5, "warmup_steps": 10, "warmup_power": 0.5, "first_step": 1},
        {"decay": exponential_decay(0.5, 1e-3), "decay_from": "zero"},
        {"decay": exponential_decay(1e-30, 1.0, staircase=False), "warmup_steps": 10},
    ],
)
def test_no_length_of_zero_gives_nan(options):
    values = _values(warmup(1.0, 10, **options), range(30))
    assert np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()


def test_rates_are_float32_scalars_and_float64_where_enabled():
    schedules = [
        warmup(1, 10, 2),
        warmup(1, 10, 2, decay="cosine"),
        warmup(1, 10, 2, decay="constant"),
        warmup(1, 10, 2, decay=exponential_decay(1, 2), hold_steps=1, min_value=1, first_step=1),
        warmup(1, 10, 2, decay=step_decay([1], 1), start_value=1),
        exponential_decay(1, 2),
        step_decay([1, 2], 1),
        phases((warmup(1, 2), 2), (warmup(2, 2), 2)),
        by_examples(warmup(1, 10, 2), [(1, 2), (2, 2)]),
    ]
    for schedule in schedules:
        value = schedule(jnp.int32(3))
        assert value.dtype == jnp.float32 and value.shape == () and not value.weak_type
        assert schedule(3).dtype == jnp.float32
        assert schedule(jnp.arange(6).reshape(2, 3)).shape == (2, 3)
        with jax.enable_x64(True):
            assert schedule(jnp.int32(3)).dtype == jnp.float64


@pytest.mark.parametrize(
    "schedule",
    [
        *(
            warmup(1.0, 10, 2, decay=decay, hold_steps=1, min_value=0.1, warmup_power=2)
            for decay in DECAYS
        ),
        warmup(1.0, 10, 2, decay=exponential_decay(0.5, 2)),
        warmup(1.0, 10, 2, decay=exponential_decay(0.5, 2, staircase=False)),
        warmup(1.0, 10, 2, decay=step_decay([3, 5], 0.1)),
        phases((warmup(1.0, 10, 2), 10), (warmup(1.0, 5, first_step=1), 5)),
        by_examples(warmup(1.0, 100, 20), [(8, 3), (16, 5)]),
        refined_schedule([4.0, 2.0, 1.0], 0.1),
    ],
)
def test_strict_promotion(schedule):
    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(schedule, jnp.int32(3)).dtype == jnp.float32
        assert jnp.isfinite(schedule(3))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: warmup(1, 0), "total_steps=0 must be above 0"),
        (
            lambda: warmup(0.1, total_steps=10, warmup_steps=20),
            "warmup_steps=20 is longer than total_steps=10, so the rate would never reach its peak; use",
        ),
        (
            lambda: warmup(1, 10, 10.5, hold_steps=1),
            "warmup_steps=10.5 is longer than total_steps=10",
        ),
        (lambda: warmup(1, 1, power=0), "power=0 must be above 0"),
        (lambda: warmup(1, 1, decay="linear"), "'linear' is unknown; use one of polynomial"),
        (lambda: warmup(1, 1, decay=0.1), "decay=0.1 is unknown; .*, or a function such as"),
        (
            lambda: warmup(1, 1, decay="cosine", power=2),
            "power=2 has no effect with decay='cosine'",
        ),
        (lambda: warmup(1, 1, decay="constant", end_value=1), "end_value=1 has no effect"),
        (lambda: warmup(1, 1, decay=lambda t: t, power=2), "power=2 has no effect with a function"),
        (lambda: warmup(1, 1, decay_from="end"), "decay_from='end' must be 'warmup' or 'zero'"),
        (lambda: warmup(1, 1, warmup_power=0), "warmup_power=0 must be above 0"),
        (lambda: exponential_decay(0, 1), "factor=0 must be above 0 and at most 1"),
        (lambda: exponential_decay(1.1, 1), "factor=1.1 must be above 0 and at most 1"),
        (lambda: exponential_decay(0.5, 0), "every_steps=0 must be above 0"),
        (lambda: step_decay([], 0.1), r"boundaries=\[\] must be positive"),
        (lambda: step_decay([0, 1], 0.1), r"boundaries=\[0, 1\] must be positive"),
        (lambda: step_decay([2, 2], 0.1), r"boundaries=\[2, 2\] must be positive"),
        (lambda: step_decay([1, float("nan")], 0.1), "boundaries=.* must be positive"),
        (lambda: step_decay([1], 2), "factor=2 must be above 0 and at most 1"),
        (lambda: phases(), "phases needs at least one"),
        (lambda: phases((0.1, 3)), "the schedule of parts.0.=.0.1, 3. must be a function"),
        (
            lambda: phases((warmup(1, 1), 1), (warmup(1, 1), 0)),
            "the steps of parts.1.=.* must be a whole number",
        ),
        (lambda: by_examples(0.1, 8), "schedule=0.1 must be a function of the number of"),
        (lambda: by_examples(warmup(1, 1), 0), "batch_size=0 must be a whole .* at least 1"),
        (lambda: by_examples(warmup(1, 1), []), r"batch_size=\[\] must be a number or a list"),
        (lambda: by_examples(warmup(1, 1), [8]), r"batch_size.0.=8 must be a pair"),
        (lambda: by_examples(warmup(1, 1), [(8, 1.5)]), "batch_size.0..1.=1.5 must be a whole"),
        (lambda: phases((warmup(1, 1), 1.5)), "the steps of parts.0.=.*1.5. must be a whole"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
