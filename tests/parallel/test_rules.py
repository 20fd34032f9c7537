"""Tests partition rules: shardings, bytes per device, and rejected rules."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from tests.raising import rejected

SHAPES = {
    "layers": {"kernel": (16, 24, 40), "bias": (16, 40)},
    "output": {"kernel": (40, 10), "bias": (10,)},
}
METADATA = [("^layers/", {"layer_axes": (0,)}), ("", {})]


def params() -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def specs(rules: list, shape: dict[str, int], zero1: bool = False) -> dict[str, tuple]:
    mesh, metadata = mesh_lib.make_mesh(shape), parameters.resolve(params(), METADATA)
    actual = rules_lib.partition_params(params(), rules, mesh, metadata)
    if zero1:
        actual = rules_lib.zero1(params(), actual, mesh, metadata)
    paths = parameters.leaf_paths(actual)
    return {path: tuple(s.spec) for path, s in zip(paths, jax.tree.leaves(actual), strict=True)}


DATA = {"data": 8}
BOTH = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    "rules, mesh, split",
    [
        ([], DATA, {}),
        ([("kernel", "replicated")], DATA, {}),
        # The axis of 16 layers is not split although 8 divides 16. The length 10 is not divisible.
        (
            [("output/bias", "replicated"), ("", "fsdp")],
            DATA,
            {
                "layers/kernel": (None, "data"),
                "layers/bias": (None, "data"),
                "output/kernel": ("data",),
            },
        ),
        # The first matching rule applies.
        (
            [("layers/kernel", [None, None, "model"]), ("layers/", [None, "data"])],
            BOTH,
            {"layers/kernel": (None, None, "model"), "layers/bias": (None, "data")},
        ),
        # Axes that the mesh lacks have size 1.
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
    metadata = parameters.resolve(tree, METADATA)
    actual = rules_lib.partition_params(
        tree, [("output/kernel$", "fsdp")], mesh_lib.make_mesh(DATA), metadata
    )
    assert tuple(actual["output"]["kernel"]["value"].spec) == ("data",)
    described = rules_lib.describe(tree, actual, [("output/kernel$", "fsdp")], {})
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
    "rules, mesh, number, value, problem",
    [
        ([("conv", "fsdp")], DATA, 0, "conv", "matches nothing"),
        (
            [("kernel", "replicated"), ("output/kernel", "fsdp")],
            DATA,
            1,
            "output/kernel",
            "matches only parameters that earlier rules decide",
        ),
        (
            [("output/bias", "fsdp")],
            DATA,
            0,
            "fsdp",
            "cannot split 'output/bias' of shape (10,), because none ",
        ),
        ([("output/kernel", [None, "data"])], DATA, 0, [None, "data"], "which does not divide 10"),
        ([("output/bias", [None, "data"])], BOTH, 0, [None, "data"], "'output/bias' has the shape"),
        ([("output/kernel", ["data", "data"])], DATA, 0, ["data", "data"], "a mesh axis twice"),
        (
            [("output/kernel", ["tensor"])],
            DATA,
            0,
            ["tensor"],
            "has the unknown mesh axis 'tensor'",
        ),
        ([("output/kernel", "zero1")], DATA, 0, "zero1", "is not a way to split"),
        ([("output/kernel", 3)], DATA, 0, 3, "is not a way to split"),
        ([("[", "fsdp")], DATA, 0, "[", "is not a valid regular expression"),
        ([(3, "fsdp")], DATA, 0, 3, "is not a valid regular expression"),
        (["kernel"], DATA, 0, "kernel", "is not a pair"),
    ],
)
def test_rejects_rules(
    rules: list, mesh: dict[str, int], number: int, value: object, problem: str
) -> None:
    with rejected(f"config.parallel.rules[{number}]", value, problem):
        specs(rules, mesh)


def test_rejects_a_mesh_axis_that_splits_nothing() -> None:
    with rejected("config.mesh.model", 4, "splits nothing"):
        specs([], BOTH)


def test_description_counts_bytes_per_device() -> None:
    mesh, metadata = mesh_lib.make_mesh(BOTH), parameters.resolve(params(), METADATA)
    rules = [("layers/kernel", [None, None, "model"]), ("output/kernel", "fsdp")]
    shardings = rules_lib.partition_params(params(), rules, mesh, metadata)
    places = rules_lib.zero1(params(), shardings, mesh, metadata)
    text = rules_lib.describe(
        params(), shardings, rules, {"moments": (params(), places), "averages": (None, None)}
    )
    # 16 x 24 x 40 values are split over 4 devices and 40 x 10 over 2; 16 x 40 and 10 are replicated.
    assert text.splitlines() == [
        "2 parameter(s) replicated by default: 2.539 KiB, 2.539 KiB a device",
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
    metadata = parameters.resolve(params(), METADATA)
    rules_lib.partition_params(params(), [], mesh, metadata, ("sequence",))
    assert rules_lib.sequence_axes(mesh, 12, 128) == ("sequence",)
    with rejected("config.mesh.sequence", 4, "does not divide the sequence length, 126 tokens"):
        rules_lib.sequence_axes(mesh, 12, 126)
    with rejected("config.model.num_heads", 6, "by config.mesh.sequence=4 times config.mesh.mode"):
        rules_lib.sequence_axes(mesh, 6, 128)
    # This mesh has no axis 'sequence'.
    assert rules_lib.sequence_axes(mesh_lib.make_mesh(BOTH), 3, 5) == ()


@pytest.mark.parametrize(
    "rules, mesh, problem",
    [
        (
            [("output/kernel", ["data"])],
            {"data": 2, "fsdp": 4},
            "cannot gather 'output/kernel', which config.parallel.rules split over 'data'",
        ),
        ([("layers/bias", ["data"])], DATA, "split along axis 0, which stacks layers"),
    ],
)
def test_rejects_rules_under_shard_map(rules: list, mesh: dict, problem: str) -> None:
    mesh, metadata = mesh_lib.make_mesh(mesh), parameters.resolve(params(), METADATA)
    shardings = rules_lib.partition_params(params(), rules, mesh, metadata)
    with rejected("config.parallel.backend", "shard_map", problem):
        rules_lib.check_named(shardings, mesh, metadata)
    fine = rules_lib.partition_params(params(), [("output/kernel", "fsdp")], mesh, metadata)
    rules_lib.check_named(fine, mesh, metadata)
