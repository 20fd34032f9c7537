"""Tests EF14, EF21 and EControl: invariants of sums, changed numbers of devices, and sent bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.parallel.exchange.compressors import Identity
from lamb_tpu.parallel.exchange.error_feedback import EF14, EF21, EControl, TopK
from tests.parallel.exchange import over
from tests.raising import rejected

SHAPES = {"a": (6, 5), "b": (11,)}
EVERY = over.gradients(SHAPES, updates=4)


def flat(tree) -> np.ndarray:
    """Returns the leaves as one flat vector."""
    return np.concatenate([np.float64(tree[name]).reshape(-1) for name in SHAPES])


def summed(vectors) -> np.ndarray:
    """Sums each of `vectors`, (devices, n), over devices, and concatenates the sums."""
    return np.concatenate([np.float64(x).sum(0) for x in vectors])


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.1},
        {"ratio": 0.1, "layerwise": True},
        {"compressor": "sign"},
        {"compressor": "sign", "layerwise": True},
        {"ratio": 0.1, "whole_start": True},
    ],
    ids=str,
)
def test_ef14_sends_the_sum_of_all_gradients_in_the_end(options) -> None:
    sums, residuals = over.run(EF14(over.AXES, 8, **options), EVERY)
    given = sent = 0
    for grads, actual, residual in zip(EVERY, sums, residuals, strict=True):
        given = given + flat({name: leaf.sum(0) for name, leaf in grads.items()})
        sent = sent + flat(actual)
        np.testing.assert_allclose(sent + summed(residual.device["error"]), given, atol=1e-4)
    first = flat({name: leaf.sum(0) for name, leaf in EVERY[0].items()})
    is_whole = np.allclose(flat(sums[0]), first, atol=1e-5)
    assert is_whole == options.get("whole_start", False)


@pytest.mark.parametrize(
    "exchange",
    [
        EF21(over.AXES, 8, ratio=0.2),
        EF21(over.AXES, 8, compressor="sign"),
        EF21(over.AXES, 8, ratio=0.2, layerwise=True),
        EF21(over.AXES, 8, ratio=0.2, plus=True),
        EF21(over.AXES, 8, ratio=0.2, momentum=0.5),
        EControl(over.AXES, 8, ratio=0.2, eta=0.1),
        EControl(over.AXES, 8, compressor="sign", eta=0.1),
    ],
    ids=str,
)
def test_the_estimate_is_the_sum_of_the_devices_and_nears_a_constant_gradient(exchange) -> None:
    sums, residuals = over.run(exchange, EVERY[:1] * 25)
    wanted = flat({name: leaf.sum(0) for name, leaf in EVERY[0].items()})
    for actual, residual in zip(sums, residuals, strict=True):
        every = (
            residual.device.get("estimate")
            if residual.device
            else [table[0] for table in residual.whole["estimates"]]
        )
        np.testing.assert_allclose(flat(actual), summed(every), atol=1e-4)
    distances = [np.linalg.norm(flat(actual) - wanted) for actual in sums]
    assert distances[-1] < (0.05 if exchange.compressor == "topk" else 0.3) * distances[0]


def test_econtrol_without_eta_is_ef21() -> None:
    options = {"ratio": 0.1}
    expected, _ = over.run(EF21(over.AXES, 8, **options), EVERY)
    actual, _ = over.run(EControl(over.AXES, 8, **options, eta=0.0), EVERY)
    other, _ = over.run(EControl(over.AXES, 8, **options, eta=0.5), EVERY)
    for a, b, c in zip(actual[1:], expected[1:], other[1:], strict=True):
        np.testing.assert_array_equal(flat(a), flat(b))
        assert not np.allclose(flat(a), flat(c))


def test_plus_takes_the_nearer_of_two_on_each_device() -> None:
    """Tests two updates by hand, in which each device sends one of three values.

    In the second update, device 0 adds the compressed difference to its estimate, and device 1
    replaces its estimate by the compressed gradient.
    """
    every = [
        {"x": np.array([[9.0, 0, 0], [9, 0, 0]], np.float32)},
        {"x": np.array([[9.0, 2, 0], [0, 5, 0]], np.float32)},
    ]
    sums, (_, residual) = over.run(EF21(over.AXES, 2, ratio=0.34, plus=True), every)
    assert sums[0]["x"].tolist() == [18, 0, 0]
    assert residual.whole["estimates"][0][0].tolist() == [[9, 2, 0], [0, 5, 0]]
    assert sums[1]["x"].tolist() == [9, 7, 0]


def test_momentum_is_an_average_that_begins_with_the_first_gradient() -> None:
    exchange = EF21(over.AXES, 8, compressor="identity", momentum=0.75)
    sums, _ = over.run(exchange, EVERY)
    average = None
    for grads, actual in zip(EVERY, sums, strict=True):
        total = flat({name: leaf.sum(0) for name, leaf in grads.items()})
        average = total if average is None else 0.75 * average + 0.25 * total
        np.testing.assert_allclose(flat(actual), average, atol=1e-4)


@pytest.mark.parametrize(
    "made",
    [
        lambda n: EF14(over.AXES, n, ratio=0.1),
        lambda n: EControl(over.AXES, n, ratio=0.1),
        lambda n: EF21(over.AXES, n, ratio=0.1, momentum=0.5),
    ],
)
def test_goes_on_with_equal_shares_on_other_devices(made) -> None:
    """After a change from 8 to 4 devices, EF14 sends the values unsent so far, and estimates add up."""
    _, residuals = over.run(made(8), EVERY)
    moved = over.reshared(residuals[-1], 4)
    later = over.gradients(SHAPES, 3, devices=4, seed=1)
    sums, after = over.run(made(4), later, moved)
    if isinstance(made(4), EF14):
        given = sum(flat({n: leaf.sum(0) for n, leaf in grads.items()}) for grads in later)
        waiting, left = (summed(r.device["error"]) for r in (residuals[-1], after[-1]))
        np.testing.assert_allclose(sum(map(flat, sums)), given + waiting - left, atol=1e-4)
    else:
        for actual, residual in zip(sums, after, strict=True):
            np.testing.assert_allclose(flat(actual), summed(residual.device["estimate"]), atol=1e-4)


PARAMS = {
    "a": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
    "b": jax.ShapeDtypeStruct((1000,), jnp.float32),
}


@pytest.mark.parametrize(
    "exchange, values",
    [
        (EF14(over.AXES, 8, ratio=0.001), {"u32": 8 * 1001}),
        (TopK(over.AXES, 8, ratio=0.001, layerwise=True), {"u32": 8 * 1001}),
        (EF21(over.AXES, 8, ratio=0.001, momentum=0.9), {"u32": 8 * 1001}),
        (EControl(over.AXES, 8, ratio=0.001), {"u32": 8 * 1001}),
        (EControl(over.AXES, 8, compressor="sign"), {"u8": 1001000 // 8, "f32": 4}),
        (EF14(over.AXES, 8, compressor="sign", layerwise=True), {"u8": 1001000 // 8, "f32": 8}),
        # EF21+ also sends a flag: which of the two messages a device sends.
        (EF21(over.AXES, 8, ratio=0.001, plus=True), {"u32": 8 * 1001, "pred": 1}),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_message(exchange, values) -> None:
    assert over.sent(exchange, PARAMS) == {dtype: 7 * size for dtype, size in values.items()}


def test_stages() -> None:
    exchange = EF21(over.AXES, 8, whole_start=True)
    assert exchange.at(0).compressor == Identity()
    assert exchange.at(1) == exchange.at(100) == exchange
    assert EF21(over.AXES, 8).at(0) == EF21(over.AXES, 8)


def test_bfloat16_gradients_are_kept_in_float32() -> None:
    grads = [{"x": jnp.ones((8, 6), jnp.bfloat16)}]
    sums, (residual,) = over.run(
        EF14(over.AXES, 8, ratio=0.5),
        grads,
        over.start(EF14(over.AXES, 8), {"x": jnp.zeros(6, jnp.bfloat16)}),
    )
    assert sums[0]["x"].dtype == jnp.bfloat16
    assert residual.device["error"][0].dtype == jnp.float32


@pytest.mark.parametrize(
    "made, options, problem",
    [
        (EF14, {"ratio": 1.5}, "is out of range"),
        (TopK, {"ratio": 0}, "is out of range"),
        (EF14, {"compressor": "zip"}, "is unknown"),
        (EF21, {"momentum": 1.0}, "is out of range"),
        (EF21, {"momentum": 0.5, "plus": True}, "is invalid with plus=True"),
        (EControl, {"eta": -1.0}, "is out of range"),
    ],
)
def test_options_out_of_range(made, options, problem) -> None:
    key, value = next(iter(options.items()))
    with rejected(key, value, problem, kind=ArgumentError):
        made(over.AXES, 8, **options)


def test_names() -> None:
    classes = {"topk": TopK, "ef14": EF14, "ef21": EF21, "econtrol": EControl}
    assert {name: EXCHANGES[name] for name in classes} == classes


def test_three_updates_of_topk_by_hand() -> None:
    """Each of two devices sends one of four values."""
    exchange = TopK(over.AXES, 2, ratio=0.25)
    every = [
        {"x": np.array([[4, 3, 0, 0], [0, -1, -2, 0]], np.float32)},
        {"x": np.array([[0, 0, 2, 0], [0, -1, 0, 0]], np.float32)},
        {"x": np.zeros((2, 4), np.float32)},
    ]
    sums, residuals = over.run(exchange, every)
    assert [actual["x"].tolist() for actual in sums] == [
        [4, 0, -2, 0],
        [0, 3 - 2, 0, 0],
        [0, 0, 2, 0],
    ]
    errors = [residual.device["error"][0].tolist() for residual in residuals]
    assert errors == [[[0, 3, 0, 0], [0, -1, 0, 0]], [[0, 0, 2, 0], [0, 0, 0, 0]], [[0] * 4] * 2]


def test_topk_sends_a_fraction_of_each_leaf_or_of_all() -> None:
    shapes = {"a": (10, 10), "b": (20,)}
    large_a = over.gradients(shapes, 1)
    large_a[0]["a"] *= 100
    for layerwise, number in ((False, (12, 0)), (True, (10, 2))):
        _, (residual,) = over.run(TopK(over.AXES, 8, ratio=0.1, layerwise=layerwise), large_a)
        error = np.concatenate(residual.device["error"], axis=-1)
        assert (error[:, :100] == 0).sum(-1).tolist() == [number[0]] * 8
        assert (error[:, 100:] == 0).sum(-1).tolist() == [number[1]] * 8
