"""Bytes that exchanges send on TPUs, by the compiler, against the least for each."""

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
    found = json.loads(done.stdout)[slice_name][name]
    sent = sum(found["sent"].values())
    assert found["least"] <= sent < 1.05 * found["least"], found
    if name != "powersgd":  # whose factors are float32; vectors of dgc are small
        assert found["sent"].get("f32", 0) < 0.01 * sent, found


def test_the_least_is_that_of_two_devices_by_hand() -> None:
    values = 4099 * 512 + 2560 * 768 + 768 * 257 + 257 + 3 + 3 * 3 * 5 * 7 + 1
    assert tpu_wire.least("onebit", 2) == values / 8
    assert tpu_wire.least("topk", 2) == pytest.approx(0.008 * values)
