"""Tests cosines of the gradients of two halves, for the network and for each module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu.batching.similarity import similarity

MODULES = {"body": "^body/", "head": "^head/"}


def _halves():
    rng = np.random.default_rng(0)
    return tuple(
        {name: {"w": rng.normal(0.5, 1.0, (8, 6)).astype(np.float32)} for name in MODULES}
        for _ in range(2)
    )


def _cosine(a, b) -> float:
    a, b = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])
        for tree in (a, b)
    )
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_total_and_by_module() -> None:
    even, odd = _halves()
    actual = similarity(even, odd, MODULES)
    expected = {"similarity": _cosine(even, odd)} | {
        f"similarity/{name}": _cosine(even[name], odd[name]) for name in MODULES
    }
    assert {name: float(value) for name, value in actual.items()} == pytest.approx(
        expected, abs=3e-7
    )
    assert float(similarity(even, odd)["similarity"]) == float(actual["similarity"])


def test_halves_of_zeros_have_no_similarity() -> None:
    even, odd = _halves()
    even["body"]["w"] = np.zeros((8, 6), np.float32)
    actual = similarity(even, odd, MODULES)
    assert float(actual["similarity/body"]) == 0.0 and float(actual["similarity"]) != 0.0


def test_bfloat16_is_summed_in_float32() -> None:
    a = {"w": jnp.ones(4096, jnp.bfloat16)}
    b = {"w": jnp.concatenate([jnp.ones(2048), -jnp.ones(2048)]).astype(jnp.bfloat16)}
    actual = similarity(a, {"w": a["w"] * 3})["similarity"]
    assert actual.dtype == jnp.float32 and float(actual) == 1.0
    assert float(similarity(a, b)["similarity"]) == pytest.approx(0.0, abs=1e-6)


def test_leaves_that_are_split() -> None:
    """Tests two leaves inside shard_map: one is split, and the other is replicated."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    even, odd = _halves()
    specs = {"body": {"w": PartitionSpec("data")}, "head": {"w": PartitionSpec()}}

    def local(even, odd):
        return similarity(
            even, odd, MODULES, axis_name=lambda path: "data" if "body" in path else None
        )

    actual = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs, specs), out_specs=PartitionSpec())
    )(even, odd)
    expected = similarity(even, odd, MODULES)
    for name in expected:
        assert float(actual[name]) == pytest.approx(float(expected[name]), abs=3e-7)


def test_errors() -> None:
    even, odd = _halves()
    with pytest.raises(ValueError, match="no module matches the parameter 'head/w'"):
        similarity(even, odd, {"body": "^body/"})
    with pytest.raises(ValueError, match="the module '\\^neck' has no parameter"):
        similarity(even, odd, MODULES | {"neck": "^neck"})
    with pytest.raises(ValueError, match="two gradients must have the same structure"):
        similarity(even, odd["body"])
