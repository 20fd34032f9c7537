"""The table of shardings: the bounds of its figures, and a sweep of two cells that is resumed."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from experiments.bench import distribution_table
from experiments.bench.distribution_cell import Cell, as_messages, lowered_collectives
from lamb_tpu.parallel.mesh import make_mesh
from tests import tiny

# The kernel can be sharded over 4 devices; the bias cannot, because 10 is not divisible by 4.
SHAPES = {"output/kernel": (20, 5), "output/bias": (10,)}


@pytest.mark.parametrize(
    ("state", "gradient_dtype", "expected"),
    [
        # 3/4 of 440 bytes to reduce, and 3/4 of 440 bytes to gather.
        ("replicated", "float32", 660),
        ("replicated", "bfloat16", 330),
        ("zero1", "float32", 660),
        # The kernel's gradients have 200 bytes, its parameters 400; the bias has 20 bytes in each direction.
        ("zero1", "bfloat16", 480),
        ("fsdp", "float32", 660),
    ],
)
def test_least_bytes(state: str, gradient_dtype: str, expected: int) -> None:
    assert distribution_table.least_bytes(SHAPES, 4, state, gradient_dtype) == expected
    assert distribution_table.least_bytes(SHAPES, 1, state, gradient_dtype) == 0


def test_computed_memory() -> None:
    memory = {
        state: [distribution_table.computed_memory(SHAPES, n, state) for n in (1, 4)]
        for state in ("replicated", "zero1", "fsdp")
    }
    # 110 parameters, two moments of each parameter, and a count of updates.
    assert {values[0] for values in memory.values()} == {3 * 440 + 4}
    assert memory["replicated"][1] == 3 * 440 + 4
    assert memory["zero1"][1] == 440 + 2 * (100 + 40) + 4
    assert memory["fsdp"][1] == 3 * (100 + 40) + 4


def line(cell: Cell, messages: list, **changes: object) -> dict:
    actual = {
        "cell": list(cell),
        "shapes": SHAPES,
        "messages": messages,
        "seconds": 1.0,
        "losses": [2.0, 1.0],
        "differences": {"output/kernel": 1e-7, "output/bias": 0.0},
        "held_bytes": 1324,
    }
    return actual | changes


def message(kind: str, size: int, sent: int, count: int = 1) -> dict:
    sizes = [10, size]
    return {"kind": kind, "dtype": "f32", "count": count, "sizes": sizes, "sent_bytes": sent}


REDUCED = message("all-reduce", 100, 660)


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({}, set()),
        ({"messages": [REDUCED, message("all-reduce", 99, 9999, 9)]}, set()),
        ({"messages": [REDUCED, message("all-gather", 100, 30, 9)]}, set()),
        ({"messages": [REDUCED, message("all-gather", 101, 34)]}, {"of_least"}),
        ({"messages": []}, {"of_least"}),
        ({"messages": [message("all-reduce", 100, 660, 4)]}, set()),
        ({"messages": [message("reduce-scatter", 110, 660, 5)]}, {"sums"}),
        ({"differences": {"output/kernel": 0.0, "output/bias": 1.1e-6}}, {"difference"}),
        ({"held_bytes": 1340}, {"of_computed"}),
        ({"held_bytes": 1300}, {"of_computed"}),
    ],
)
def test_figures_that_fail_are_marked_and_explained(changes: dict, figures: set[str]) -> None:
    cell = Cell(1, 4, "replicated", "shard_map")
    lines = [line(cell, **{"messages": [REDUCED]} | changes)]
    assert distribution_table.missed(lines[0]) == figures
    letters = {"difference": "a", "of_least": "b", "sums": "c", "of_computed": "d"}
    text = distribution_table.table(lines)
    notes = distribution_table.notes(lines)
    for name, letter in letters.items():
        assert (f"** ({letter})" in text) == (name in figures)
        assert any(note.startswith(f"({letter}) ") for note in notes) == (name in figures)
    if not figures:
        assert notes == ["Every figure is within its bound."]


def test_notes_name_causes() -> None:
    full = line(Cell(1, 1, "replicated", "jit"), [])
    other = line(
        Cell(1, 1, "replicated", "jit", "float32", 2),
        [],
        differences={"output/kernel": 5e-7, "output/bias": 0.0},
    )
    apart = line(
        Cell(1, 4, "replicated", "jit"),
        [REDUCED],
        differences={"output/kernel": 2e-6, "output/bias": 0.0},
    )
    [note] = distribution_table.notes([full, other, apart])
    assert "2.00e-06, in output/kernel" in note and "5.00e-07: LAMB divides" in note
    apart["differences"]["output/kernel"] = 1e-3
    [note] = distribution_table.notes([full, other, apart])
    assert "does not explain" in note
    # The second gather does not have the size of a kernel, so it carries an activation.
    gathers = [message("all-gather", 100, 300), message("all-gather", 101, 99000)]
    compiled = line(Cell(1, 4, "zero1", "jit"), [REDUCED, *gathers], held_bytes=724)
    [note] = distribution_table.notes([full, compiled])
    assert "1.455 times the minimum" in note and "reduce-scatters would send 0.000 MB" in note
    assert "more than once" not in note and "not the minimum traffic" in note
    split = line(Cell(1, 4, "fsdp", "jit"), [REDUCED, *gathers], held_bytes=424)
    [note] = distribution_table.notes([full, split])
    assert "It also exchanges 0.099 MB of activations." in note
    named = line(
        Cell(1, 4, "zero1", "shard_map"),
        [message("reduce-scatter", 110, 330), message("all-gather", 110, 660)],
        held_bytes=724,
    )
    [note] = distribution_table.notes([full, named])
    assert "more than once" in note and note.endswith("This setting promises the minimum traffic.")


def test_lowered_collectives() -> None:
    mesh = make_mesh({"data": 4, "fsdp": 2})

    def body(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        narrow = jax.lax.psum(x.astype(jnp.bfloat16), "data")
        shard = jax.lax.psum_scatter(x, "fsdp", tiled=True)
        return narrow, shard, jax.lax.all_gather(y, ("data", "fsdp"), tiled=True)

    step = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    text = jax.jit(step).lower(jnp.ones((6, 5)), jnp.ones(3)).as_text("hlo")
    actual = [
        (one["kind"], one["dtype"], one["sizes"], one["sent_bytes"])
        for one in as_messages(lowered_collectives(text, 8))
    ]
    assert actual == [
        ("all-reduce", "bf16", [30], 90),
        ("reduce-scatter", "f32", [30], 60),
        ("all-gather", "f32", [24], 84),
    ]


@pytest.mark.long
def test_sweep_of_two_cells_goes_on_where_it_stood(tmp_path) -> None:
    arguments = (
        "experiments.bench.distribution",
        f"--folder={tmp_path}",
        "--width=32",
        "--updates=12",
        "--cells=2x2 zero1 shard_map",
        "--note=Idle.",
    )
    done = tiny.command(*arguments)
    assert done.returncode == 0, done.stderr
    assert [text.split(";")[0].split(":")[0] for text in done.stderr.splitlines()] == [
        "1/2 1x1 replicated jit float32",
        "2/2 2x2 zero1 shard_map float32",
    ]
    rows = [
        text.strip("| ").split(" | ") for text in done.stdout.splitlines() if "float32 |" in text
    ]
    assert [row[:4] for row in rows] == [
        ["1", "1", "replicated", "jit"],
        ["4", "2", "ZeRO-1", "shard_map"],
    ]
    values = 64 * 32 + 32 * 32 + 32 * 10 + 4 * 32 + 10
    held = 4 * values + 2 * 4 * ((values - 10) // 4 + 10) + 4
    assert rows[1][10:12] == [f"{held / 1e6:.3f}"] * 2
    file = tmp_path / "lines.jsonl"
    first, second = map(json.loads, file.read_text().splitlines())
    assert second["held_bytes"] == held
    assert set(first["differences"].values()) == {0.0}
    assert 0 < max(second["differences"].values()) < 1e-5
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    assert first["losses"][1] < first["losses"][0]
    assert [one["kind"] for one in second["messages"]].count("all-gather") == 1

    # Lines of an earlier sweep are reused; an incomplete line is not.
    second["seconds"] = 77.7
    complete = [json.dumps(first), json.dumps(second)]
    file.write_text("\n".join([*complete, '{"cell": [']))
    done = tiny.command(*arguments)
    assert done.returncode == 0 and not done.stderr
    assert "| 77.7 |" in done.stdout
