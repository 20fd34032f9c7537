"""Tests Deep Gradient Compression: sums compared with NumPy, stages, thresholds, and sent bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.parallel.exchange.dgc import DGC
from tests.parallel.exchange import over
from tests.raising import rejected

SHAPES = {"bias": (7,), "kernel": (10, 12), "scale": (), "table": (5, 4, 3)}
EVERY = over.gradients(SHAPES, updates=4, devices=4)


class Reference:
    """The authors' rule in float64, with means over workers and exact top-k."""

    def __init__(self, exchange: DGC, workers: int) -> None:
        self.options, self.workers = exchange, workers
        self.u = {n: np.zeros((workers, *shape)) for n, shape in SHAPES.items()}
        self.v = {n: np.zeros((workers, *shape)) for n, shape in SHAPES.items()}

    def clipped(self, g: np.ndarray) -> np.ndarray:
        largest = self.options.clip_norm or np.inf
        return g * min(1.0, largest / (np.linalg.norm(g) + 1e-6))

    def momentum(self, u: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        m = self.options.momentum
        if self.options.nesterov:
            return m * (u + g), m * (u + g) + g
        return m * u + g, m * u + g

    def __call__(self, grads: dict[str, np.ndarray], ratio: float) -> dict[str, np.ndarray]:
        actual = {}
        for name, own in grads.items():
            own = np.float64(own)
            if own.ndim <= 2 or ratio == 1:
                g = self.clipped(own.mean(0))
                pairs = [self.momentum(u, g) for u in self.u[name]]
                self.u[name] = np.stack([pair[0] for pair in pairs])
                actual[name] = pairs[0][1]
                continue
            sent = np.zeros(own.shape)
            for worker in range(self.workers):
                u, step = self.momentum(self.u[name][worker], self.clipped(own[worker]))
                v = self.v[name][worker] + step
                order = np.argsort(-np.abs(v).ravel(), kind="stable")
                where = np.unravel_index(order[: math.ceil(v.size * ratio)], v.shape)
                sent[worker][where] = v[where]
                v[where] = 0
                if self.options.factor_masking:
                    u[where] = 0
                self.u[name][worker], self.v[name][worker] = u, v
            actual[name] = sent.mean(0)
        return actual


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.1},
        {"ratio": 0.1, "nesterov": True, "clip_norm": 2.0},
        {"ratio": 0.3, "factor_masking": False, "momentum": 0.5},
        {"ratio": 0.02, "momentum": 0.0},
        {"ratio": 0.05, "warmup_steps": 2, "warmup_stages": 2, "clip_norm": 1.0},
        {"ratio": 1.0, "nesterov": True},
    ],
    ids=str,
)
def test_rule(options) -> None:
    """The reference uses the mean over four workers, so a device's share is a quarter of a gradient."""
    exchange = DGC(over.AXES, 4, **options, sample_ratio=1.0)
    sums, residuals = over.run(exchange, [{n: g / 4 for n, g in grads.items()} for grads in EVERY])
    reference = Reference(exchange, workers=4)
    for update, (grads, actual) in enumerate(zip(EVERY, sums, strict=True)):
        expected = reference(grads, exchange.at(update).ratio)
        for name, values in expected.items():
            np.testing.assert_allclose(actual[name], values, atol=2e-6, err_msg=name)
        device = residuals[update].device
        for place, name in enumerate(("kernel", "table")):
            for kept, wanted in (("momentum", reference.u), ("accumulated", reference.v)):
                np.testing.assert_allclose(
                    4 * device[kept][place], wanted[name].reshape(4, -1), atol=1e-5
                )


def test_dense_stage_before_a_sparse_one() -> None:
    """With ratio 1, each device stores an equal share of the summed gradient's momentum."""
    reference = Reference(DGC(over.AXES, 4), workers=4)
    residual = None
    for grads, ratio in zip(EVERY, (1.0, 1.0, 0.1, 0.1), strict=True):
        exchange = DGC(over.AXES, 4, ratio=ratio, sample_ratio=1.0)
        (actual,), (residual,) = over.run(
            exchange, [{n: g / 4 for n, g in grads.items()}], residual
        )
        for name, values in reference(grads, ratio).items():
            np.testing.assert_allclose(actual[name], values, atol=2e-6, err_msg=name)


@pytest.mark.long
def test_everything_is_sent_in_the_end() -> None:
    """Without momentum, updates without new gradients send all remaining values."""
    exchange = DGC(over.AXES, 4, ratio=0.1, momentum=0.0)
    sums, residuals = over.run(exchange, EVERY)
    # Continue on two devices with equal shares, without new gradients.
    nothing = [{n: np.zeros((2, *s), np.float32) for n, s in SHAPES.items()}] * 30
    later, after = over.run(
        dataclasses.replace(exchange, num_devices=2), nothing, over.reshared(residuals[-1], 2)
    )
    for name in SHAPES:
        expected = sum(np.float64(grads[name]).sum(0) for grads in EVERY)
        actual = sum(np.float64(s[name]) for s in [*sums, *later])
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)
    assert all(not np.any(leaf) for leaf in after[-1].device["accumulated"])
    assert all(np.any(leaf) for leaf in residuals[-1].device["accumulated"])


def test_warmup_stages() -> None:
    exchange = DGC(over.AXES, 8, ratio=0.001, warmup_steps=10)
    ratios = [exchange.at(update).ratio for update in range(12)]
    expected = [0.001 ** (k / 6) for k in range(1, 6)]
    np.testing.assert_allclose(ratios, np.repeat([*expected, 0.001], 2))
    assert len({exchange.at(update) for update in range(100)}) == 6
    assert exchange.at(10) == exchange.at(99) == DGC(over.AXES, 8, ratio=0.001)
    stage = exchange.at(3)
    assert stage.at(77) == stage
    params = {n: jnp.zeros(s) for n, s in SHAPES.items()}
    shapes = {str(jax.eval_shape(exchange.at(update).init, params)) for update in (0, 5, 10)}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    "coeff, expected",
    [
        (0.3, [0.3, 0.09, 0.027, 0.02]),  # powers of a number, at least the ratio
        ([0.25, 0.01, 0.063], [0.25, 0.01, 0.063, 0.02]),  # in any order, even below `ratio`
        (None, [0.02 ** (k / 4) for k in range(1, 5)]),
    ],
)
def test_warmup_coefficients(coeff, expected) -> None:
    exchange = DGC(over.AXES, 8, ratio=0.02, warmup_steps=6, warmup_stages=3, warmup_coeff=coeff)
    ratios = [exchange.at(update).ratio for update in range(8)]
    np.testing.assert_allclose(ratios, np.repeat(expected, 2), rtol=1e-12)
    assert hash(exchange)


@pytest.mark.parametrize(
    "size, ratio, sample_ratio, expected",
    [
        (256, 0.1, 0.05, (256, 26, 9, 3)),  # as in the recorded run
        (128, 0.1, 0.05, (128, 13, 1, 13)),
        (1_000_000, 0.001, 0.01, (1_000_000, 1000, 97, 11)),
        (1_000_000, 0.001, 1.0, (1_000_000, 1000, 1, 1000)),
        (1500, 0.001, 0.01, (1500, 2, 1, 2)),  # too few to sample
    ],
)
def test_sampling(size, ratio, sample_ratio, expected) -> None:
    assert DGC(over.AXES, 8, ratio, sample_ratio=sample_ratio).sampling(size) == expected


@pytest.mark.parametrize("resample", [True, False])
@pytest.mark.parametrize("kind", ["normal", "equal", "zero", "few", "heavy"])
def test_selected_from_samples(resample: bool, kind: str) -> None:
    rng = np.random.default_rng(0)
    size = 20_000
    values = {
        "normal": lambda: np.abs(rng.normal(size=size)),
        "equal": lambda: np.ones(size),
        "zero": lambda: np.zeros(size),
        "heavy": lambda: rng.pareto(0.5, size),
        # The samples contain hardly any of the few large values.
        "few": lambda: np.where(np.arange(size) % 997 == 5, 1.0 + np.arange(size), 1e-3),
    }[kind]().astype(np.float32)
    exchange = DGC(over.AXES, 8, ratio=0.01, resample=resample)
    sampling = exchange.sampling(size)
    assert sampling.stride > 1 and sampling.budget == 200
    select = jax.jit(lambda x, start: exchange.cut(x, sampling, start).mask(x))
    numbers = []
    for start in range(0, sampling.stride, 7):
        mask = np.asarray(select(values, start))
        numbers.append(mask.sum())
        if kind == "equal" and resample:
            np.testing.assert_array_equal(np.flatnonzero(mask), np.arange(200))
    assert max(numbers) <= 200
    if kind in ("normal", "heavy"):
        assert min(numbers) >= 160  # the lower bound, 0.8 times the budget
    if kind == "equal" and not resample:  # a threshold is above all values or above none
        assert set(numbers) <= {0, 200}


def test_too_many_above_the_threshold_are_replaced_by_the_largest() -> None:
    """A few large values among equal values are sent, although the samples miss them.

    With a threshold from all values, the first values are sent instead.
    """
    values = np.ones(20_000, np.float32)
    values[[19_999, 17_003, 5]] = [3, 2, 4]
    exchange = DGC(over.AXES, 8, ratio=0.01)
    sampling = exchange.sampling(values.size)
    mask = np.asarray(jax.jit(lambda x: exchange.cut(x, sampling, jnp.int32(1)).mask(x))(values))
    assert mask.sum() == 200 and mask[[19_999, 17_003, 5]].all() and mask[:198].all()
    first = dataclasses.replace(exchange, sample_ratio=1.0)
    given = jnp.asarray(values)
    mask = np.asarray(first.cut(given, first.sampling(20_000), jnp.int32(0)).mask(given))
    assert np.flatnonzero(mask).tolist() == list(range(200))  # as in the authors' code


def test_nan_reaches_every_device() -> None:
    every = over.gradients({"x": (100, 300)}, 1)
    every[0]["x"][3, 50, 7] = np.nan
    for sample_ratio in (0.01, 1.0):
        exchange = DGC(over.AXES, 8, ratio=0.01, sample_ratio=sample_ratio)
        assert np.isnan(over.run(exchange, every[:1])[0][0]["x"][50, 7])


def test_starts_of_samples_change() -> None:
    exchange = DGC(over.AXES, 8)
    sampling = exchange.sampling(1_000_000)
    starts = [
        int(exchange.sample_start(leaf, sampling, count)) for leaf in (0, 1) for count in range(20)
    ]
    assert len(set(starts)) > 20 and 0 <= min(starts) and max(starts) < sampling.stride
    assert exchange.sample_start(0, exchange.sampling(100), 3) == 0


def test_bytes_at_a_thousandth() -> None:
    """Devices send values and indices in at most 5 % more bytes than needed, and vectors in float32."""
    params = {
        "kernel": jax.ShapeDtypeStruct((1000, 900), jnp.float32),
        "other": jax.ShapeDtypeStruct((3, 3, 64, 200), jnp.float32),
        "bias": jax.ShapeDtypeStruct((900,), jnp.float32),
    }
    actual = over.sent(DGC(over.AXES, 8), params)
    assert actual.keys() == {"u32", "f32"}
    least = 7 * 0.001 * (900_000 + 115_200) * 8
    assert least <= actual["u32"] <= 1.05 * least
    assert actual["f32"] == 4 * 900 * 2 * 7 // 8


@pytest.mark.parametrize(
    "key, given, value",
    [
        ("ratio", 0.0, 0.0),
        ("ratio", 2.0, 2.0),
        ("sample_ratio", 0.0, 0.0),
        ("momentum", 1.0, 1.0),
        ("clip_norm", 0.0, 0.0),
        ("warmup_steps", -1, -1),
        ("warmup_stages", 0, 0),
        ("warmup_coeff", 2.0, 2.0),
        ("warmup_coeff", (0.5, 0.0, 0.1, 0.1, 0.1), 0.0),
    ],
)
def test_options_out_of_range(key, given, value) -> None:
    with rejected(key, value, "is out of range", kind=ArgumentError):
        EXCHANGES["dgc"](over.AXES, 8, **{key: given})


def test_rejects_too_few_ratios() -> None:
    problem = "has fewer ratios than warmup_stages=5"
    with rejected("warmup_coeff", (0.5, 0.1), problem, kind=ArgumentError):
        EXCHANGES["dgc"](over.AXES, 8, warmup_coeff=(0.5, 0.1))
