"""Rules for the next batch size, by the names that they have in a config."""

from lamb_tpu.batching.rules.augmented import Augmented
from lamb_tpu.batching.rules.base import Rule
from lamb_tpu.batching.rules.constant import Constant
from lamb_tpu.batching.rules.inner_product_test import InnerProductTest
from lamb_tpu.batching.rules.noise_scale import NoiseScale
from lamb_tpu.batching.rules.norm_test import NormTest
from lamb_tpu.batching.rules.ramp import Ramp
from lamb_tpu.batching.rules.simigrad import SimiGrad

RULES: dict[str, type[Rule]] = {
    "constant": Constant,
    "ramp": Ramp,
    "simigrad": SimiGrad,
    "norm_test": NormTest,
    "inner_product_test": InnerProductTest,
    "augmented": Augmented,
    "noise_scale": NoiseScale,
}
