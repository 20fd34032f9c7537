"""A small dense network on UCI's handwritten digits (bundled: 1,437 training scans of 8x8 pixels).

The setting of `make demo`: each optimizer has one base setting at batch 32, which a rule scales to
larger batches without tuning. LAMB uses LEGW, which scales the rate by the square root and
the warm-up epochs linearly (arXiv:1904.00962, 1901.08256). The rates of momentum, Nesterov's momentum
and LARS scale linearly, with 5 epochs of warm-up (arXiv:1706.02677, 1708.03888). AdamW's rate is not
scaled.

  python -m lamb_tpu.train --config=configs/digits.py:optimizer=lamb,batch=512 --workdir=DIR

Hardware: any CPU. Wall time: seconds. Expected metric: the table that `make demo` prints (measured
here, in experiments/report/demo-scaling.md). Source: none; this is a study of this project.
"""

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument

# Optimizer fields, scaling rule, and warm-up at batch 32. LEGW's warm-up at that batch is a tenth of an
# epoch, the same fraction of the run as in the LAMB paper (0.3125 of 90 epochs for ResNet-50).
# The rates were chosen at batch 32 only; see experiments/report/demo-base_rates.md.
OPTIMIZERS = {
    "lamb": (dict(learning_rate=0.01, weight_decay=0.01), "legw", "0.1 epochs"),
    "adamw": (dict(learning_rate=0.008, weight_decay=0.01), "identity", "0.1 epochs"),
    "momentum": (dict(learning_rate=0.16, momentum=0.9), "linear", "5 epochs"),
    "nesterov": (dict(learning_rate=0.08, momentum=0.9), "linear", "5 epochs"),
    "lars": (dict(learning_rate=1.0, momentum=0.9, weight_decay=1e-4), "linear", "5 epochs"),
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: optimizer=lamb|adamw|momentum|nesterov|lars, batch=32, epochs=30.0, smoke."""
    arg = parse_argument(argument, optimizer="lamb", batch=32, epochs=30.0, smoke=False)
    check_argument("optimizer", arg.optimizer, OPTIMIZERS)
    fields, scaling, warmup = OPTIMIZERS[arg.optimizer]
    config = base_config()
    config.batch_size = arg.batch
    config.duration = f"{2.0 if arg.smoke else arg.epochs} epochs"
    # Pixel values are 0 to 16.
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
