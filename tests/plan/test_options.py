"""Options that say what is planned: each mistake is one sentence, before anything compiles."""

import math
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.options import Request, check, check_gbps
from tests import tiny

TWO = {"phases": {"phase_1": {"duration": "1 steps"}, "phase_2": {"duration": "2 steps"}}}


def asked(**options: Any) -> Request:
    config = tiny.digits()
    return check(tiny.change(config, options.pop("config", {})), **options)


def test_what_is_asked() -> None:
    assert asked(topology="v3-8") == Request("plan", ("v3-8",))
    assert asked(topology="v3-8", html="a.html", config=TWO).kind == "plan"
    assert asked(topology="v3-8", find="batch").kind == "batch"
    assert asked(topology="v3-8", find="fastest").kind == "fastest"
    assert asked(topology="v3-8", batches="512,64,512", price=2.0, workdir="run") == Request(
        "advice", ("v3-8",), (512, 64)
    )
    assert asked(
        topologies="v3-8,v3-32", measured="v3-32=76.2min,v3-8=2h", html="a.html", config=TWO
    ) == Request("curves", ("v3-8", "v3-32"), measured={"v3-32": 4572.0, "v3-8": 7200.0})


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "--topology is missing; see --help"),
        (
            {"topology": "v3-9", "find": "batch"},
            "--topology is 'v3-9', and no slice of v3 has 9 cores",
        ),
        ({"topologies": "v3-8,v9-8"}, "--topologies has 'v9-8'; it must be one of v2, v3,"),
        (
            {"topology": "v3-8", "topologies": "v3-32"},
            "--topology is 'v3-8' and --topologies is 'v3-32'; give one of them",
        ),
        (
            {"topology": "v3-8", "find": "batch", "batches": "8"},
            "--find=batch and --batches=8 exclude each other; give one of them",
        ),
        (
            {"find": "batch", "topologies": "v3-8"},
            "--find=batch and --topologies=v3-8 exclude each other; give one of them",
        ),
        (
            {"topology": "v3-8", "find": "batch", "html": "a.html"},
            "--html is 'a.html', and --find=batch writes no page; leave one of them out",
        ),
        (
            {"topology": "v3-8", "batches": "8", "html": "a.html"},
            "--html is 'a.html', and --batches=8 writes no page; leave one of them out",
        ),
        (
            {"topology": "v3-8", "find": "batch", "config": TWO},
            "--find=batch is for one run, and config.phases has phase_1, phase_2; give one of them, often "
            "by the config's argument phase=1",
        ),
        (
            {"topology": "v3-8", "batches": "8", "config": TWO},
            "--batches=8 is for one run, and config",
        ),
        (
            {"topology": "v3-8", "batches": "8,0"},
            "--batches is '8,0', and '0' is no batch; give whole numbers of at least 1 with commas "
            "between, such as 512,1024",
        ),
        (
            {"topology": "v3-8", "workdir": "run"},
            "--workdir is 'run', which belongs to --batches; add one such as --batches=512,1024, or leave "
            "--workdir out",
        ),
        (
            {"topology": "v3-8", "price": 2.0},
            "--price-per-device-hour is 2.0, which belongs to --batc",
        ),
        (
            {"topology": "v3-8", "batches": "8", "price": -1.0},
            "--price-per-device-hour is -1.0; it must be a number above 0",
        ),
        (
            {"topology": "v3-8", "measured": "v3-8=1h"},
            "--measured is 'v3-8=1h', which belongs to --t",
        ),
        (
            {"topologies": "v3-8", "measured": "v3-32=1h"},
            "--measured has 'v3-32', which --topologies has not; it has v3-8",
        ),
        (
            {"topologies": "v3-8", "measured": "v3-8=76"},
            "--measured v3-8 is '76'; give a number above",
        ),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        asked(**options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("gbps", [0.0, -10.0, math.nan, math.inf])
def test_a_rate_that_is_none(gbps: float) -> None:
    check_gbps(None)
    check_gbps(0.5)
    with pytest.raises(UserError) as error:
        check_gbps(gbps)
    assert str(error.value) == (
        f"--network-gbps is {gbps:g}; it must be a number above 0, the 10^9 bits a second of a "
        "host's link, such as 10"
    )
