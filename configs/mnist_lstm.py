r"""MNIST read by rows, an LSTM of 128 cells and LEGW from batch 128: LEGW's first application.

Paper: arXiv:1901.08256, Table 1: 98.7 % test accuracy for a base batch of 128, and for every batch
up to 8,192 by LEGW. The network (28 steps of 28 pixels, 128 cells, a dense layer of 128 before
them), momentum of 0.9, 25 epochs and the constant rate after the warm-up are recalled, not read in
the paper; the forget gates' bias of 1 is TensorFlow's default. The paper's base rate and warm-up
are not known. The rate was chosen here at batch 128 alone, by the held-out tenth of the training
set, one seed: 0.1, of 0.05, 0.1 and 0.2 after three epochs without that bias, and of 0.1 and 0.2
after two epochs with it. Before that 0.1, 0.2 and 0.4 were seen on the test set. The bias was tried
because without it LEGW diverged at 8,192: so it does not follow from batch 128 alone, where it is
better too (97.9 % for 97.0 %). The warm-up is the middle of what is recalled for other
applications, 0.05 to 0.2 epochs. Adam's rate is a usual one, not tuned.

  python -m lamb_tpu.train --config=configs/mnist_lstm.py --workdir=DIR
  python -m lamb_tpu.train --config=configs/mnist_lstm.py:batch=8192 --workdir=DIR
  python -m lamb_tpu.train --config=configs/mnist_lstm.py:batch=8192,rule=linear --workdir=DIR
  python -m lamb_tpu.train --config=configs/mnist_lstm.py:optimizer=adam,rule=same --workdir=DIR

The original files are downloaded, or taken from a folder: --config.data.dir=FOLDER.

Hardware: any CPU; --config.accumulation_steps=64 spares memory and time at batch 8,192.
Expected metric: 0.987, quoted from the paper; measured here, in
experiments/report/legw-mnist_lstm.md.
"""

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument

# How the learning rate of batch 128 is carried to another batch: scaling, warm-up, decay. All but
# `legw` are the paper's baselines; only `linear_poly` of them has a warm-up.
RULES = {
    "legw": ("legw", "0.1 epochs", "constant"),
    "same": ("identity", "0 epochs", "constant"),
    "linear": ("linear", "0 epochs", "constant"),
    "sqrt": ("sqrt", "0 epochs", "constant"),
    "linear_poly": ("linear", "5 epochs", "polynomial"),
}
OPTIMIZERS = {"momentum": dict(learning_rate=0.1, momentum=0.9), "adam": dict(learning_rate=0.001)}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: batch=128, rule=legw|same|linear|sqrt|linear_poly, optimizer=momentum|adam,
    smoke.
    """
    arg = parse_argument(argument, batch=128, rule="legw", optimizer="momentum", smoke=False)
    for key, known in (("rule", RULES), ("optimizer", OPTIMIZERS)):
        check_argument(key, arg[key], known)
    config = base_config()
    config.batch_size = arg.batch
    config.duration = "25 epochs"
    config.data.name = "mnist"
    config.task = ConfigDict({"name": "classification", "label_smoothing": 0.0, "input_std": 255.0})
    config.model = ConfigDict({"name": "row_lstm", "forget_bias": 1.0})
    config.optimizer = ConfigDict(
        {"name": arg.optimizer, "rules": "no_bias_no_norm", **OPTIMIZERS[arg.optimizer]}
    )
    schedule = config.schedule
    schedule.base_batch_size = 128
    schedule.scaling, schedule.warmup, schedule.decay = RULES[arg.rule]
    if arg.rule == "linear_poly":
        schedule.power = 2.0  # that of the paper's other applications, recalled
    config.eval.batch_size = 2000
    config.checkpoint.every = "1 epochs"
    if arg.smoke:
        config.data.name = "digits"
        config.task.input_std = 16.0
        config.duration = "6 epochs"
        config.eval.batch_size = 360
    return config
