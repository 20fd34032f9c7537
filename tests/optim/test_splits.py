"""Tests a leaf's full shape and split axes inside shard_map, given a spec or a mesh axis's name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import splits
from lamb_tpu.optim.parameters import ParameterMetadata
from lamb_tpu.optim.splits import Split, split_of

P = PartitionSpec
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
METADATA, STACK = ParameterMetadata(), ParameterMetadata(layer_axes=(0,))


def inside(axis_name, shape, spec, metadata=METADATA):
    """Returns the split that a program on `MESH` computes for a leaf of this shape."""
    actual = []

    def body(leaf):
        actual.append(split_of(axis_name, "w", leaf.shape, metadata))
        return leaf

    jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec)(jnp.ones(shape))
    return actual[0]


@pytest.mark.parametrize(
    "shape, spec, metadata, expected",
    [
        ((8, 6), P("data"), METADATA, Split(("data",), (8, 6), (("data",), ()))),
        ((8, 6), P(None, "model"), METADATA, Split(("model",), (8, 6), ((), ("model",)))),
        (
            (16, 6),
            P(("data", "model")),
            METADATA,
            Split(("data", "model"), (16, 6), (("data", "model"), ())),
        ),
        (
            (8, 6),
            P("data", "model"),
            METADATA,
            Split(("data", "model"), (8, 6), (("data",), ("model",))),
        ),
        ((8, 6), P("data", "model"), STACK, Split(("model",), (8, 6), (("data",), ("model",)))),
        ((8, 6), P("data"), STACK, Split(None, (8, 6), (("data",), ()))),
        ((8, 6), P(), METADATA, Split(None, (8, 6), ((), ()))),
    ],
)
def test_a_spec_gives_the_full_shape_and_split_axes(shape, spec, metadata, expected):
    assert inside(spec, shape, spec, metadata) == expected
    assert inside(lambda path: {"w": spec}[path], shape, spec, metadata) == expected


def test_a_name_tells_the_mesh_axes_alone():
    assert inside("data", (8, 6), P("data")) == Split("data", None, None)
    assert inside(None, (8, 6), P()) == splits.unsplit((8, 6))


def test_the_shard_of_an_array_belongs_to_the_device():
    array = jnp.arange(8 * 16 * 3.0).reshape(8, 16, 3)

    def body(leaf):
        split = Split(None, (8, 5, 16), (("data",), (), ("model",)))
        return split.shard(array, (0, 2))

    actual = jax.shard_map(
        body,
        mesh=MESH,
        in_specs=P("data", None, "model"),
        out_specs=P("data", "model"),
        check_vma=False,
    )(jnp.ones((8, 5, 16)))
    np.testing.assert_array_equal(actual, array)


def test_specs_that_do_not_fit():
    with pytest.raises(
        ValueError,
        match=r"axis_name=.*'data', 'model'.* has more entries than the parameter 'w' has axes",
    ):
        inside(P("data", "model"), (8,), P("data"))
    with pytest.raises(ValueError, match=r"axis_name=\('data',\) is not bound here"):
        split_of(P("data"), "w", (8,), METADATA)


def test_transforms_name_an_axis_of_a_spec_that_is_not_bound():
    tx, params = optim.lamb(0.1, axis_name=P("data")), {"w": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"axis_name=\('data',\) is not bound here; use it insid"):
        tx.update(params, tx.init(params), params)
