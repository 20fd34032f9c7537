"""Checks of the command's options, which precede any compilation."""

import math
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.options import PlanRequest, check, check_batch, check_gbps
from lamb_tpu.spec import parse
from tests import tiny
from tests.raising import rejected

TWO = {"phases": {"phase_1": {"duration": "1 steps"}, "phase_2": {"duration": "2 steps"}}}


THIRTY = "9" * 30
THOUSANDS = "9" * 5000


def asked(**options: Any) -> PlanRequest:
    config = tiny.digits()
    return check(parse(tiny.change(config, options.pop("config", {}))), **options)


def test_requests() -> None:
    assert asked(topology="v3-8") == PlanRequest("plan", ("v3-8",))
    assert asked(topology="v3-8", html="a.html", config=TWO).kind == "plan"
    assert asked(topology="v3-8", find="batch").kind == "batch"
    assert asked(topology="v3-8", find="fastest").kind == "fastest"
    assert asked(topology="v3-8", batches="512,64,512", price=2.0, workdir="run") == PlanRequest(
        "advice", ("v3-8",), (512, 64)
    )
    assert asked(
        topologies="v3-8,v3-32", measured="v3-32=76.2min,v3-8=2h", html="a.html", config=TWO
    ) == PlanRequest("curves", ("v3-8", "v3-32"), measured={"v3-32": 4572.0, "v3-8": 7200.0})


@pytest.mark.parametrize(
    "options, key, value, problem, remedy",
    [
        ({}, "--topology", ..., "is missing", "see --help"),
        ({"topologies": "v3-8,v9-8"}, "--topologies", "v9-8", "is not a slice", "use v2, v3,"),
        ({"topology": "v3-8", "topologies": "v3-32"}, "--topology", "v3-8", "excludes --t", "one"),
        ({"find": "batch", "batches": "8"}, "--find", "batch", "excludes --batches='8'", "one of"),
        ({"find": "batch", "topologies": "v3-8"}, "--find", "batch", "excludes --topolo", "one of"),
        ({"find": "batch", "html": "a.html"}, "--html", "a.html", "excludes --find, which", "one"),
        ({"batches": "8", "html": "a.html"}, "--html", "a.html", "excludes --batches", "one of"),
        (
            {"find": "batch", "config": TWO},
            *("--find", "batch", "plans a single run, but config.phases has phase_1 and phase_2"),
            "choose one phase, for example with the argument phase=1 if the config has it",
        ),
        ({"batches": "8", "config": TWO}, "--batches", "8", "plans a single run", "choose one"),
        ({"batches": "8,0"}, "--batches", "8,0", "has '0', which is not", "give whole numbers of"),
        ({"batches": "8,1__2"}, "--batches", "8,1__2", "has '1__2', which is not", "give whole"),
        ({"batches": "1_"}, "--batches", "1_", "has '1_', which is not a batch size", "give whole"),
        ({"batches": "x" * 5000}, "--batches", "x" * 5000, "has 'xxx", "give whole"),
        ({"batches": THIRTY}, "--batches", THIRTY, "has a batch out", "at most 16,777,216"),
        ({"batches": THOUSANDS}, "--batches", THOUSANDS, "has a batch out", "at most 16,777,216"),
        ({"workdir": "run"}, "--workdir", "run", "needs --batches", "or leave --workdir out"),
        ({"price": 2.0}, "--price-per-device-hour", 2.0, "needs --batches", "add --batches=512"),
        ({"measured": "v3-8=1h"}, "--measured", "v3-8=1h", "needs --topologies", "add --topolog"),
        (
            {"topologies": "v3-8", "measured": "v3-32=1h"},
            *("--measured", "v3-32=1h", "has 'v3-32', which is not in --topologies", "use v3-8"),
        ),
        (
            {"batches": ",".join(map(str, range(1, 102)))},
            *("--batches", ..., "has 101 values", "give at most 100"),
        ),
        (
            {"topologies": ",".join(f"{slices}xv3-8" for slices in range(1, 102))},
            *("--topologies", ..., "has 101 values", "give at most 100"),
        ),
        *(
            (
                {"batches": "8", "price": price},
                *("--price-per-device-hour", ..., "is out of range", "use a number above 0"),
            )
            for price in (0.0, -1.0, math.nan, math.inf, 1e308, 1.1e9)
        ),
        ({"topologies": "v3-8,1000000xv3-8"}, "--topologies", "1000000xv3-8", "has 1,000,000", ""),
    ],
)
def test_errors(
    options: dict[str, Any], key: str, value: object, problem: str, remedy: str
) -> None:
    if "topologies" not in options and "--topology" != key:
        options = {"topology": "v3-8", **options}
    with rejected(key, value, problem, remedy):
        asked(**options)


def test_errors_of_other_modules() -> None:
    for options, message in (
        ({"topology": "v3-9", "find": "batch"}, "--topology='v3-9' has 9 cores, unlike any slice"),
        (
            {"topologies": "v3-8", "measured": "v3-8=999999h"},
            "--measured v3-8 is '999999h', which is out",
        ),
        (
            {"topologies": "v3-8", "measured": "v3-8=76"},
            "--measured v3-8 is '76', which is not a time",
        ),
    ):
        with pytest.raises(UserError) as error:
            asked(**options)
        assert str(error.value).startswith(message)


def test_the_largest_valid_values() -> None:
    assert asked(topology="v3-8", batches="16_777_216", price=1e9).batches == (2**24,)
    for gbps in (None, 1e-3, 0.5, 1e5):
        check_gbps(gbps)


@pytest.mark.parametrize("batch", [2**24 + 1, 10**5000], ids=["one more", "thousands of digits"])
def test_a_batch_that_no_plan_compiles(batch: int) -> None:
    check_batch(2**24)
    with rejected("config.batch_size", batch, "is out of range", "use at most 16,777,216"):
        check_batch(batch)


@pytest.mark.parametrize("gbps", [0.0, -10.0, math.nan, math.inf, 1e-308, 9e-4, 1.1e5, 1e308])
def test_network_rates_out_of_range(gbps: float) -> None:
    with rejected("--network-gbps", ..., "is out of range", "use 0.001 to 100,000 (10^9 bits"):
        check_gbps(gbps)
