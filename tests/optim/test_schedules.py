"""Learning rates at the updates where they go wrong, and against recorded schedules."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.optim.schedules import ScaledWarmup, legw, scale_learning_rate, warmup
from tests.shared import shared


def _values(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(steps)))


@pytest.mark.parametrize("rule, expected", [("identity", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
def test_scaling_rules(rule, expected):
    assert scale_learning_rate(rule, 0.1, 256, 4096) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("batch_size, rate, epochs", [
    (512, 4 / (2**3 * 100), 0.3125),
    (1024, 4 / (2**2.5 * 100), 0.625),
    (8192, 0.02, 5.0),
    (32768, 0.04, 20.0),
])
def test_legw_gives_the_row_of_resnet_50(batch_size, rate, epochs):
    scaled = legw(4 / (2**3 * 100), 0.3125, 512, batch_size)
    assert isinstance(scaled, ScaledWarmup)
    assert scaled.learning_rate == pytest.approx(rate, rel=1e-15)
    assert scaled.warmup_epochs == epochs


@pytest.mark.parametrize("decay_from, first, before, end, last", [
    # Peak 1, W = 10, T = 100, power 2: updates 0, 9, 10 and 99.
    ("warmup", 0.0, 0.9, 1.0, (1 / 90) ** 2),
    ("zero", 0.0, 0.9, 0.9**2, (1 / 100) ** 2),
])
def test_rates_of_the_first_and_last_updates(decay_from, first, before, end, last):
    schedule = warmup(1.0, 100, 10, power=2.0, decay_from=decay_from)
    values = _values(schedule, [0, 9, 10, 99, 100, 1000])
    np.testing.assert_allclose(values, [first, before, end, last, 0.0, 0.0], rtol=2e-6)
    assert values[0] == 0.0 and values[4] == 0.0


def test_every_update_of_a_run_is_read_where_the_optimizer_reads_it():
    from lamb_tpu import optim

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


def test_a_warm_up_longer_than_the_run_never_ends():
    values = _values(warmup(1.0, 10, 40), [0, 5, 9])
    np.testing.assert_allclose(values, [0.0, 5 / 40, 9 / 40], rtol=1e-6)


def test_rates_stay_accurate_near_the_end_of_a_long_run():
    total = 1_000_000
    value = warmup(1.0, total, 1000, power=0.5)(total - 1)
    np.testing.assert_allclose(value, (1 / (total - 1000)) ** 0.5, rtol=1e-6)


def test_end_value_and_cosine():
    values = _values(warmup(1.0, 8, decay="cosine", end_value=0.2), [0, 4, 8, 9])
    np.testing.assert_allclose(values, [1.0, 0.6, 0.2, 0.2], rtol=1e-6)
    values = _values(warmup(1.0, 8, 2, decay="constant"), [0, 1, 2, 7, 100])
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0, 1.0, 1.0])


def test_rates_are_float32_scalars_and_float64_where_enabled():
    for decay in ("polynomial", "cosine", "constant"):
        value = warmup(1, 10, 2, decay=decay)(jnp.int32(3))
        assert value.dtype == jnp.float32 and value.shape == () and not value.weak_type
    with jax.enable_x64(True):
        assert warmup(1.0, 10, 2)(jnp.int32(3)).dtype == jnp.float64


@pytest.mark.parametrize("call, message", [
    (lambda: scale_learning_rate("cubic", 1, 1, 1), "'cubic' is unknown; known: identity, lin"),
    (lambda: scale_learning_rate("sqrt", 1, 0, 1), "base_batch_size must be above 0, not 0"),
    (lambda: legw(1, 1, 1, -1), "batch_size must be above 0, not -1"),
    (lambda: legw(1, -1, 1, 1), "base_warmup_epochs must be at least 0, not -1"),
    (lambda: warmup(1, 0), "total_steps must be above 0, not 0"),
    (lambda: warmup(-1, 1), "peak must be at least 0, not -1"),
    (lambda: warmup(1, 1, -1), "warmup_steps must be at least 0, not -1"),
    (lambda: warmup(1, 1, power=0), "power must be above 0, not 0"),
    (lambda: warmup(1, 1, decay="linear"), "'linear' is unknown; known: polynomial, cosine, c"),
    (lambda: warmup(1, 1, decay="cosine", power=2), "power 2 has no meaning for decay 'cosine'"),
    (lambda: warmup(1, 1, decay="constant", end_value=1), "end_value 1 has no meaning"),
    (lambda: warmup(1, 1, decay_from="end"), "decay_from must be 'warmup' or 'zero', not 'end'"),
    (lambda: warmup(1, float("nan")), "total_steps must be above 0, not nan"),
])
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def _golden(implementation):
    golden = shared("golden")
    index = json.loads((golden / "index.json").read_text())
    entry = next(e for e in index["files"] if e["implementation"] == implementation)
    return entry["hyper"], np.load(golden / entry["file"])


@pytest.mark.parametrize("case", ["imagenet_lamb", "small"])
def test_golden_legw(case):
    hyper, record = _golden("legw_modelled")
    base = hyper[case]
    for k in (1, 2, 4, 8, 16, 32, 64):
        batch, peak, epochs, warmup_steps, total = record[f"{case}/k{k}/scalars"]
        scaled = legw(base["base_lr"], base["base_warmup_epochs"], base["base_batch"], int(batch))
        np.testing.assert_allclose(scaled, (peak, epochs), rtol=1e-12)
        steps = record[f"{case}/k{k}/step"]
        for name, options in {"const": {"decay": "constant"}, "poly2": {"power": 2.0}}.items():
            schedule = warmup(scaled.learning_rate, total, warmup_steps, **options)
            expected = record[f"{case}/k{k}/lr_warm_then_{name}"]
            np.testing.assert_allclose(
                _values(schedule, steps), expected, rtol=5e-6, atol=1e-12, err_msg=f"{k} {name}"
            )


def test_golden_clock_from_zero():
    _, record = _golden("tpu_efficientnet_lr")
    cosine = record["cosine"]
    peak = float(cosine[10]) * 50 / 10
    schedule = warmup(peak, 300, 50, decay="cosine", decay_from="zero")
    np.testing.assert_allclose(_values(schedule, range(301)), cosine, rtol=1e-5, atol=1e-7 * peak)


@pytest.mark.parametrize("name, peak, total, share, power", [
    ("poly05", 6e-3, 100, 0.2843, 0.5), ("poly1", 1e-2, 50, 0.1, 1.0),
])
def test_golden_clock_from_zero_counted_from_one(name, peak, total, share, power):
    _, record = _golden("nvidia_bert_schedulers")
    schedule = warmup(peak, total, share * total, power=power, decay_from="zero")
    np.testing.assert_allclose(
        _values(schedule, np.arange(len(record[name])) + 1), record[name], rtol=1e-5, atol=1e-9
    )


def test_golden_clock_from_the_end_of_warm_up():
    # MLPerf's decay is one update longer than the run, so that the last is not 1e-4 but above.
    hyper, record = _golden("mlperf_resnet_jax_poly")
    for batch, warmup_epochs in {8192: 5, 16384: 5, 32768: 18, 65536: 33}.items():
        per_epoch = int(record[f"b{batch}/steps_per_epoch"])
        steps, rates = record[f"b{batch}/step"], record[f"b{batch}/lr"]
        warmup_steps = warmup_epochs * per_epoch
        peak = float(rates[1] * warmup_steps / steps[1])
        schedule = warmup(
            peak, hyper["epochs"] * per_epoch + 1, warmup_steps, power=2.0, end_value=1e-4
        )
        np.testing.assert_allclose(
            _values(schedule, steps), rates, rtol=1e-5, atol=1e-9, err_msg=str(batch)
        )
