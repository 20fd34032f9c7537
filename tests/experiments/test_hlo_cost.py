"""The reader of the TPU compiler's estimates, on a program cut down from real ones."""

import doctest

import pytest

from experiments.bench import hlo_cost
from experiments.bench.hlo_cost import program_cost

# A scan of 6 turns, in each of them a loop of 3, then a branch. As the compiler writes it, with
# less between: the counter of the inner loop starts at a copy of a constant of its own.
PROGRAM = """HloModule jit_f, is_scheduled=true

%region_2 (a.3: f32[], b.4: f32[]) -> f32[] {
  %a.3 = f32[]{:T(256)} parameter(0)
  %b.4 = f32[]{:T(256)} parameter(1)
  ROOT %add.1 = f32[]{:T(256)} add(%a.3, %b.4), backend_config={"estimated_cycles":"7"}
}

%fused_computation.2 (p.1: f32[512,512]) -> f32[512,512] {
  %p.1 = f32[512,512]{1,0:T(8,128)} parameter(0)
  ROOT %tanh.1 = f32[512,512]{1,0:T(8,128)} tanh(%p.1), backend_config={"estimated_cycles":"9"}
}

%inner_body (t.1: (s32[], f32[512,512], s32[])) -> (s32[], f32[512,512], s32[]) {
  %t.1 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}, s32[]{:T(256)}) parameter(0)
  %get-tuple-element.1 = f32[512,512]{1,0:T(8,128)} get-tuple-element(%t.1), index=1
  %fusion.1 = f32[512,512]{1,0:T(8,128)} fusion(%get-tuple-element.1), kind=kOutput, calls=%fused_computation.2, backend_config={"window_config":{"kernel_window_bounds":["64","4"],"estimated_cycles":"1000","iteration_bounds":["1","4","1"]}}
  %get-tuple-element.2 = s32[]{:T(256)} get-tuple-element(%t.1), index=2
  %constant.2 = s32[]{:T(256)} constant(1)
  %add.2 = s32[]{:T(256)} add(%get-tuple-element.2, %constant.2), control-predecessors={%fusion.1}, backend_config={"flag_configs":[]}
  %get-tuple-element.3 = s32[]{:T(256)} get-tuple-element(%t.1), index=0
  ROOT %tuple.1 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}, s32[]{:T(256)}) tuple(%get-tuple-element.3, %fusion.1, %add.2)
}

%inner_condition (t.2: (s32[], f32[512,512], s32[])) -> pred[] {
  %constant.3 = s32[]{:T(256)} constant(5), metadata={op_name="jit(f)/while"}
  %t.2 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}, s32[]{:T(256)}) parameter(0)
  %get-tuple-element.4 = s32[]{:T(256)} get-tuple-element(%t.2), index=2
  ROOT %lt.1 = pred[]{:T(1024)} compare(%get-tuple-element.4, %constant.3), direction=LT
}

%outer_body (t.3: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %t.3 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}) parameter(0)
  %get-tuple-element.5 = s32[]{:T(256)} get-tuple-element(%t.3), index=0
  %get-tuple-element.6 = f32[512,512]{1,0:T(8,128)} get-tuple-element(%t.3), index=1
  %constant.4 = s32[]{:T(256)} constant(2)
  %copy.1 = s32[]{:T(256)} copy(%constant.4), backend_config={"flag_configs":[]}
  %tuple.2 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}, s32[]{:T(256)}) tuple(%get-tuple-element.5, %get-tuple-element.6, %copy.1)
  %while.1 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}, s32[]{:T(256)}) while(%tuple.2), condition=%inner_condition, body=%inner_body, metadata={op_name="jit(f)/while"}
  %get-tuple-element.7 = f32[512,512]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
  %copy.2 = f32[512,512]{1,0:T(8,128)} copy(%get-tuple-element.7), backend_config={"window_config":{"estimated_cycles":"20"}}
  %constant.5 = s32[]{:T(256)} constant(1)
  %add.3 = s32[]{:T(256)} add(%get-tuple-element.5, %constant.5)
  ROOT %tuple.3 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}) tuple(%add.3, %copy.2)
}

%outer_condition (t.4: (s32[], f32[512,512])) -> pred[] {
  %constant.6 = s32[]{:T(256)} constant(6)
  %t.4 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}) parameter(0)
  %get-tuple-element.8 = s32[]{:T(256)} get-tuple-element(%t.4), index=0
  ROOT %lt.2 = pred[]{:T(1024)} compare(%get-tuple-element.8, %constant.6), direction=LT, backend_config={"estimated_cycles":"3"}
}

%branch_0 (t.5: f32[512,512]) -> f32[512,512] {
  %t.5 = f32[512,512]{1,0:T(8,128)} parameter(0)
  ROOT %fusion.2 = f32[512,512]{1,0:T(8,128)} fusion(%t.5), calls=%fused_computation.2, backend_config={"estimated_cycles":"400"}
}

%branch_1 (t.6: f32[512,512]) -> f32[512,512] {
  %t.6 = f32[512,512]{1,0:T(8,128)} parameter(0)
  ROOT %copy.3 = f32[512,512]{1,0:T(8,128)} copy(%t.6), backend_config={"estimated_cycles":"20"}
}

ENTRY %main.17 (x.1: f32[512,512]) -> f32[512,512] {
  %x.1 = f32[512,512]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %constant.7 = s32[]{:T(256)} constant(0)
  %constant.8 = f32[]{:T(256)} constant(-0.5)
  %tuple.4 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}) tuple(%constant.7, %x.1)
  %while.2 = (s32[]{:T(256)}, f32[512,512]{1,0:T(8,128)}) while(%tuple.4), condition=%outer_condition, body=%outer_body
  %get-tuple-element.9 = f32[512,512]{1,0:T(8,128)} get-tuple-element(%while.2), index=1
  %reduce.1 = f32[]{:T(256)} reduce(%get-tuple-element.9, %constant.8), dimensions={0,1}, to_apply=%region_2, backend_config={"window_config":{"estimated_cycles":"50000"}}
  %convert.1 = s32[]{:T(256)} convert(%reduce.1)
  ROOT %conditional.1 = f32[512,512]{1,0:T(8,128)} conditional(%convert.1, %get-tuple-element.9, %get-tuple-element.9), branch_computations={%branch_0, %branch_1}
}
"""  # noqa: E501


def test_loops_branches_and_nothing_inside_a_fusion():
    # The inner loop goes from 2 to 5: 3 turns. The outer one has 6, the branch that counts is 0.
    turn = 3 * 1000 + 20 + 3
    assert program_cost(PROGRAM) == (6 * turn + 50_000 + 400, 6 * 3 + 1)


def test_trip_count_that_the_compiler_wrote():
    known = PROGRAM.replace(
        "body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"2"}}'
    )
    assert program_cost(known).cycles == 2 * (3 * 1000 + 20 + 3) + 50_000 + 400


@pytest.mark.parametrize("found, put", [
    ("constant(6)", "parameter(1)"),  # a limit that is known at run time only
    ("%get-tuple-element.8, %constant.6), direction=LT", "%a, %b), direction=EQ"),
    ("add(%get-tuple-element.5", "multiply(%get-tuple-element.5"),
])
def test_loop_of_unknown_length(found, put):
    assert found in PROGRAM
    with pytest.raises(ValueError, match="the loop %while.2 does not tell how often it runs"):
        program_cost(PROGRAM.replace(found, put))


def test_not_hlo():
    with pytest.raises(ValueError, match="no entry computation"):
        program_cost("module @jit_f { }")


def test_docstring():
    assert doctest.testmod(hlo_cost) == (0, 1)
