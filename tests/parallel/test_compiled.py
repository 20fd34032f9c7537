"""Tests the types, groups and bytes of the collectives in steps that are compiled for TPUs."""

import importlib.util
import json
from typing import Any

import pytest

from tests import tiny
from tests.parallel.compiled import GROUP_DEVICES, PLACES

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here"),
]

DEVICES = 16
# Number of parameters of a network for digits: two hidden layers, each with a kernel and BatchNorm's
# scale and bias, and an output layer with kernel and bias for ten classes.
PARAMETERS = 64 * 512 + 512 * 1024 + 1024 * 10 + 2 * (512 + 1024) + 10
GRADIENT = 4 * PARAMETERS
SHARE = (DEVICES - 1) / DEVICES


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    done = tiny.command("tests.parallel.compiled")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rows(plan: dict[str, Any], kind: str, dtype: str = "") -> list[dict[str, Any]]:
    return [
        row for row in plan["collectives"] if row["kind"] == kind and dtype in ("", row["dtype"])
    ]


def sent(actual: list[dict[str, Any]]) -> int:
    return sum(row["sent_bytes"] for row in actual)


def of_groups(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of BatchNorm's all-reduces, which are among `GROUP_DEVICES` devices."""
    [row] = [row for row in rows(plan, "all-reduce") if row["group_size"] == GROUP_DEVICES]
    return row


@pytest.mark.long
@pytest.mark.parametrize("name", ["jit", "shard_map"])
def test_groups_of_batch_norm_are_grouped_all_reduces(plans: dict[str, Any], name: str) -> None:
    row = of_groups(plans[name])
    assert row["dtype"] == "f32"
    # The forward and backward passes of two layers send at most a few vectors of 512 and 1,024
    # channels.
    assert 4 <= row["count"] <= 12
    assert row["operand_bytes"] <= 4 * 6 * (512 + 1024)
    # Groups within a device's rows need no all-reduce.
    assert not [
        row for row in rows(plans["accumulated"], "all-reduce") if row["group_size"] < DEVICES
    ]


@pytest.mark.parametrize("name", ["jit", "shard_map", "bfloat16", "accumulated"])
def test_gradient_is_one_all_reduce_and_no_byte_more(plans: dict[str, Any], name: str) -> None:
    plan, least = plans[name], 2 * SHARE * GRADIENT
    assert {row["kind"] for row in plan["collectives"]} == {"all-reduce"}
    whole = [row for row in rows(plan, "all-reduce") if row["group_size"] == DEVICES]
    if name == "bfloat16":
        [narrow] = [row for row in whole if row["dtype"] == "bf16"]
        assert narrow["count"] == 1 and narrow["sent_bytes"] == pytest.approx(least / 2, rel=1e-3)
        whole.remove(narrow)
        # The other all-reduces are of running averages and metrics.
        assert sent(whole) < 0.03 * least
    else:
        assert {row["dtype"] for row in whole} == {"f32"}
        # jit sums BatchNorm's gradients first within its groups and then across them.
        assert (0.99 if name == "jit" else 1.0) * least <= sent(whole) < 1.03 * least
    # One all-reduce is for the gradient, and two in each microbatch are for averages of BatchNorm.
    assert sum(row["count"] for row in whole) <= (9 if name == "accumulated" else 3)


@pytest.mark.parametrize("name", ["zero1", "zero1 bfloat16"])
def test_zero1_is_reduce_scatter_and_all_gather(plans: dict[str, Any], name: str) -> None:
    plan, width = plans[name], 2 if "bfloat16" in name else 4
    scatters = rows(plan, "reduce-scatter", "bf16" if width == 2 else "f32")
    [gather] = rows(plan, "all-gather", "f32")
    assert rows(plan, "reduce-scatter") == scatters
    assert {row["kind"] for row in plan["collectives"]} == {
        "reduce-scatter",
        "all-gather",
        "all-reduce",
    }
    # One scatter is within 4 groups of 4 neighbours, the other among devices with equal indices.
    assert [(row["group_size"], row["count"]) for row in scatters] == [(4, 2)]
    least = SHARE * width * PARAMETERS
    # Padding to full tiles is significant in such a small network.
    assert least <= sent(scatters) < 1.04 * least
    assert gather["count"] == 1 and gather["group_size"] == DEVICES
    assert SHARE * GRADIENT <= gather["sent_bytes"] < 1.04 * SHARE * GRADIENT
    # The remaining all-reduces are for norms, metrics, and the bias of ten values, which 16 does not
    # divide.
    whole = [row for row in rows(plan, "all-reduce") if row["group_size"] == DEVICES]
    assert sent(whole) < 0.03 * SHARE * GRADIENT


def test_zero1_over_an_inner_axis(plans: dict[str, Any]) -> None:
    """The step scatters and gathers among 4 neighbours, and sums each quarter across the 4 groups."""
    plan = plans["inner zero1"]
    [scatter], [gather] = rows(plan, "reduce-scatter"), rows(plan, "all-gather")
    assert (scatter["group_size"], scatter["count"]) == (2, 2)  # in two phases
    assert (gather["group_size"], gather["count"]) == (4, 1)
    for row in (scatter, gather):
        assert 0.75 * GRADIENT <= row["sent_bytes"] < 0.78 * GRADIENT
    across = [row for row in rows(plan, "all-reduce") if row["sent_bytes"] > 0.1 * GRADIENT]
    assert [row["group_size"] for row in across] == [4]
    quarter = 2 * 0.75 * GRADIENT / 4
    assert quarter <= sent(across) < 1.1 * quarter


def test_zero1_saves_what_was_computed(plans: dict[str, Any]) -> None:
    moments = 2 * GRADIENT
    saved = plans["shard_map"]["memory_bytes"]["arguments"]
    saved -= plans["zero1"]["memory_bytes"]["arguments"]
    # The sixteenth of a matrix on a device may be padded.
    assert 0.97 * SHARE * moments < saved <= 1.01 * SHARE * moments


def test_every_sharding_fits(plans: dict[str, Any]) -> None:
    assert plans.keys() == PLACES.keys()
    assert all(plan["fits"] and not plan["notes"] for plan in plans.values())
