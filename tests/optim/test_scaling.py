"""Tests the scaling of a tuned rate, warm-up and weight decay with the batch size."""

import math

import pytest

from lamb_tpu.optim import factory
from lamb_tpu.optim.scaling import (
    RANDOM_MATRIX_RULES,
    ScaledWarmup,
    adamw_timescale,
    adamw_weight_decay,
    legw,
    optimal_timescale,
    random_matrix_rule,
    scale_learning_rate,
)


@pytest.mark.parametrize("rule, expected", [("identity", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
def test_scaling_rules(rule, expected):
    assert scale_learning_rate(rule, 0.1, 256, 4096) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "batch_size, rate, epochs",
    [
        (512, 4 / (2**3 * 100), 0.3125),
        (1024, 4 / (2**2.5 * 100), 0.625),
        (8192, 0.02, 5.0),
        (32768, 0.04, 20.0),
    ],
)
def test_legw_gives_the_row_of_resnet_50(batch_size, rate, epochs):
    scaled = legw(4 / (2**3 * 100), 0.3125, 512, batch_size)
    assert isinstance(scaled, ScaledWarmup)
    assert scaled.learning_rate == pytest.approx(rate, rel=1e-15)
    assert scaled.warmup_epochs == epochs


@pytest.mark.parametrize(
    "optimizers, at_sixteen_times",
    [(("sgd", "momentum", "nesterov"), 16.0), (("adam", "adamw", "adagrad", "lamb"), 4.0)],
)
def test_random_matrix_rule(optimizers, at_sixteen_times):
    for optimizer in optimizers:
        rule = random_matrix_rule(optimizer)
        assert scale_learning_rate(rule, 1.0, 32, 512) == at_sixteen_times


def test_every_optimizer_is_either_in_the_random_matrix_rule_or_known_not_to_be():
    outside = {
        "lars",
        "novograd",
        "adagrad_norm",
        "apollo",
        "lion",
        "adafactor",
        "muon",
        "onebit_adam",
        "onebit_lamb",
        "zero_one_adam",
    }
    assert set(RANDOM_MATRIX_RULES) | outside == set(factory.OPTIMIZERS)
    assert not set(RANDOM_MATRIX_RULES) & outside


def test_timescale_is_the_memory_of_the_average():
    # Weights that start at 1 and get no gradient become (1 - eta lambda) ** steps, which is 1 / e after
    # the fraction tau of the run.
    rate, decay, batch_size, data_size = 0.01, 0.1, 64, 64 * 5000
    tau = adamw_timescale(rate, decay, batch_size, data_size)
    assert tau == pytest.approx(0.2)
    steps = tau * data_size / batch_size
    assert (1 - rate * decay) ** steps == pytest.approx(math.exp(-1), rel=1e-3)


@pytest.mark.parametrize(
    "batch_size, rate, data_size, decay",
    [
        (4096, 0.001, 1e9, 0.4),  # linear in the batch
        (4096, 0.002, 1e9, 0.2),  # square-root scaling of rate and decay
        (4096, 0.004, 1e9, 0.1),  # with linear scaling of the rate the decay does not change
        (1024, 0.001, 4e9, 0.025),  # a run of four times the data
    ],
)
def test_weight_decay_that_keeps_a_timescale(batch_size, rate, data_size, decay):
    tau = adamw_timescale(0.001, 0.1, 1024, 1e9)
    assert adamw_weight_decay(tau, rate, batch_size, data_size) == pytest.approx(decay)


def test_optimal_timescale_is_a_power_law():
    assert optimal_timescale(1.0, 1.08, -0.527) == 1.08
    ratio = optimal_timescale(200.0, 2.0, -0.5) / optimal_timescale(20.0, 2.0, -0.5)
    assert ratio == pytest.approx(10**-0.5)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: scale_learning_rate("cubic", 1, 1, 1), "'cubic' is unknown; use one of identity"),
        (lambda: scale_learning_rate("sqrt", 1, 0, 1), "base_batch_size=0 must be above 0"),
        (lambda: random_matrix_rule("lars"), "'lars' has no random-matrix rule, unlike sgd, "),
        (lambda: adamw_timescale(0, 1, 1, 1), "learning_rate=0 must be above 0"),
        (lambda: adamw_timescale(1, 0.0, 1, 1), "weight_decay=0.0 must be above 0"),
        (lambda: adamw_weight_decay(0, 1, 1, 1), "timescale=0 must be above 0"),
        (lambda: optimal_timescale(0, 1, 1), "tokens_per_parameter=0 must be above 0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
