"""Deep Gradient Compression: the rule in NumPy, stages, thresholds, and the bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.parallel.exchange.dgc import DGC
from tests.parallel.exchange import over
from tests.quick import jit

SHAPES = {"bias": (7,), "kernel": (10, 12), "scale": (), "table": (5, 4, 3)}
EVERY = over.gradients(SHAPES, updates=4, devices=4)


class Reference:
    """The authors' rule with means over workers, exact top-k, in float64."""

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
        found = {}
        for name, own in grads.items():
            own = np.float64(own)
            if own.ndim <= 2 or ratio == 1:
                g = self.clipped(own.mean(0))
                pairs = [self.momentum(u, g) for u in self.u[name]]
                self.u[name] = np.stack([pair[0] for pair in pairs])
                found[name] = pairs[0][1]
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
            found[name] = sent.mean(0)
        return found


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
    """Gradients are shares of a mean: a quarter of each of four workers'."""
    exchange = DGC(over.AXES, 4, **options, sample_ratio=1.0)
    sums, residuals = over.run(exchange, [{n: g / 4 for n, g in grads.items()} for grads in EVERY])
    reference = Reference(exchange, workers=4)
    for update, (grads, found) in enumerate(zip(EVERY, sums, strict=True)):
        expected = reference(grads, exchange.at(update).ratio)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=2e-6, err_msg=name)
        device = residuals[update].device
        for place, name in enumerate(("kernel", "table")):
            for kept, wanted in (("momentum", reference.u), ("accumulated", reference.v)):
                np.testing.assert_allclose(
                    4 * device[kept][place], wanted[name].reshape(4, -1), atol=1e-5
                )


def test_dense_stage_before_a_sparse_one() -> None:
    """Ratio 1 is momentum of the summed gradient; each device then goes on with its share."""
    reference = Reference(DGC(over.AXES, 4), workers=4)
    residual = None
    for grads, ratio in zip(EVERY, (1.0, 1.0, 0.1, 0.1), strict=True):
        exchange = DGC(over.AXES, 4, ratio=ratio, sample_ratio=1.0)
        (found,), (residual,) = over.run(exchange, [{n: g / 4 for n, g in grads.items()}], residual)
        for name, values in reference(grads, ratio).items():
            np.testing.assert_allclose(found[name], values, atol=2e-6, err_msg=name)


@pytest.mark.long
def test_everything_is_sent_in_the_end() -> None:
    """Without momentum, the sums sent and those accumulated are those of the gradients."""
    exchange = DGC(over.AXES, 4, ratio=0.1, momentum=0.0)
    sums, residuals = over.run(exchange, EVERY)
    # On two devices in equal shares, without new gradients.
    nothing = [{n: np.zeros((2, *s), np.float32) for n, s in SHAPES.items()}] * 30
    later, after = over.run(
        dataclasses.replace(exchange, num_devices=2), nothing, over.reshared(residuals[-1], 2)
    )
    for name in SHAPES:
        expected = sum(np.float64(grads[name]).sum(0) for grads in EVERY)
        found = sum(np.float64(s[name]) for s in [*sums, *later])
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)
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
        (0.3, [0.3, 0.09, 0.027, 0.02]),  # the powers of a number, not below the ratio
        ([0.25, 0.01, 0.063], [0.25, 0.01, 0.063, 0.02]),  # in any order, also below the ratio
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
        # Hardly any is in the samples.
        "few": lambda: np.where(np.arange(size) % 997 == 5, 1.0 + np.arange(size), 1e-3),
    }[kind]().astype(np.float32)
    exchange = DGC(over.AXES, 8, ratio=0.01, resample=resample)
    sampling = exchange.sampling(size)
    assert sampling.stride > 1 and sampling.budget == 200
    select = jit(lambda x, start: exchange.cut(x, sampling, start).mask(x))
    numbers = []
    for start in range(0, sampling.stride, 7):
        mask = np.asarray(select(values, start))
        numbers.append(mask.sum())
        if kind == "equal" and resample:
            np.testing.assert_array_equal(np.flatnonzero(mask), np.arange(200))
    assert max(numbers) <= 200
    if kind in ("normal", "heavy"):
        assert min(numbers) >= 160  # the lower bound, 0.8 times the budget
    if kind == "equal" and not resample:  # no threshold selects a part: all, or none, which wait
        assert set(numbers) <= {0, 200}


def test_too_many_above_the_threshold_are_replaced_by_the_largest() -> None:
    """A few large values that the samples miss, among equal ones: sent wherever they are."""
    values = np.ones(20_000, np.float32)
    values[[19_999, 17_003, 5]] = [3, 2, 4]
    exchange = DGC(over.AXES, 8, ratio=0.01)
    sampling = exchange.sampling(values.size)
    mask = np.asarray(jit(lambda x: exchange.cut(x, sampling, jnp.int32(1)).mask(x))(values))
    assert mask.sum() == 200 and mask[[19_999, 17_003, 5]].all() and mask[:198].all()
    first = dataclasses.replace(exchange, sample_ratio=1.0)
    given = jnp.asarray(values)
    mask = np.asarray(first.cut(given, first.sampling(20_000), jnp.int32(0)).mask(given))
    assert np.flatnonzero(mask).tolist() == list(range(200))  # as the authors do


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
    """Within 5 % of the values and indices; vectors in float32; nothing else."""
    params = {
        "kernel": jax.ShapeDtypeStruct((1000, 900), jnp.float32),
        "other": jax.ShapeDtypeStruct((3, 3, 64, 200), jnp.float32),
        "bias": jax.ShapeDtypeStruct((900,), jnp.float32),
    }
    found = over.sent(DGC(over.AXES, 8), params)
    assert found.keys() == {"u32", "f32"}
    least = 7 * 0.001 * (900_000 + 115_200) * 8
    assert least <= found["u32"] <= 1.05 * least
    assert found["f32"] == 4 * 900 * 2 * 7 // 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ratio": 0.0}, r"ratio must be in \(0, 1\], the fraction of values, not 0.0"),
        ({"ratio": 2.0}, "ratio must be"),
        ({"sample_ratio": 0.0}, "sample_ratio must be"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, not 0.0"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative, not -1"),
        ({"warmup_stages": 0}, "warmup_stages must be at least 1, not 0"),
        ({"warmup_coeff": 2.0}, r"warmup_coeff must be in \(0, 1\]"),
        ({"warmup_coeff": (0.5, 0.0, 0.1, 0.1, 0.1)}, "each ratio of warmup_coeff must be in"),
        ({"warmup_coeff": (0.5, 0.1)}, "warmup_coeff has 2 ratios, and warmup_stages is 5"),
    ],
)
def test_options_out_of_range(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        EXCHANGES["dgc"](over.AXES, 8, **options)
