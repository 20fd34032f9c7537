"""Bytes that a device sends in one run of a compiled program, by dtype."""

import collections
from typing import Any

from lamb_tpu.cost import traffic


def wire_bytes(compiled: Any) -> dict[str, int]:
    """Returns the bytes that one device sends, by HLO's name of the dtype: f32, bf16, u8, s32.

    With n devices, an all-reduce sends 2 (n - 1) / n times the bytes of its operand, an all-to-all or
    reduce-scatter (n - 1) / n times, and an all-gather n - 1 times, see
    `traffic.Collective.sent_bytes`.

    >>> wire_bytes('''HloModule f, num_partitions=4
    ... ENTRY %main (x: u8[8]) -> u8[32] {
    ...   %x = u8[8]{0} parameter(0)
    ...   ROOT %y = u8[32]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
    ... }''')
    {'u8': 24}

    Args:
      compiled: `jit(f).lower(...).compile()`, or its text.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    actual: collections.Counter[str] = collections.Counter()
    for one in traffic.collectives(text):
        # An operation may have arrays of several dtypes, for example a combined all-reduce.
        for dtype in {array.dtype for array in one.arrays}:
            arrays = tuple(array for array in one.arrays if array.dtype == dtype)
            actual[dtype] += one.count * one._replace(arrays=arrays).sent_bytes
    return dict(actual)
