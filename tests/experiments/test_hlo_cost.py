"""The reader of the TPU compiler's estimates, on a program cut down from real ones."""

import doctest
import pathlib

import pytest

from experiments.bench import hlo_cost
from experiments.bench.hlo_cost import program_cost

# A scan of 6 turns, in each of them a loop of 3, then a branch. As the compiler writes it, with
# less between: the counter of the inner loop starts at a copy of a constant of its own.
PROGRAM = (pathlib.Path(__file__).parent / "loops.hlo").read_text()


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
