"""Text and JSON of a plan whose values are set by the test, without a compiler."""

import dataclasses
import json
from typing import Any

import pytest

from lamb_tpu.cost import traffic
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.network import Axis, Calibration, Route, Validation
from lamb_tpu.cost.timeline import Event, Timeline
from lamb_tpu.cost.topology import topology
from lamb_tpu.cost.traffic import Collective
from lamb_tpu.plan.report import Memory, Plan, Traffic, decision
from lamb_tpu.plan.totals import Input, Work
from tests import tiny
from tests.cost.test_hosts import EVERYBODY, fabric
from tests.plan.planned import needs_compiler


def times(exposed: float) -> Timeline:
    return Timeline(0.1, exposed, ())


ROUTE = Route(1024, 2, 1, (Axis("x", 32, 1, True, 1), Axis("y", 32, 1, True, 1)), 4, 32)
MEMORY = Memory(2**30, 2**30, 2**30, 4 * 2**30, 2**20, 5 * 2**30)
WORK = Work(7038, 65536, 10, 100_000, Input("sequences", 128, 27_412, "a page", False))


def plan(**changes: Any) -> Plan:
    values = {
        "topology": topology("v3-2048"),
        "mesh": {"data": 64, "fsdp": 32},
        "hosts": 256,
        "batch_size": 65536,
        "backend": "shard_map",
        "compile_seconds": 63.2,
        "fits": True,
        "needed": 5 * 2**30,
        "memory": MEMORY,
        "flops": 2_890_500_000_000,
        "model_flops": 2_460_000_000_000,
        "cycles": 94_000_000,
        "times": (times(0.01), times(0.02), times(0.05)),
        "work": WORK,
        "calibration": Calibration(
            CALIBRATED.unseen,
            "21 runs",
            Validation((19, 21), {"v4": (5, 7)}, (0.1, 0.4), (0.01, 0.2)),
        ),
        "collectives": (
            Traffic(
                traffic.TrafficRow(
                    kind="all-reduce",
                    group_size=2048,
                    dtype="bf16",
                    count=7,
                    operand_bytes=2**29,
                    result_bytes=2**29,
                    sent_bytes=2**30,
                ),
                0.025,
                0.02,
                ROUTE,
                "Strategy",
            ),
        ),
    }
    return Plan(**values | changes)


@needs_compiler
def test_text() -> None:
    lines = plan().describe().splitlines()
    assert lines[:2] == [
        "v3-2048: 2,048 devices on 256 host(s), mesh data=64, fsdp=32, collectives by",
        "    shard_map",
    ]
    assert lines[2].startswith("step: a batch of 65,536, compiled in 63 s by libtpu ")
    assert lines[3:] == [
        "memory: 5 GiB of the 15.48 GiB that a device has: arguments 1 GiB, outputs 1",
        "    GiB, aliased 1 GiB, temporaries 4 GiB, program 1 MiB, peak 5 GiB",
        "time: 100 ms without the network, by the compiler's estimate (94,000,000 cycles",
        "    at 940 MHz)",
        "runs: 1.00 (1.00 to 1.00) times that estimate, by a fit to 21 runs",
        "validated: the interval covered 19 of 21 runs if their program is left out of",
        "    the fit, and if their TPU generation is left out, 5 of 7 runs on v4; median",
        "    error 10 % (at most 40 %) if the program is left out, 1 % (at most 20 %)",
        "    with other runs of it in the fit",
        "network: 20 ms (10 to 50), and 0 ms hidden by computation; a step takes 120 ms",
        "    (110 to 150)",
        "limit: the computation, 83% of a step",
        "arithmetic: 2.89e+12 operations in matrix products, 47.0% of the bfloat16 peak",
        "    in that time",
        "model FLOPs: 2.46e+12 per device, MFU 40.0% without the network",
        "input: 2,133 sequences (273,067 tokens) per second and host, 0.078 CPU cores at",
        "    27,412 per core (a page)",
        "left out: start-up, compiling on the pod (63 s here), checkpoints, and waiting",
        "    for the slowest chip",
        "collectives of one device in one step:",
        "  type        among  dtype  count  operand  sends  ms  along",
        "  all-reduce  2,048  bf16       7  512 MiB  1 GiB  25  x32 y32",
        "fits (32 % of memory); 7,038 updates, 12 min of compute and 1.2 to 5.9 min of",
        "    network; 0.51 s of evaluation; 240 chip-hours",
    ]
    leaves = "Muon: 288 of 296 values; Adam: the rest; state: mu,nu float32; 1,216 bytes"
    assert leaves in tiny.unbroken(plan(leaves=leaves).describe())
    assert plan(leaves=leaves).as_json()["leaves"] == leaves
    unknown = plan(cycles=None, flops=None, times=None, collectives=None, notes=("the loop %w",))
    assert unknown.describe().splitlines()[5:] == [
        "model FLOPs: 2.46e+12 per device",
        "not known: the loop %w",
        "fits (32 % of memory)",
    ]
    assert unknown.as_json()["milliseconds_without_network"] is None
    assert unknown.as_json()["run"]["chip_hours"] is None


@needs_compiler
def test_hosts_with_slow_links() -> None:
    packed = Collective("all-to-all", EVERYBODY, (Array("u8", (2**20,)),), 2)
    slow = Timeline(0.1, 0.3, (Event("x", packed, "", "", 0.3, 0.3),))
    text = tiny.unbroken(plan(times=(slow,) * 3, network=fabric(10)).describe())
    assert (
        "hosts: the 8 devices of each share one link of 10 Gb/s in each direction, which carries "
        "12 MiB per step"
    ) in text
    assert "sends: 1.938 MiB from each device per step: u8 1.938 MiB" in text
    assert "limit: the network between hosts, 75% of a step" in text
    actual = plan(times=(slow,) * 3, network=fabric(10)).as_json()
    assert actual["sent_bytes"] == {"u8": 2 * 31 * 2**15} and actual["host_devices"] == 8


@needs_compiler
def test_json() -> None:
    actual = json.loads(json.dumps(plan().as_json()))
    assert actual["step_milliseconds"] == pytest.approx([110, 120, 150])
    assert actual["mfu"] == pytest.approx(actual["mfu_without_network"] * 100 / 120)
    [row] = actual["collectives"]
    assert row["route"] == "x ring of 32, y ring of 32" and row["algorithm"] == "Strategy"
    assert actual["run"]["seconds"][1] == pytest.approx(
        7038 * 0.12 + actual["run"]["evaluation_seconds"]
    )


def test_decision() -> None:
    assert decision([plan(other_batch=131_072)]).endswith(
        "; the next larger batch that fits: 131,072"
    )
    small = plan(work=WORK._replace(updates=1561, eval_examples=None), needed=7.74 * 2**30)
    assert decision([plan(), small]) == (
        "fits (50 % of memory); 8,599 updates, 14 min of compute and 1.4 to 7.2 min of network; "
        "evaluation of unknown length; 294 chip-hours"
    )
    crowded = plan(fits=False, needed=20 * 2**30, memory=None, times=None, message="no\nroom")
    assert decision([plan(), crowded]) == (
        "DOES NOT FIT: the step needs 20 GiB, a device has 15.48 GiB"
    )
    smaller = dataclasses.replace(crowded, needed=None, other_batch=512)
    assert decision([smaller]) == (
        "DOES NOT FIT: a device has 15.48 GiB; the next smaller batch that fits: 512"
    )
