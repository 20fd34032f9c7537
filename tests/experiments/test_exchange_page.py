"""The page about gradient exchange, made from synthetic rows and from the stored rows."""

import doctest
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.exchange import page, programs, scaling, wire
from experiments.exchange.programs import HOST_DEVICES, METHODS, MODELS, Case
from experiments.exchange.scaling import CONSTANTS
from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.topology import devices as topology_devices
from lamb_tpu.cost.topology import topology
from lamb_tpu.cost.traffic import Collective
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.plan.making import loader
from lamb_tpu.run.build import prepare

V = 4_000_000  # bytes of a gradient in float32
SHAPES = [(1000, 999), (1000,)]


def row(case: Case) -> dict[str, Any]:
    """Returns a synthetic row of a program; compressed methods send a 32nd of the float32 bytes."""
    devices = topology(case.topology).num_devices
    count = devices // case.inner
    actual: list[list[Any]] = []
    if case.method in ("float32", "bfloat16"):
        size = V if case.method == "float32" else V // 2
        actual = [["all-reduce", "all", "f32" if size == V else "bf16", 2, size]]
    else:
        among, bytes_ = ("all", V) if case.inner == 1 else ("outer", V // HOST_DEVICES)
        actual = [
            ["all-to-all", among, "u8", 1, bytes_ // 32],
            ["all-gather", among, "u8", 1, bytes_ // 32 // count],
        ]
        if case.inner > 1:
            actual += [
                ["all-gather", "inner", "f32", 1, V // HOST_DEVICES],
                ["reduce-scatter", "inner", "f32", 1, V],
            ]
    sent = {}
    for kind, among, dtype, number, size in actual:
        members = {"all": devices, "inner": case.inner, "outer": count}[among]
        one = Collective(kind, (tuple(range(members)),), (Array("u8", (size // number,)),), number)
        sent[dtype] = sent.get(dtype, 0) + number * one.sent_bytes
    return {
        "model": case.model,
        "method": case.method,
        "topology": case.topology,
        "inner": case.inner,
        "devices": devices,
        "cycles": 10**6 if len(actual) == 1 else 2 * 10**6 + 1000 * count,
        "clock": 940e6,
        "compile_seconds": 1.5,
        "needed_bytes": 1,
        **programs.counts(SHAPES, {0: 4 * 1999} if "powersgd" in case.method else {}),
        "sent": sent,
        "collectives": actual,
        "versions": {"jax": "0", "libtpu": "1"},
    }


@pytest.fixture
def saved() -> dict[str, dict[str, Any]]:
    return {case.key: row(case) for case in programs.cases()}


def test_every_program_has_a_name() -> None:
    keys = [case.key for case in programs.cases()]
    assert len(set(keys)) == len(keys) == 2 * (2 * 7 + 2 * 5 + 7)
    assert set(programs.load()) <= set(keys)


@pytest.mark.parametrize("model", MODELS)
def test_the_config_of_a_program_is_accepted(model: str) -> None:
    devices = topology_devices(topology("v3-32"))
    config = programs.config_of(Case(model, "dgc 0.1 %", "v3-32", HOST_DEVICES), len(devices))
    run = prepare(config, None, devices, load=loader(config, None))
    assert run.exchange is not None and run.mesh.shape["fsdp"] == HOST_DEVICES
    assert sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params)) > 25e6


def test_the_page(
    saved: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "compression.md.j2"
    (tmp_path / name).write_text((programs.FOLDER / name).read_text())
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    text = page.write(saved)
    assert (tmp_path / "compression.md").read_text() == text == page.write(saved)
    assert (tmp_path / "compression.svg").read_text().startswith("<?xml")
    assert "Not compiled yet" not in text
    # One row for a single host, and one for each number of devices and network.
    assert text.count("\n| one host | 8 |") == 2
    assert text.count("\n| 10 Gb/s | ") == 2 * 4
    seconds = scaling.step_seconds("BERT-Large")
    assert seconds is not None and 0.1 < seconds < 0.2
    step = 1e3 * seconds * CONSTANTS.compute_factor
    one = scaling.time(saved, "BERT-Large", "float32", 512, 10.0)
    assert one is not None and one.packing == 0
    assert one.compute == pytest.approx(step / 1e3)
    assert f"| float32 | {step:.4g} | 0 | {1e3 * one.network:.4g} |" in text
    # A missing program removes its row.
    less = {key: each for key, each in saved.items() if "name=onebit" not in key}
    assert "- name=onebit of bert_pretrain:phase=1,scan,batch={batch} on v3-32\n" in page.text(less)
    assert "name=onebit" not in text and "| onebit |" not in page.text(less)
    assert "Not compiled yet" in page.text({})


def test_a_law_of_two_programs(saved: dict[str, Any]) -> None:
    actual = scaling.law_of(saved, "ResNet-50", "onebit")
    assert actual is not None
    collectives = {one.kind: one for one in actual.collectives}
    assert collectives["all-to-all"].operand_bytes(2048) == pytest.approx(V / 32)
    assert collectives["all-gather"].operand_bytes(1000) == pytest.approx(V / 32 / 1000, rel=0.01)
    assert actual.cycles == pytest.approx((2 * 10**6, 1000))
    third = saved[Case("ResNet-50", "onebit", scaling.CHECKED).key]
    assert scaling.sent_bytes(actual, 16) == pytest.approx(wire.sent(third), rel=0.01)
    assert all(abs(off) < 0.01 for off in scaling.off_by(saved).values())
    within = scaling.law_of(saved, "ResNet-50", "onebit", HOST_DEVICES)
    assert within is not None
    sent = saved[Case("ResNet-50", "onebit", "v3-128", HOST_DEVICES).key]["sent"]
    assert scaling.sent_bytes(within, 128) == pytest.approx(sum(sent.values()), rel=0.01)
    # An operand of the same size on every slice has no sharded part.
    [plain] = scaling.law(
        [saved[Case("ResNet-50", "float32", name).key] for name in scaling.FITTED]
    ).collectives
    assert (plain.fixed, plain.cut, plain.number) == (V, 0.0, 2)


def test_times(saved: dict[str, Any]) -> None:
    def network(method: str, devices: int, gbps: float | None) -> float:
        actual = scaling.time(saved, "ResNet-50", method, devices, gbps)
        assert actual is not None
        return actual.network

    # The link of each of the h = 64 hosts carries 2 (h - 1) / h of the gradient.
    rate = 1.25e9 * CONSTANTS.datacenter_efficiency
    steps = 2 * 2 * 6 * CONSTANTS.datacenter_seconds
    least = 2 * 63 / 64 * V / rate + steps
    assert least < network("float32", 512, 10.0) < 1.02 * least
    assert network("bfloat16", 512, 10.0) < network("float32", 512, 10.0)
    assert network("float32", 512, None) < network("float32", 512, 100.0)
    onebit = scaling.time(saved, "ResNet-50", "onebit", 512, 10.0)
    # Summing over all devices sends eight times as much over a link as summing within hosts first.
    assert onebit is not None and onebit.is_within
    assert onebit.packing == pytest.approx((10**6 + 1000 * 64) * CONSTANTS.compute_factor / 940e6)
    assert next(iter(scaling.best(saved, "ResNet-50", 512, 10.0))) != "float32"
    # If 1,000 devices each send 0.1 %, a dense vector is no larger, so summing within hosts first is faster.
    sparse = scaling.time(saved, "ResNet-50", "dgc 0.1 %", 2048, None)
    assert sparse is not None and sparse.is_within
    alone = {key: each for key, each in saved.items() if "fsdp" not in key}
    assert scaling.time(alone, "ResNet-50", "dgc 0.1 %", 2048, None) is None
    assert scaling.time({}, "ResNet-50", "float32", 8, None) is None


def test_coordinates_of_hosts() -> None:
    at = scaling.coordinates(32)
    assert len(set(at)) == 16 and at[0] == at[1]
    for first in range(0, 32, HOST_DEVICES):
        xs, ys = ({position[axis] for position in at[first : first + 8]} for axis in (1, 2))
        assert len(xs) == len(ys) == 2 and min(xs) % 2 == min(ys) % 2 == 0
    assert scaling.groups(16, "outer")[1] == (1, 9)
    assert scaling.groups(16, "inner") == (tuple(range(8)), tuple(range(8, 16)))
    pairs = scaling.groups(16, "inner", "collective-permute")
    assert pairs[0] == (0, 1) and pairs[7:9] == ((7, 0), (8, 9)) and len(pairs) == 16


@pytest.mark.parametrize(
    "method, expected",
    [
        ("float32", 2 * 127 / 128 * V),
        ("bfloat16", 127 / 128 * V),
        ("aps e4m3", 2 * 127 / 128 * (V / 4 + 8)),
        ("aps e3m0", 2 * 127 / 128 * (V / 8 + 8)),
        ("onebit", 2 * 127 / 128 * V / 32 + 2 * 127 * 8),
        ("dgc 0.1 %", 127 * 8 * 0.001 * (V / 4 - 1000) + 2 * 127 / 128 * 4000),
        ("powersgd rank 4", 2 * 127 / 128 * 4 * (4 * 1999 + 1000)),
    ],
)
def test_the_least_bytes(method: str, expected: float) -> None:
    assert wire.least(row(Case("ResNet-50", method, "v3-128"))) == pytest.approx(expected)


def test_factors_are_those_of_the_matrices_that_are_sent_so() -> None:
    params = {"bias": jnp.zeros(512), "kernel": jnp.zeros((512, 256)), "small": jnp.zeros((4, 2))}
    factors = programs.factors(PowerSGD(("data",), 8, rank=4), params)
    assert factors == {1: 4 * (512 + 256)}
    actual = programs.counts([(512,), (512, 256), (4, 2)], factors)
    assert (actual["factor_values"], actual["unfactored_values"]) == (3072, 520)


def test_sums_of_collectives() -> None:
    def one(kind: str, groups: list[range], count: int, size: int) -> Collective:
        return Collective(kind, tuple(map(tuple, groups)), (Array("u8", (size,)),), count)

    every, hosts = [range(32)], [range(first, first + 8) for first in range(0, 32, 8)]
    across = [range(first, 32, 8) for first in range(8)]
    actual = [
        one("all-reduce", every, 1, 5),
        one("all-gather", hosts, 2, 3),
        one("all-gather", across, 1, 7),
        one("all-reduce", every, 3, 1),
    ]
    assert programs.summed(actual, 32, 8) == [
        ["all-gather", "inner", "u8", 2, 6],
        ["all-gather", "outer", "u8", 1, 7],
        ["all-reduce", "all", "u8", 4, 8],
    ]
    # Two phases send as much as a single phase among all 32 devices: 31 x 31 bytes.
    phases = [one("all-gather", across, 1, 31), one("all-gather", hosts, 1, 124)]
    assert sum(each.sent_bytes for each in phases) == 31 * 31
    assert programs.summed(phases, 32, 1) == [["all-gather", "all", "u8", 2, 3 + 28]]


def test_saved_rows_make_the_page() -> None:
    saved = programs.load()
    assert saved
    assert (programs.FOLDER / "compression.md").read_text() == page.text(saved)
    for actual, _, ratio in page.wire_lines(saved):
        assert 0.98 < ratio < 1 + page.WITHIN, (actual["model"], actual["method"])
        if actual["method"] not in ("float32", "powersgd rank 4", "dgc 0.1 %"):
            assert wire.wide_share(actual) < 0.02
    assert all(abs(off) < 0.05 for off in scaling.off_by(saved).values())


def test_docstrings() -> None:
    assert doctest.testmod(page) == (0, 1)
    assert set(MODELS) == {"BERT-Large", "ResNet-50"} and "float32" in METHODS
