"""UCI handwritten digits (embedded, 1,437 training scans of 8x8), a small dense network, LAMB.

The setting of `make demo`: one base setting for each optimizer at batch 32, carried to larger
batches by a rule and not tuned again. LAMB scales by LEGW (square-root learning rate, linear-epoch
warm-up; arXiv:1904.00962, 1901.08256), momentum linearly (arXiv:1706.02677), AdamW not at all.

  python -m lamb_tpu.train --config=configs/digits.py:optimizer=lamb,batch=512 --workdir=DIR

Hardware: any CPU. Wall time: seconds. Expected metric: the table that `make demo` prints (measured
here; see README.md). Source: none, a study of this project.
"""

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, parse_argument
from lamb_tpu.errors import UserError

# Optimizer fields, scaling rule and warm-up at batch 32.
OPTIMIZERS = {
    "lamb": (dict(learning_rate=0.01, weight_decay=0.01), "legw", "0.5 epochs"),
    "adamw": (dict(learning_rate=0.002, weight_decay=0.01), "identity", "0.5 epochs"),
    "momentum": (dict(learning_rate=0.02, momentum=0.9), "linear", "0.5 epochs"),
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: optimizer=lamb|adamw|momentum, batch=32, epochs=30.0, smoke."""
    arg = parse_argument(argument, optimizer="lamb", batch=32, epochs=30.0, smoke=False)
    if arg.optimizer not in OPTIMIZERS:
        raise UserError(
            f"the config's argument optimizer={arg.optimizer!r} is unknown; "
            f"known: {', '.join(OPTIMIZERS)}"
        )
    fields, scaling, warmup = OPTIMIZERS[arg.optimizer]
    config = base_config()
    config.batch_size = arg.batch
    config.duration = f"{2.0 if arg.smoke else arg.epochs} epochs"
    config.task = ConfigDict({"name": "classification", "label_smoothing": 0.0, "input_std": 16.0})
    config.model = ConfigDict({"name": "mlp", "hidden_sizes": (128, 64)})
    config.optimizer = ConfigDict({"name": arg.optimizer, "rules": "no_bias_no_norm", **fields})
    config.schedule.base_batch_size = 32
    config.schedule.scaling = scaling
    config.schedule.warmup = warmup
    config.schedule.decay = "polynomial"
    config.eval.batch_size = 360
    config.checkpoint.every = "100 percent"
    config.log.every = "1 epochs"
    return config
