"""The noise scale in the records: the ratio of averages over all updates, even in a resumed run."""

import json
import math

import pytest

from lamb_tpu.watch.noise_scale import NoiseScale
from tests.watch.observing import record

PAIRS = [(2.0, 6.0), (1.0, 12.0), (-1.0, 9.0)]


def updates(
    first: int, pairs: list[tuple[float, float]], weight: float = 1.0, geometry: str = ""
) -> list[tuple[int, dict]]:
    names = (f"noise_scale/{geometry}grad_sq", f"noise_scale/{geometry}trace")
    return [
        (step, {"loss": (1.0, 1.0)} | {name: (x, weight) for name, x in zip(names, pair)})
        for step, pair in enumerate(pairs, first)
    ]


def values(observer: NoiseScale) -> dict[str, float]:
    one = record(3)
    observer.recorded(one)
    return one.values


def test_the_ratio_of_averages() -> None:
    observer = NoiseScale(0.5)
    assert values(observer) == {}
    observer.fetched(updates(1, PAIRS))
    grad_sq = 0.125 * 2.0 + 0.25 * 1.0 - 0.5 * 1.0
    trace = 0.125 * 6.0 + 0.25 * 12.0 + 0.5 * 9.0
    assert grad_sq == 0 and trace > 0
    assert values(observer) == {"noise_scale": math.inf}
    observer.fetched(updates(4, [(4.0, 8.0)]))
    assert values(observer) == {"noise_scale": pytest.approx((trace / 2 + 4) / 2)}


def test_updates_without_a_measurement() -> None:
    observer, other = NoiseScale(0.9), NoiseScale(0.9)
    nothing = updates(9, [(0.0, 0.0)], weight=0.0)
    observer.fetched([*nothing, *updates(1, PAIRS[:2]), *nothing, (10, {"loss": (1.0, 1.0)})])
    other.fetched(updates(1, PAIRS[:2]))
    assert values(observer) == values(other)


def test_resumed_as_if_uninterrupted() -> None:
    whole, before, after = NoiseScale(0.9), NoiseScale(0.9), NoiseScale(0.9)
    whole.fetched(updates(1, PAIRS))
    before.fetched(updates(1, PAIRS[:1]))
    after.restore(json.loads(json.dumps(before.state())))
    after.fetched(updates(2, PAIRS[1:]))
    assert after.state() == whole.state() and values(after) == values(whole)


def test_both_geometries() -> None:
    observer = NoiseScale(0.9)
    observer.fetched(updates(1, [(2.0, 8.0)], geometry="preconditioned_"))
    observer.fetched(updates(2, PAIRS[:1]))
    assert values(observer) == {
        "noise_scale_preconditioned": pytest.approx(4.0),
        "noise_scale": pytest.approx(3.0),
    }
