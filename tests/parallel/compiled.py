"""Plans of a step with several shardings, for the tests: `python -m tests.parallel.compiled`.

The command prints a JSON object. It runs in a separate process, because the process of the tests
simulates CPU devices.
"""

import json

from ml_collections import ConfigDict

from lamb_tpu.plan.making import make_plan
from tests import tiny

TOPOLOGY = "v5e-16"
GROUP_DEVICES = 2
ROWS = 8  # per device
MODEL = ConfigDict(
    {
        "name": "mlp",
        "hidden_sizes": (512, 1024),
        "batch_norm": True,
        "group_size": GROUP_DEVICES * ROWS,
    }
)
NAMED = {"parallel__backend": "shard_map"}
ZERO1 = {"parallel__optimizer_state": "zero1"}
BFLOAT16 = {"parallel__exchange__name": "bfloat16"}
PLACES = {
    "jit": {},
    "shard_map": NAMED,
    "bfloat16": NAMED | BFLOAT16,
    "zero1": NAMED | ZERO1,
    "zero1 bfloat16": NAMED | ZERO1 | BFLOAT16,
    "inner zero1": NAMED | ZERO1 | {"mesh__fsdp": 4},
    "accumulated": NAMED | {"accumulation_steps": 4, "model__group_size": ROWS // 4},
}


def main() -> None:
    actual = {}
    for name, changes in PLACES.items():
        config = tiny.digits(model=MODEL, batch_size=16 * ROWS, **changes)
        actual[name] = make_plan(config, TOPOLOGY).as_json()
    print(json.dumps(actual))


if __name__ == "__main__":
    main()
