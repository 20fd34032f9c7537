"""Facts about the whole leaf inside shard_map, from a spec and from a name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import splits
from lamb_tpu.optim.parameters import ParameterFacts
from lamb_tpu.optim.splits import Split, split_of

P = PartitionSpec
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
FACTS, STACK = ParameterFacts(), ParameterFacts(layer_axes=(0,))


def inside(axis_name, shape, spec, facts=FACTS):
    """The split that a program on `MESH` finds of a leaf of the given shape."""
    found = []

    def body(leaf):
        found.append(split_of(axis_name, "w", leaf.shape, facts))
        return leaf

    jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec)(jnp.ones(shape))
    return found[0]


@pytest.mark.parametrize(
    "shape, spec, facts, expected",
    [
        ((8, 6), P("data"), FACTS, Split(("data",), (8, 6), (("data",), ()))),
        ((8, 6), P(None, "model"), FACTS, Split(("model",), (8, 6), ((), ("model",)))),
        (
            (16, 6),
            P(("data", "model")),
            FACTS,
            Split(("data", "model"), (16, 6), (("data", "model"), ())),
        ),
        (
            (8, 6),
            P("data", "model"),
            FACTS,
            Split(("data", "model"), (8, 6), (("data",), ("model",))),
        ),
        ((8, 6), P("data", "model"), STACK, Split(("model",), (8, 6), (("data",), ("model",)))),
        ((8, 6), P("data"), STACK, Split(None, (8, 6), (("data",), ()))),
        ((8, 6), P(), FACTS, Split(None, (8, 6), ((), ()))),
    ],
)
def test_a_spec_tells_the_whole_shape_and_its_axes(shape, spec, facts, expected):
    assert inside(spec, shape, spec, facts) == expected
    assert inside(lambda path: {"w": spec}[path], shape, spec, facts) == expected


def test_a_name_tells_the_mesh_axes_alone():
    assert inside("data", (8, 6), P("data")) == Split("data", None, None)
    assert inside(None, (8, 6), P()) == splits.whole((8, 6))


def test_the_part_of_an_array_is_that_of_the_device():
    array = jnp.arange(8 * 16 * 3.0).reshape(8, 16, 3)

    def body(leaf):
        split = Split(None, (8, 5, 16), (("data",), (), ("model",)))
        return split.part(array, (0, 2))

    found = jax.shard_map(
        body,
        mesh=MESH,
        in_specs=P("data", None, "model"),
        out_specs=P("data", "model"),
        check_vma=False,
    )(jnp.ones((8, 5, 16)))
    np.testing.assert_array_equal(found, array)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"axis_name gives .*'data', 'model'.* 'w', which has 1"):
        inside(P("data", "model"), (8,), P("data"))
    with pytest.raises(ValueError, match=r"axis_name \('data',\) is not bound here"):
        split_of(P("data"), "w", (8,), FACTS)


def test_transforms_name_an_axis_of_a_spec_that_is_not_bound():
    tx, params = optim.lamb(0.1, axis_name=P("data")), {"w": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"axis_name \('data',\) is not bound here: give it insid"):
        tx.update(params, tx.init(params), params)
