"""Rules for the next batch size, and their names in a config."""

from lamb_tpu.batching.rules.base import Bounded, Constant, Rule
from lamb_tpu.batching.rules.noise_scale import NoiseScale
from lamb_tpu.batching.rules.ramp import Ramp
from lamb_tpu.batching.rules.simigrad import SimiGrad
from lamb_tpu.batching.rules.variance_tests import Augmented, InnerProductTest, NormTest
from lamb_tpu.components import Field, Registry, fields_of


def _fields(rule: type[Rule]) -> dict[str, Field]:
    if rule is Constant:
        return {}
    # The config has no key `granularity`: it is config.batch_size / config.accumulation_steps.
    return fields_of(rule, ("granularity",)) | {"scaling": Field(str, "identity")}


RULES = Registry(
    "batch rule",
    {
        "constant": Constant,
        "ramp": Ramp,
        "simigrad": SimiGrad,
        "norm_test": NormTest,
        "inner_product_test": InnerProductTest,
        "augmented": Augmented,
        "noise_scale": NoiseScale,
    },
    section="batch_rule",
    default_name="constant",
    fields=_fields,
)

__all__ = [
    "RULES",
    "Augmented",
    "Bounded",
    "Constant",
    "InnerProductTest",
    "NoiseScale",
    "NormTest",
    "Ramp",
    "Rule",
    "SimiGrad",
]
