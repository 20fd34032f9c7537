"""Tests the rule by which the batch size follows the noise scale."""

import math

import pytest

from lamb_tpu.batching import noise_scale as statistic
from lamb_tpu.batching.rules import NoiseScale


def test_it_follows_up_and_down_by_its_factor() -> None:
    rule = NoiseScale(granularity=32, upper=4096, factor=0.5)
    assert [rule.next_batch(512, {"noise_scale": s}, 0) for s in (100.0, 2000.0)] == [64, 1024]


def test_from_the_averages_themselves() -> None:
    rule, state = NoiseScale(granularity=32, upper=4096), statistic.init()

    def following(state: statistic.NoiseScaleState) -> int:
        return rule.next_batch(64, {"noise_scale": statistic.noise_scale(state)}, 0)

    assert following(state) == 64  # no estimate yet
    state = statistic.update(state, statistic.Estimate(1.0, 500.0), 0.9)
    assert following(state) == 512
    state = statistic.update(state, statistic.Estimate(-100.0, 500.0), 0.9)
    assert following(state) == 4096 and math.isinf(statistic.noise_scale(state))


def test_errors() -> None:
    with pytest.raises(ValueError, match="factor=0 must be above 0"):
        NoiseScale(granularity=32, upper=64, factor=0)
    with pytest.raises(ValueError, match="decay=1.0 must be at least 0 and below 1"):
        NoiseScale(granularity=32, upper=64, decay=1.0)
