"""A stored table of every network's costs, so that `python -m lamb_tpu.models` is fast.

`listing.describe` counts the costs by tracing a network, which takes a second or more. A test
compares the table with these counts.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu import terminal


class Description(NamedTuple):
    """The costs of a network with its default fields.

    The multiply-adds are those of the forward pass of one input, in convolutions and dense layers
    (for BERT and GNMT also in attention). Pixels of padding are included. `multiply_adds` is half of
    `flops.matrix_flops`.
    """

    name: str
    parameters: int  # without BatchNorm's running averages
    multiply_adds: int
    input_shape: tuple[int, ...]  # (height, width, channels) of an image, or (tokens,)


# In the order of `models.MODULES`.
COSTS = (
    Description("bert", 110_106_428, 11_655_028_224, (128,)),
    Description("davidnet", 6_573_120, 379_261_952, (32, 32, 3)),
    Description("efficientnet_b0", 5_288_548, 385_814_752, (224, 224, 3)),
    Description("efficientnet_b1", 7_794_184, 686_802_832, (240, 240, 3)),
    Description("efficientnet_b2", 9_109_994, 993_561_872, (260, 260, 3)),
    Description("efficientnet_b3", 12_233_232, 1_827_141_392, (300, 300, 3)),
    Description("efficientnet_b4", 19_341_616, 4_393_771_024, (380, 380, 3)),
    Description("efficientnet_b5", 30_389_784, 10_266_384_752, (456, 456, 3)),
    Description("efficientnet_b6", 43_040_704, 19_067_593_536, (528, 528, 3)),
    Description("efficientnet_b7", 66_347_960, 37_745_884_192, (600, 600, 3)),
    Description("gnmt", 160_634_433, 16_332_619_776, (128,)),
    Description("lenet", 3_274_634, 13_883_904, (28, 28, 1)),
    Description("lenet5", 61_706, 416_520, (28, 28, 1)),
    Description("lstm_lm", 4_651_600, 52_800_000, (20,)),
    Description("mlp", 109_386, 109_184, (28, 28, 1)),
    Description("resnet18", 11_689_512, 1_814_073_344, (224, 224, 3)),
    Description("resnet34", 21_797_672, 3_663_761_408, (224, 224, 3)),
    Description("resnet50", 25_557_032, 4_089_184_256, (224, 224, 3)),
    Description("resnet101", 44_549_160, 7_801_405_440, (224, 224, 3)),
    Description("resnet152", 60_192_808, 11_513_626_624, (224, 224, 3)),
    Description("row_lstm", 136_586, 3_771_648, (28, 28, 1)),
)


def table(descriptions: Sequence[Description]) -> str:
    """Formats the costs as a table with one line per network.

    >>> print(table(COSTS[12:13]))
    model   parameters  multiply-adds  input
    lenet5      61,706        416,520  28 x 28 x 1
    """
    rows = [("model", "parameters", "multiply-adds", "input")]
    for name, parameters, multiply_adds, shape in descriptions:
        size = " x ".join(map(str, shape)) if len(shape) > 1 else f"{shape[0]} tokens"
        rows.append((name, f"{parameters:,}", f"{multiply_adds:,}", size))
    return textwrap.dedent(terminal.columns(rows, right=(1, 2)))
