"""Tests matrices of a gradient, random factors, and orthonormal columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.parallel.exchange import lowrank


@pytest.mark.parametrize(
    "shape, stacked, expected",
    [
        ((20, 30), False, (1, 20, 30)),
        ((3, 3, 16, 32), False, (1, 144, 32)),  # a convolution
        ((64, 4, 16), False, (1, 64, 64)),  # heads of attention
        ((4, 16, 64), False, (1, 64, 64)),
        ((5, 20, 30), True, (5, 20, 30)),
        ((30,), False, None),
        ((5, 30), True, None),
    ],
)
def test_matrices(shape, stacked, expected) -> None:
    actual = lowrank.find(
        {"a": jnp.zeros(3), "b": jnp.zeros(shape)}, ("b",) if stacked else (), lambda n, m: True
    )
    assert [m[-3:] for m in actual] == ([] if expected is None else [expected])
    assert all(m.number == 1 and m.path == "b" for m in actual)


def test_stacks_of_matrices_are_found_by_nnx_paths() -> None:
    (actual,) = lowrank.find(
        {"b": {"value": jnp.zeros((5, 20, 30))}}, ("^b$",), lambda rows, columns: True
    )
    assert (actual.path, *actual[-3:]) == ("b/value", 5, 20, 30)


def test_only_matrices_that_are_worth_it() -> None:
    params = {"narrow": jnp.zeros((100, 2)), "wide": jnp.zeros((100, 100))}
    (actual,) = lowrank.find(params, (), lambda rows, columns: columns > 2)
    assert actual.path == "wide"


def test_columns_become_orthonormal_and_span_the_same() -> None:
    rng = np.random.default_rng(0)
    # One Gram-Schmidt pass in float32 would leave errors of 1e-3.
    factor = rng.normal(size=(3, 40, 1)) + 1e-4 * rng.normal(size=(3, 40, 5))
    wide = rng.normal(size=(1, 40, 5)) * 1e-25  # squares of these values underflow
    factors = [jnp.asarray(f, jnp.float32) for f in (factor, wide, rng.normal(size=(1, 8, 8)))]
    for given, actual in zip(factors, lowrank.orthonormalise(factors), strict=True):
        assert actual.shape == given.shape
        gram = np.einsum("lnr,lns->lrs", actual, actual)
        np.testing.assert_allclose(
            gram, np.broadcast_to(np.eye(gram.shape[1]), gram.shape), atol=2e-6
        )
        within = np.einsum("lnr,lsr,lsm->lnm", actual, actual, given)
        np.testing.assert_allclose(within, given, rtol=1e-4, atol=1e-5 * np.abs(given).max())


def test_dependent_columns_become_zero() -> None:
    column = np.random.default_rng(0).normal(size=(1, 50, 1)).astype(np.float32)
    factor = np.concatenate([column, 3 * column, 0 * column], axis=2)
    (actual,) = lowrank.orthonormalise([jnp.asarray(factor)])
    np.testing.assert_allclose(actual[0, :, 0], column[0, :, 0] / np.linalg.norm(column), rtol=1e-5)
    assert not actual[0, :, 1:].any()


def test_sums_over_devices_in_one_collective() -> None:
    arrays = [jnp.arange(6.0).reshape(3, 2), jnp.arange(3, dtype=jnp.bfloat16).reshape(3, 1)]
    mapped = jax.vmap(lambda *own: lowrank.add_up(own, ("i",)), axis_name="i")
    actual = mapped(*arrays)
    np.testing.assert_array_equal(actual[0], [[6, 9]] * 3)
    assert actual[1].dtype == jnp.float32 and (actual[1] == 3).all()
    assert str(jax.make_jaxpr(mapped)(*arrays)).count("psum") == 1
    assert lowrank.add_up([], ("i",)) == []


def test_random_factors_do_not_depend_on_the_configured_generator() -> None:
    matrices = lowrank.find(
        {"a": jnp.zeros((5, 6)), "b": jnp.zeros((2, 5, 6))}, ("b",), lambda n, m: True
    )

    def draw(seed: int, count: int) -> list[jax.Array]:
        return lowrank.random_factors(matrices, 3, seed, count)

    actual = draw(0, 0)
    assert [f.shape for f in actual] == [(1, 6, 3), (2, 6, 3)]
    assert lowrank.random_factors(matrices, 9, 0, 0, "rows")[1].shape == (2, 5, 5)
    with jax.default_prng_impl("rbg"):
        assert all(map(jnp.array_equal, actual, draw(0, 0)))
    for other in (draw(0, 1), draw(1, 0)):
        assert not any(map(jnp.array_equal, actual, other))
