"""Compares the bytes that exchanges send in compiled TPU programs with their minimum."""

import importlib.util
import json

import pytest

from tests import tiny
from tests.parallel.exchange import tpu_wire


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
@pytest.mark.parametrize("name", ["onebit", "topk", "dgc", "powersgd"])
@pytest.mark.parametrize("slice_name", ["v5e-16", "v3-128"])
def test_at_most_five_percent_more_than_the_least(slice_name: str, name: str) -> None:
    done = tiny.command("tests.parallel.exchange.tpu_wire", name, slice_name)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)[slice_name][name]
    sent = sum(actual["sent"].values())
    least = tpu_wire.least(name, int(slice_name.split("-")[1]))
    assert least <= sent < 1.05 * least, actual
    # PowerSGD sends its factors in float32. DGC sends vectors in float32, which are small.
    if name != "powersgd":
        assert actual["sent"].get("f32", 0) < 0.01 * sent, actual


def test_the_least_is_that_of_two_devices_by_hand() -> None:
    values = 4099 * 512 + 2560 * 768 + 768 * 257 + 257 + 3 + 3 * 3 * 5 * 7 + 1
    assert tpu_wire.least("onebit", 2) == values / 8
    assert tpu_wire.least("topk", 2) == pytest.approx(0.008 * values)
