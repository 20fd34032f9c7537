"""Tests that kernels in the compiled HLO text are classified and traced to source lines."""

import pathlib

from lamb_tpu.cost import operations as operations_lib
from lamb_tpu.cost.hlo import Program
from lamb_tpu.cost.operations import REST, by_kind, operations

HEAD = f"""HloModule f, is_scheduled=true

FileNames
1 "{pathlib.Path(operations_lib.__file__).parents[1] / "models" / "bert.py"}"
2 "/x/lib/python3.11/site-packages/flax/linen/linear.py"
3 "/elsewhere/run.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=62 end_line=62 column=41 end_column=41}}
2 {{file_name_id=2 function_name_id=1 line=7 end_line=7 column=3 end_column=3}}
3 {{file_name_id=3 function_name_id=1 line=5 end_line=5 column=3 end_column=3}}

StackFrames
1 {{file_location_id=3 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=2}}
3 {{file_location_id=2 parent_frame_id=3}}
4 {{file_location_id=2 parent_frame_id=1}}
"""


def fused(name: str, *opcodes: str) -> str:
    lines = "".join(f"  %{name}{n} = f32[8] {op}(%p)\n" for n, op in enumerate(opcodes))
    return (
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n{lines}"
        f"  ROOT %r = f32[8] bitcast(%p)\n}}\n"
    )


def kernel(name: str, calls: str, cycles: int, metadata: str = "") -> str:
    return (
        f"  %{name} = f32[8] fusion(%x), calls=%{calls}, metadata={{{metadata}}}, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}\n'
    )


def program() -> Program:
    return Program(
        HEAD
        + fused("product", "convolution", "add", "reduce")
        + fused("moved", "copy", "convert")
        + fused("mixed", "copy", "add")
        + fused("drawn", "rng-bit-generator")
        + "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n"
        + kernel(
            "a",
            "product",
            50,
            'op_name="jit(train_step)/shard_map/jvp(N)/dot_general" stack_frame_id=3',
        )
        + kernel("b", "moved", 20, "stack_frame_id=2")
        + kernel("c", "mixed", 30, "stack_frame_id=4")
        + kernel("d", "drawn", 20)
        + '  ROOT %e = f32[8] reduce(%x), backend_config={"estimated_cycles":"1"}\n}\n'
    )


def test_kernels_by_their_cost() -> None:
    actual = operations(program())
    assert [(each.name, each.kind, each.cycles, each.times) for each in actual] == [
        ("a", "matrix products and convolutions", 50, 1),
        ("c", REST, 30, 1),
        ("b", "copies and layouts", 20, 1),
        ("d", "random bits", 20, 1),
        ("e", "reductions", 1, 1),
    ]
    assert by_kind(actual) == {
        "matrix products and convolutions": 50,
        REST: 30,
        "copies and layouts": 20,
        "random bits": 20,
        "reductions": 1,
    }


def test_source_lines() -> None:
    sources = {each.name: (each.operation, each.source) for each in operations(program())}
    assert sources == {
        # A frame in a library is replaced by its caller.
        "a": ("jvp(N)/dot_general", "lamb_tpu/models/bert.py:62"),
        "b": ("", "lamb_tpu/models/bert.py:62"),
        # No caller is known, so the line of the library remains.
        "c": ("", "flax/linen/linear.py:7"),
        "d": ("", ""),
        "e": ("", ""),
    }
