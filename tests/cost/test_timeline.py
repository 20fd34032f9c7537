"""Tests the schedule of a program: hidden and exposed time of collectives."""

import pathlib

import pytest

from lamb_tpu.cost.hlo import Program
from lamb_tpu.cost.timeline import Timeline, timeline
from lamb_tpu.cost.traffic import Collective

TPU = (pathlib.Path(__file__).parent / "hlo" / "collectives.hlo").read_text()
FUSED = "%g (q: f32[8]) -> f32[8] {\n  ROOT %q = f32[8] parameter(0)\n}\n"
GROUPS = "replica_groups={{0,1}}, to_apply=%add"


def kernel(name: str, operand: str, cycles: int) -> str:
    return (
        f"%{name} = f32[8] fusion(%{operand}), calls=%g, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def run(lines: str, others: str = "", each: float = 100.0) -> Timeline:
    """Returns the timeline of `lines`; a cycle takes one second, and a collective `each` seconds."""
    program = Program(
        f"HloModule f, is_scheduled=true, num_partitions=2\n{FUSED}{others}\n"
        f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{lines}\n}}\n"
    )
    return timeline(program, 1.0, lambda collective: each)


def test_a_collective_that_is_waited_for() -> None:
    actual = run(
        f"  {kernel('a', 'x', 30)}\n"
        f'  %r = f32[8] all-reduce(%a), {GROUPS}, metadata={{op_name="jit(f)/psum"}}, '
        'backend_config={"collective_algorithm_config":{"strategy":"RingStrategy",'
        '"debug":"\\nRingStrategy{colors:4 dim_sizes:4,2 dim_used:{0 1}}"}}\n'
        f"  ROOT {kernel('b', 'r', 7)}"
    )
    assert (actual.compute, actual.exposed, actual.seconds, actual.network) == (37, 100, 137, 100)
    [event] = actual.events
    assert (event.name, event.operation, event.algorithm) == (
        "r",
        "jit(f)/psum",
        "RingStrategy 4 x 2",
    )
    assert event.collective.kind == "all-reduce" and event.exposed == 100


@pytest.mark.parametrize("between, exposed", [(0, 100), (60, 40), (100, 0), (500, 0)])
def test_computation_hides_earlier_collectives(between: int, exposed: int) -> None:
    actual = run(
        f"  %s = f32[8] all-reduce-start(%x), {GROUPS}\n"
        f"  {kernel('a', 'x', between)}\n"
        "  %d = f32[8] all-reduce-done(%s)\n"
        f"  ROOT {kernel('b', 'd', 7)}"
    )
    assert (actual.compute, actual.exposed) == (between + 7, exposed)
    assert [event.exposed for event in actual.events] == [exposed]


def test_collectives_share_the_network() -> None:
    """Two concurrent collectives take as long as if they ran one after the other."""
    actual = run(
        f"  %s = f32[8] all-reduce-start(%x), {GROUPS}\n"
        f"  %t = f32[8] all-gather-start(%x), {GROUPS}\n"
        f"  {kernel('a', 'x', 130)}\n"
        "  %d = f32[8] all-reduce-done(%s)\n"
        "  ROOT %e = f32[8] all-gather-done(%t)"
    )
    assert actual.exposed == 70
    assert [event.exposed for event in actual.events] == [0, 70]
    assert actual.network == 200


def test_other_transfers_are_no_collectives() -> None:
    actual = run(
        "  %s = (f32[8], f32[8], u32[]) copy-start(%x)\n"
        f"  {kernel('a', 'x', 5)}\n"
        "  ROOT %d = f32[8] copy-done(%s)"
    )
    assert actual == Timeline(5, 0, ())


def test_a_wrapped_collective() -> None:
    others = (
        f"%wrapped (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n"
        f"  ROOT %r = f32[4] reduce-scatter(%p), {GROUPS}\n}}\n"
    )
    actual = run(
        "  %s = ((f32[8]), f32[4]) async-start(%x), calls=%wrapped\n"
        f"  {kernel('a', 'x', 40)}\n"
        "  %u = ((f32[8]), f32[4]) async-update(%s)\n"
        "  ROOT %d = f32[4] async-done(%u)",
        others,
    )
    assert (actual.compute, actual.exposed) == (40, 60)
    assert [event.collective.kind for event in actual.events] == ["reduce-scatter"]


def test_a_transfer_between_slices() -> None:
    """The transfer runs in parallel with collectives within a slice, and ends when its result arrives."""
    output = (
        'frontend_attributes={_xla_host_transfer_rendezvous="r0",'
        '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    actual = run(
        "  %t = token[] after-all()\n"
        f"  %s = (f32[8], u32[], token[]) send(%x, %t), is_host_transfer=true, {output}\n"
        f"  %v = (f32[8], u32[], token[]) recv(%t), is_host_transfer=true, {output}\n"
        "  %e = token[] send-done(%s)\n"
        f"  %r = f32[8] all-reduce(%x), {GROUPS}\n"
        f"  {kernel('a', 'x', 30)}\n"
        "  ROOT %d = (f32[8], token[]) recv-done(%v)",
        each=100.0,
    )
    assert actual.seconds == 130 and actual.exposed == 100
    between, within = actual.events
    assert (between.collective.kind, between.collective.groups) == ("all-reduce", ((0, 2), (1, 3)))
    assert between.collective.operand_bytes == 32
    assert (between.exposed, within.exposed) == (0, 100)


def test_a_loop_waits_in_every_turn() -> None:
    others = (
        "%body (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
        f"  {kernel('i', 'p', 10)}\n  ROOT %r = f32[8] all-reduce(%i), {GROUPS}\n}}\n"
        "%condition (p: f32[8]) -> pred[] {\n  ROOT %p = pred[] parameter(0)\n}\n"
    )
    actual = run(
        "  ROOT %w = f32[8] while(%x), body=%body, condition=%condition, "
        'backend_config={"known_trip_count":{"n":"3"}}',
        others,
    )
    assert (actual.compute, actual.exposed) == (30, 300)
    [event] = actual.events
    assert (event.collective.count, event.seconds) == (3, 300)


def test_a_conditional_takes_its_longest_branch() -> None:
    others = "".join(
        f"%branch{n} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n"
        f"  ROOT {kernel(f'k{n}', 'p', cycles)}\n}}\n"
        for n, cycles in enumerate((20, 90))
    )
    actual = run(
        "  ROOT %c = f32[8] conditional(%x), branch_computations={%branch0, %branch1}", others
    )
    assert actual == Timeline(90, 0, ())


def test_the_collectives_of_a_tpus_program() -> None:
    """The program has a fused all-gather that overlaps a matrix product, and four other collectives."""
    types: list[str] = []

    def seconds(collective: Collective) -> float:
        types.append(collective.kind)
        return 1.0

    program = Program(
        TPU.replace(
            "calls=%async_collective_fusion.161",
            'calls=%async_collective_fusion.161, backend_config={"estimated_cycles":"40"}',
        )
    )
    actual = timeline(program, 0.01, seconds)
    assert types == [
        "all-gather",
        "reduce-scatter",
        "reduce-scatter",
        "collective-permute",
        "all-reduce",
    ]
    assert [round(event.exposed, 9) for event in actual.events] == [0.6, 1, 1, 1, 1]
    assert actual.compute == pytest.approx(0.4)
