"""Tests the parser of optimized HLO with a shortened real program, and with programs compiled here."""

import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from lamb_tpu.cost.hlo import Array, program_cost, program_flops

pytestmark = pytest.mark.optimized

# A scan of 6 iterations, each with a loop of 3 iterations and then a conditional. It is shortened
# compiler output: the counter of the inner loop starts at a copy of a separate constant.
PROGRAM = (pathlib.Path(__file__).parent / "hlo" / "loops.hlo").read_text()


def test_loops_branches_and_nothing_inside_a_fusion() -> None:
    # The inner loop has 3 iterations, from 2 to 5, and the outer loop has 6; branch 0 is the largest.
    turn = 3 * 1000 + 20 + 3
    assert program_cost(PROGRAM) == (6 * turn + 50_000 + 400, 6 * 3 + 1)


def test_trip_count_that_the_compiler_wrote() -> None:
    known = PROGRAM.replace(
        "body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"2"}}'
    )
    assert program_cost(known).cycles == 2 * (3 * 1000 + 20 + 3) + 50_000 + 400


def test_a_loop_that_may_end_before_counts_in_full() -> None:
    """All iterations count if the loop's condition is 'counter < limit' combined with another condition."""
    [line] = [
        line
        for line in PROGRAM.splitlines()
        if "direction=LT" in line and "ROOT" in line and "%get-tuple-element.8, %constant.6" in line
    ]
    name = line.split("=")[0].split()[-1]
    demanding = PROGRAM.replace(
        line,
        "\n".join(
            [
                line.replace("ROOT ", "").replace(name, "%counted"),
                "  %goes_on = pred[] compare(%get-tuple-element.8, %get-tuple-element.8), direction=GT",
                f"  ROOT {name} = pred[] and(%goes_on, %counted)",
            ]
        ),
    )
    assert program_cost(demanding) == program_cost(PROGRAM)


UNKNOWN = [
    ("constant(6)", "parameter(1)"),  # a limit that is known only at run time
    ("%get-tuple-element.8, %constant.6), direction=LT", "%a, %b), direction=EQ"),
    ("add(%get-tuple-element.5", "multiply(%get-tuple-element.5"),
]


@pytest.mark.parametrize("text, replacement", UNKNOWN)
def test_loop_of_unknown_length(text: str, replacement: str) -> None:
    assert text in PROGRAM
    program = PROGRAM.replace(text, replacement)
    with pytest.raises(ValueError, match="the loop %while.2 has an unknown number of iterations"):
        program_cost(program)
    assert program_flops(program) == 0  # the loop has no product


@pytest.mark.parametrize("reader", [program_cost, program_flops])
def test_not_hlo(reader: Callable) -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        reader("module @jit_f { }")


@pytest.mark.parametrize(
    "dtype, num_bytes",
    [("f32", 24), ("bf16", 12), ("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("c64", 48)],
)
def test_bytes_of_an_array(dtype: str, num_bytes: int) -> None:
    assert Array(dtype, (2, 3)).num_bytes == num_bytes


def flops_of(function: Callable, *shapes: tuple[int, ...]) -> int:
    """Returns the FLOPs of a compiled program: the gradient of the sum of the function's squared results."""

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(function(*arrays) ** 2)

    gradient = jax.grad(loss, argnums=tuple(range(len(shapes))))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_flops(jax.jit(gradient).lower(*arguments).compile().as_text())


def test_flops_of_products_in_a_loop() -> None:
    def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    # One product forward and two backward, in each of 5 layers.
    assert flops_of(layers, (7, 16), (5, 16, 16)) == 3 * 5 * 2 * 7 * 16 * 16


def test_flops_of_a_batch_of_products() -> None:
    products = flops_of(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (4, 5, 6), (4, 6, 7))
    assert products == 3 * 2 * 4 * 5 * 6 * 7


@pytest.mark.parametrize(
    "stride, padding, places",
    [
        # `places`: number of products along each axis that use an input value, not padding.
        (1, "VALID", 6 * 3),
        (1, "SAME", 8 * 3 - 2),
        (2, "VALID", 3 * 3),
        (2, "SAME", 4 * 3 - 1),
    ],
)
def test_flops_of_convolutions(stride: int, padding: str, places: int) -> None:
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    forward = 2 * 2 * 5 * 4 * places**2
    assert flops_of(convolve, (2, 8, 8, 5), (3, 3, 5, 4)) == 3 * forward


@pytest.mark.parametrize(
    "line, expected",
    [
        # 8 products of (16, 32) and (32, 64), as a convolution with 7 zeros between the positions.
        (
            "f32[8,16,64]{2,1,0:T(8,128)} convolution(%x, %y), window={size=8 stride=7 lhs_dilate=8}, "
            "dim_labels=0bf_0io->0bf",
            2 * 8 * 16 * 32 * 64,
        ),
        # A depthwise convolution of 3 x 3 over 16 x 16, and its kernel's gradient.
        (
            "f32[8,14,14,128]{3,0,2,1:T(8,128)} convolution(%image, %kernel), window={size=3x3}, "
            "dim_labels=b01f_01io->b01f, feature_group_count=128",
            2 * 8 * 128 * (14 * 3) ** 2,
        ),
        (
            "f32[3,3,1,128]{3,2,1,0:T(2,128)} convolution(%image, %output), window={size=14x14}, "
            "dim_labels=f01b_i01o->01bf, batch_group_count=128",
            2 * 8 * 128 * (14 * 3) ** 2,
        ),
    ],
)
def test_tpu_compiler_output(line: str, expected: int) -> None:
    text = f"""
ENTRY %main (x: f32[8,16,32], y: f32[8,32,64]) -> f32[] {{
  %x = f32[8,16,32]{{2,1,0:T(8,128)}} parameter(0)
  %y = f32[8,32,64]{{2,1,0:T(8,128)}} parameter(1)
  %image = f32[8,16,16,128]{{3,0,2,1:T(8,128)}} parameter(2)
  %kernel = f32[3,3,1,128]{{3,2,1,0:T(2,128)}} parameter(3)
  %output = f32[8,14,14,128]{{3,0,2,1:T(8,128)}} parameter(4)
  ROOT %c = {line}
}}
"""
    assert program_flops(text) == expected
