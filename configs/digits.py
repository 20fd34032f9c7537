"""UCI handwritten digits (embedded, 1,437 training scans of 8x8), a small dense network, LAMB.

The setting of `make demo`: one base setting for each optimizer at batch 32, carried to larger
batches by a rule and not tuned again. LAMB scales by LEGW (square-root learning rate, linear-epoch
warm-up; arXiv:1904.00962, 1901.08256), momentum, Nesterov's and LARS linearly with 5 epochs of
warm-up (arXiv:1706.02677, 1708.03888), AdamW not at all.

  python -m lamb_tpu.train --config=configs/digits.py:optimizer=lamb,batch=512 --workdir=DIR

Hardware: any CPU. Wall time: seconds. Expected metric: the table that `make demo` prints (measured
here, in experiments/report/demo-scaling.md). Source: none, a study of this project.
"""

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument

# Optimizer fields, scaling rule, and the warm-up at batch 32. LEGW's warm-up at that batch is the
# same share of the run as in the LAMB paper (0.3125 of 90 epochs, for ResNet-50): a tenth of an
# epoch. The rates were chosen at batch 32 alone, as experiments/report/demo-base_rates.md says.
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
    # The scans have the values 0 to 16.
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
