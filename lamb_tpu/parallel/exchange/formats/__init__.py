"""Number formats of few bits: casts, codes, packed words, and sums that round after each addition.

`Format(exponent_bits, mantissa_bits)` names a format. `cast` rounds float32 values to it, `encode`
and `decode` go between its values and integer codes, `pack` and `unpack` between codes and dense
words. Everything works on whole arrays with integer operations, and under jit.
"""

from lamb_tpu.parallel.exchange.formats.casting import cast
from lamb_tpu.parallel.exchange.formats.codes import decode, encode, group_size, pack, unpack
from lamb_tpu.parallel.exchange.formats.format import E2M1FN, E3M0, E4M3, E4M3FN, E5M2, Format
from lamb_tpu.parallel.exchange.formats.sums import kahan_sum, matmul, sequential_sum

__all__ = [
    "E2M1FN",
    "E3M0",
    "E4M3",
    "E4M3FN",
    "E5M2",
    "Format",
    "cast",
    "decode",
    "encode",
    "group_size",
    "kahan_sum",
    "matmul",
    "pack",
    "sequential_sum",
    "unpack",
]
