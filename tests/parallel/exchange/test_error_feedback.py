"""EF14, EF21 and EControl: what their sums keep, on any number of devices, and the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.parallel.exchange.compressors import Identity
from lamb_tpu.parallel.exchange.error_feedback import EF14, EF21, EControl
from tests.parallel.exchange import over

SHAPES = {"a": (6, 5), "b": (11,)}
EVERY = over.gradients(SHAPES, updates=4)


def flat(tree) -> np.ndarray:
    """The leaves as one vector, behind a leading axis if they have one."""
    return np.concatenate([np.float64(tree[name]).reshape(-1) for name in SHAPES])


def summed(vectors) -> np.ndarray:
    """Vectors of all devices, added up."""
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
    for grads, found, residual in zip(EVERY, sums, residuals, strict=True):
        given = given + flat({name: leaf.sum(0) for name, leaf in grads.items()})
        sent = sent + flat(found)
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
    for found, residual in zip(sums, residuals, strict=True):
        every = (
            residual.device.get("estimate")
            if residual.device
            else [table[0] for table in residual.whole["estimates"]]
        )
        np.testing.assert_allclose(flat(found), summed(every), atol=1e-4)
    distances = [np.linalg.norm(flat(found) - wanted) for found in sums]
    assert distances[-1] < (0.05 if exchange.compressor == "topk" else 0.3) * distances[0]


def test_econtrol_without_eta_is_ef21() -> None:
    options = {"ratio": 0.1}
    expected, _ = over.run(EF21(over.AXES, 8, **options), EVERY)
    found, _ = over.run(EControl(over.AXES, 8, **options, eta=0.0), EVERY)
    other, _ = over.run(EControl(over.AXES, 8, **options, eta=0.5), EVERY)
    for a, b, c in zip(found[1:], expected[1:], other[1:], strict=True):
        np.testing.assert_array_equal(flat(a), flat(b))
        assert not np.allclose(flat(a), flat(c))


def test_plus_takes_the_nearer_of_two_on_each_device() -> None:
    """By hand, one of three values: device 0 moves its estimate on, device 1 starts anew."""
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
    for grads, found in zip(EVERY, sums, strict=True):
        total = flat({name: leaf.sum(0) for name, leaf in grads.items()})
        average = total if average is None else 0.75 * average + 0.25 * total
        np.testing.assert_allclose(flat(found), average, atol=1e-4)


@pytest.mark.parametrize(
    "made",
    [
        lambda n: EF14(over.AXES, n, ratio=0.1),
        lambda n: EControl(over.AXES, n, ratio=0.1),
        lambda n: EF21(over.AXES, n, ratio=0.1, momentum=0.5),
    ],
)
def test_goes_on_with_equal_shares_on_other_devices(made) -> None:
    """The sums are kept: what EF14 has not sent is sent later, and estimates still add up."""
    _, residuals = over.run(made(8), EVERY)
    moved = over.reshared(residuals[-1], 4)
    later = over.gradients(SHAPES, 3, devices=4, seed=1)
    sums, after = over.run(made(4), later, moved)
    if isinstance(made(4), EF14):
        given = sum(flat({n: leaf.sum(0) for n, leaf in grads.items()}) for grads in later)
        waiting, left = (summed(r.device["error"]) for r in (residuals[-1], after[-1]))
        np.testing.assert_allclose(sum(map(flat, sums)), given + waiting - left, atol=1e-4)
    else:
        for found, residual in zip(sums, after, strict=True):
            np.testing.assert_allclose(flat(found), summed(residual.device["estimate"]), atol=1e-4)


PARAMS = {
    "a": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
    "b": jax.ShapeDtypeStruct((1000,), jnp.float32),
}


@pytest.mark.parametrize(
    "exchange, values",
    [
        (EF14(over.AXES, 8, ratio=0.001), {"u32": 8 * 1001}),
        (EF21(over.AXES, 8, ratio=0.001, momentum=0.9), {"u32": 8 * 1001}),
        (EControl(over.AXES, 8, ratio=0.001), {"u32": 8 * 1001}),
        (EControl(over.AXES, 8, compressor="sign"), {"u8": 1001000 // 8, "f32": 4}),
        (EF14(over.AXES, 8, compressor="sign", layerwise=True), {"u8": 1001000 // 8, "f32": 8}),
        # One more: which of the two a device sends.
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
    "made, options, message",
    [
        (EF14, {"ratio": 1.5}, r"ratio must be in \(0, 1\], the fraction of values, not 1.5"),
        (EF14, {"compressor": "zip"}, "compressor must be one of topk, sign, identity, not 'zip'"),
        (EF21, {"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        (EF21, {"momentum": 0.5, "plus": True}, "momentum must be 0 with plus=True, not 0.5"),
        (EControl, {"eta": -1.0}, "eta must not be negative, not -1.0"),
    ],
)
def test_options_out_of_range(made, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        made(over.AXES, 8, **options)


def test_names() -> None:
    assert [EXCHANGES[name] for name in ("ef14", "ef21", "econtrol")] == [EF14, EF21, EControl]
