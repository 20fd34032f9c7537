"""Partition rules: what is split over what, what a device holds of it, and rules that cannot be."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib

SHAPES = {
    "layers": {"kernel": (16, 24, 40), "bias": (16, 40)},
    "output": {"kernel": (40, 10), "bias": (10,)},
}
FACTS = [("^layers/", {"layer_axes": (0,)}), ("", {})]


def params() -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def specs(rules: list, shape: dict[str, int], zero1: bool = False) -> dict[str, tuple]:
    mesh, facts = mesh_lib.make_mesh(shape), parameters.resolve(params(), FACTS)
    found = rules_lib.partition_params(params(), rules, mesh, facts)
    if zero1:
        found = rules_lib.zero1(params(), found, mesh, facts)
    paths = parameters.leaf_paths(found)
    return {path: tuple(s.spec) for path, s in zip(paths, jax.tree.leaves(found), strict=True)}


DATA = {"data": 8}
BOTH = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    "rules, mesh, split",
    [
        ([], DATA, {}),
        ([("kernel", "replicated")], DATA, {}),
        # The layers' axis is left whole though 8 divides it, and 10 is not divided.
        (
            [("output/bias", "replicated"), ("", "fsdp")],
            DATA,
            {
                "layers/kernel": (None, "data"),
                "layers/bias": (None, "data"),
                "output/kernel": ("data",),
            },
        ),
        # The first rule decides.
        (
            [("layers/kernel", [None, None, "model"]), ("layers/", [None, "data"])],
            BOTH,
            {"layers/kernel": (None, None, "model"), "layers/bias": (None, "data")},
        ),
        # What is not in the mesh has size 1.
        ([("output/kernel", ["model", None])], DATA, {}),
        ([("output/kernel", ["model", "data"])], BOTH, {"output/kernel": ("model", "data")}),
        ([("output/kernel", "fsdp")], {"data": 1, "fsdp": 8}, {"output/kernel": ("fsdp",)}),
    ],
)
def test_rules_split(rules: list, mesh: dict[str, int], split: dict[str, tuple]) -> None:
    whole = dict.fromkeys(parameters.leaf_paths(params()), ())
    assert specs(rules, mesh) == whole | split


def test_rules_find_nnx_paths() -> None:
    tree = jax.tree.map(lambda leaf: {"value": leaf}, params())
    facts = parameters.resolve(tree, FACTS)
    found = rules_lib.partition_params(
        tree, [("output/kernel$", "fsdp")], mesh_lib.make_mesh(DATA), facts
    )
    assert tuple(found["output"]["kernel"]["value"].spec) == ("data",)
    described = rules_lib.describe(tree, found, [("output/kernel$", "fsdp")], {})
    assert "by the rule 'output/kernel$'" in described


def test_zero1_splits_state_along_axes_that_divide() -> None:
    assert specs([], DATA, zero1=True) == {
        "layers/kernel": (None, "data"),
        "layers/bias": (None, "data"),
        "output/kernel": ("data",),
        "output/bias": (),
    }
    rules = [("layers/kernel", [None, "model"]), ("output/kernel", [None, "data"])]
    assert specs(rules, BOTH, zero1=True) == {
        "layers/kernel": (None, "model", "data"),
        "layers/bias": (None, "data"),
        "output/kernel": (None, "data"),
        "output/bias": ("data",),
    }


@pytest.mark.parametrize(
    "rules, mesh, message",
    [
        ([("conv", "fsdp")], DATA, r"rules\[0\] with the regex 'conv' matches nothing"),
        (
            [("kernel", "replicated"), ("output/kernel", "fsdp")],
            DATA,
            r"rules\[1\] with the regex 'output/kernel' matches only parameters that earlier rules",
        ),
        ([("output/bias", "fsdp")], DATA, r"rules\[0\] splits 'output/bias' of shape \(10,\), of"),
        ([("output/kernel", [None, "data"])], DATA, r"size 8, which does not divide 10"),
        ([("output/bias", [None, "data"])], BOTH, r"has 2 axes and 'output/bias' has the shape"),
        ([("output/kernel", ["data", "data"])], DATA, r"names a mesh axis twice: \['data', 'dat"),
        ([("output/kernel", ["tensor"])], DATA, r"names the mesh axis 'tensor'; known: data, fsdp"),
        ([("output/kernel", "zero1")], DATA, r"splits by 'zero1'; it must be one of replicated, f"),
        ([("output/kernel", 3)], DATA, r"splits by 3; it must be one of"),
        ([("[", "fsdp")], DATA, r"rules\[0\] is not a valid regular expression: '\['"),
        ([(3, "fsdp")], DATA, r"rules\[0\] is not a valid regular expression: 3"),
        (["kernel"], DATA, r"rules\[0\] is 'kernel'; it must be a pair"),
        ([], BOTH, r"config\.mesh\.model is 4, but nothing is split over that axis"),
    ],
)
def test_rules_that_cannot_be(rules: list, mesh: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        specs(rules, mesh)
    assert "config." in str(error.value)


def test_description_counts_what_a_device_holds() -> None:
    mesh, facts = mesh_lib.make_mesh(BOTH), parameters.resolve(params(), FACTS)
    rules = [("layers/kernel", [None, None, "model"]), ("output/kernel", "fsdp")]
    shardings = rules_lib.partition_params(params(), rules, mesh, facts)
    places = rules_lib.zero1(params(), shardings, mesh, facts)
    text = rules_lib.describe(
        params(), shardings, rules, {"moments": (params(), places), "averages": (None, None)}
    )
    # 16 x 24 x 40 over 4, 16 x 40 and 10 whole, 40 x 10 over 2, in four bytes each
    assert text.splitlines() == [
        "2 parameter(s) replicated by no rule: 2.539 KiB, 2.539 KiB a device",
        "1 parameter(s) split (-, -, model) by the rule 'layers/kernel': 60 KiB, 15 KiB a device",
        "1 parameter(s) split (data) by the rule 'output/kernel': 1.562 KiB, 800 B a device",
        "moments: 64.1 KiB, 9.551 KiB a device",
    ]
    held = 16 * 24 * 40 // 8 + 16 * 40 // 2 + 40 * 10 // 2 + 10 // 2
    assert rules_lib.bytes_per_device(params(), places) == 4 * held
    assert rules_lib.bytes_per_device(
        params(), jax.tree.map(lambda _: mesh_lib.replicated(mesh), params())
    ) == 4 * (16 * 24 * 40 + 16 * 40 + 40 * 10 + 10)


def test_axes_that_the_model_splits_by_itself_are_used() -> None:
    mesh = mesh_lib.make_mesh({"data": 2, "sequence": 4})
    facts = parameters.resolve(params(), FACTS)
    rules_lib.partition_params(params(), [], mesh, facts, ("sequence",))
    assert rules_lib.sequence_axes(mesh, 12, 128) == ("sequence",)
    for num_heads, length, message in (
        (12, 126, "config.mesh.sequence is 4, which does not divide sequences of 126 tokens"),
        (6, 128, "sequence=4 and config.mesh.model=1 split .* do not divide .*num_heads=6"),
    ):
        with pytest.raises(UserError, match=message):
            rules_lib.sequence_axes(mesh, num_heads, length)
    # A mesh without the axis.
    assert rules_lib.sequence_axes(mesh_lib.make_mesh(BOTH), 3, 5) == ()


@pytest.mark.parametrize(
    "rules, mesh, message",
    [
        (
            [("output/kernel", ["data"])],
            {"data": 2, "fsdp": 4},
            r"'output/kernel' over 'data'; .*'shard_map' it can be split over 'fsdp' alone",
        ),
        ([("layers/bias", ["data"])], DATA, r"'layers/bias' along axis 0, which stacks layers"),
    ],
)
def test_rules_that_shard_map_cannot_follow(rules: list, mesh: dict, message: str) -> None:
    mesh, facts = mesh_lib.make_mesh(mesh), parameters.resolve(params(), FACTS)
    shardings = rules_lib.partition_params(params(), rules, mesh, facts)
    with pytest.raises(UserError, match=message):
        rules_lib.check_named(shardings, mesh, facts)
    fine = rules_lib.partition_params(params(), [("output/kernel", "fsdp")], mesh, facts)
    rules_lib.check_named(fine, mesh, facts)
