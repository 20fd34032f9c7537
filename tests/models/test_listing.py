"""Costs of each network, compared with published numbers and with an independent count of products."""

import doctest

import pytest

from lamb_tpu import models
from lamb_tpu.models import listing
from lamb_tpu.models.costs import COSTS
from lamb_tpu.models.listing import describe
from tests.marks import some

KNOWN = {cost.name: cost for cost in COSTS}

# Published numbers of parameters. Multiply-adds are those of timm's networks, as counted by hooks on
# PyTorch's layers in tests/interchange/test_timm.py.
PUBLISHED = {
    "efficientnet_b0": (5_288_548, 385_814_752, 224),
    "efficientnet_b1": (7_794_184, 686_802_832, 240),
    "efficientnet_b2": (9_109_994, 993_561_872, 260),
    "efficientnet_b3": (12_233_232, 1_827_141_392, 300),
    "efficientnet_b4": (19_341_616, 4_393_771_024, 380),
    "efficientnet_b5": (30_389_784, 10_266_384_752, 456),
    "efficientnet_b6": (43_040_704, 19_067_593_536, 528),
    "efficientnet_b7": (66_347_960, 37_745_884_192, 600),
    "resnet18": (11_689_512, 1_814_073_344, 224),
    "resnet34": (21_797_672, 3_663_761_408, 224),
    "resnet50": (25_557_032, 4_089_184_256, 224),
    "resnet101": (44_549_160, 7_801_405_440, 224),
    "resnet152": (60_192_808, 11_513_626_624, 224),
    # By hand: five of DavidNet's convolutions cost the same as its second.
    "davidnet": (6_573_120, 32**2 * 64 * 27 + 5 * 32**2 * 128 * 576 + 5_120, 32),
}
# Billions of multiply-adds in Table 2 of arXiv:1905.11946 and Table 1 of arXiv:1512.03385, which
# call them FLOPs. The latter describes v1: the first convolution of a bottleneck has the stride.
PAPERS = {
    "efficientnet_b0": 0.39,
    "efficientnet_b1": 0.70,
    "efficientnet_b2": 1.0,
    "efficientnet_b3": 1.8,
    "efficientnet_b4": 4.2,
    "efficientnet_b5": 9.9,
    "efficientnet_b6": 19,
    "efficientnet_b7": 37,
    "resnet18": 1.8,
    "resnet34": 3.6,
    "resnet50": 3.8,
    "resnet101": 7.6,
    "resnet152": 11.3,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", some(PUBLISHED, ("efficientnet_b0", "efficientnet_b3", "resnet50"))
)
def test_published_networks(name: str) -> None:
    parameters, multiply_adds, size = PUBLISHED[name]
    assert describe(name) == KNOWN[name] == (name, parameters, multiply_adds, (size, size, 3))
    assert f"{parameters:,} parameters" in models.MODULES[name].__doc__
    if name in PAPERS:
        assert multiply_adds == pytest.approx(1e9 * PAPERS[name], rel=0.08)


def test_other_networks() -> None:
    assert list(KNOWN) == list(models.MODULES)
    described = {name: describe(name) for name in set(models.MODULES) - set(PUBLISHED)}
    assert described == {name: KNOWN[name] for name in described}
    assert set(described) == {"bert", "gnmt", "lenet", "lenet5", "lstm_lm", "mlp", "row_lstm"}
    # BERT Base with both pre-training heads, and 20 masked words.
    layer = 4 * 768**2 + 2 * 768 * 3072 + 2 * 128 * 768
    heads = 20 * (768**2 + 768 * 30522) + 768**2 + 2 * 768
    types = 128 * 2 * 768
    expected = ("bert", 110_106_428, 12 * 128 * layer + heads + types, (128,))
    assert described["bert"] == expected
    # GNMT: MLPerf's log has 160,671,297, including a second bias of 4,096 in each of nine LSTMs.
    assert described["gnmt"].parameters == 160_671_297 - 9 * 4 * 1024
    lstms = (5 * 2 + 4 * 3) * 4 * 1024**2  # five LSTMs with 1,024 inputs, four with 2,048
    rest = 2 * 1024**2 + 1024 * 32_320 + 128 * 1024
    assert described["gnmt"].multiply_adds == 128 * (lstms + rest)
    assert described["lenet"].parameters == 3_274_634
    # Two layers of 200 cells, 10,000 words, 20 steps.
    words, cells = 2 * 10_000 * 200 + 10_000, 2 * (2 * 200 * 800 + 800)
    assert described["lstm_lm"].parameters == words + cells
    assert described["lstm_lm"].multiply_adds == 20 * (2 * 2 * 200 * 800 + 200 * 10_000)
    assert described["mlp"].multiply_adds == 784 * 128 + 128 * 64 + 64 * 10
    step = 28 * 128 + (128 + 128) * 4 * 128
    biases = 128 + 4 * 128 + 10
    assert described["row_lstm"].parameters == step + biases + 128 * 10
    assert described["row_lstm"].multiply_adds == 28 * step + 128 * 10


def test_docstrings() -> None:
    assert doctest.testmod(listing) == (0, 1)
