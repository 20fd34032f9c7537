r"""MNIST with LeNet and LAMB at batch 1,024 for 30 epochs, as in the LAMB paper's appendix.

Paper: arXiv:1904.00962, appendix, MNIST/LeNet (mean of 5 runs): LAMB 0.9945, AdamW 0.9941, momentum
0.9933; recalled, not read in the paper. Learning rates, warm-up, weight decay, decay power 0.5,
clipping and the network's dropout of 0.4 are from the first author's code and logs
(github.com/fastalgo/mnist_tpu). In the public commit, the code in the folder for AdamW multiplies by
LAMB's ratio, so that folder's rate of 0.004 may not be AdamW's best. LARS is in these logs at batch
8,192 and 60,000; LARS's momentum and decay are from the authors' other code.

  python -m lamb_tpu.train --config=configs/mnist_lenet.py --workdir=DIR
  python -m lamb_tpu.train --config=configs/mnist_lenet.py:network=lenet5,optimizer=adamw \
      --workdir=DIR
  python -m lamb_tpu.train --config=configs/mnist_lenet.py:batch=4096 --workdir=DIR

The original files are downloaded, or read from --config.data.dir=FOLDER.

Expected metric, hardware and wall time: measured here, in experiments/report/lamb-mnist.md. The
rates are given for batch 1,024; `batch=` rescales them (LAMB and LARS by LEGW, momentum linearly,
SGD and AdaGrad by the square root).
"""

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument
from lamb_tpu.errors import UserError

NETWORKS = ("lenet", "lenet5")

# In the author's code, biases do not decay, and every tensor adapts.
_RULES = (("bias$", {"decay": False}), (".*", {}))

# LARS updates biases by momentum only.
_LARS_RULES = (("bias$", {"decay": False, "adapt": False}), (".*", {}))

# Optimizer fields, scaling rule, warm-up at batch 1,024, final learning rate / peak.
OPTIMIZERS = {
    "lamb": (
        dict(
            learning_rate=0.004,
            weight_decay=0.01,
            bias_correction="none",
            rules=_RULES,
            clip_global_norm=1.0,
        ),
        "legw",
        "1 epochs",
        0.0,
    ),
    "adamw": (
        dict(learning_rate=0.004, weight_decay=0.01, rules=_RULES, clip_global_norm=1.0),
        "identity",
        "1 epochs",
        0.0,
    ),
    "adam": (
        dict(learning_rate=0.004, rules=_RULES, clip_global_norm=1.0),
        "identity",
        "1 epochs",
        0.0,
    ),
    "momentum": (
        dict(learning_rate=0.08, momentum=0.9, rules=_RULES),
        "linear",
        "0 epochs",
        0.0001 / 0.08,
    ),
    # Not in the author's logs; same settings as momentum.
    "nesterov": (
        dict(learning_rate=0.08, momentum=0.9, rules=_RULES),
        "linear",
        "0 epochs",
        0.0001 / 0.08,
    ),
    # Scaled by LEGW from the author's rate 6.0 and warm-up of 16 epochs at batch 8,192.
    "lars": (
        dict(learning_rate=6.0 / 8**0.5, momentum=0.9, weight_decay=1e-4, rules=_LARS_RULES),
        "legw",
        "2 epochs",
        0.0,
    ),
    # Not in the author's logs; for studies of the batch size. SGD's rate was 0.4 at first; with that rate,
    # lenet5 stayed at chance level at batch 1,024 and above. AdaGrad's rate is PyTorch's default, 0.01,
    # scaled from batch 64 by the square root.
    "sgd": (dict(learning_rate=0.1, rules=_RULES), "sqrt", "0 epochs", 0.0),
    "adagrad": (
        dict(learning_rate=0.04, initial_accumulator_value=0.0, eps=0.0, rules=_RULES),
        "sqrt",
        "0 epochs",
        0.0,
    ),
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: network=lenet|lenet5, optimizer=lamb|adamw|adam|momentum|nesterov|lars|
    sgd|adagrad, batch=1024, smoke.
    """
    arg = parse_argument(argument, network="lenet", optimizer="lamb", batch=1024, smoke=False)
    for key, known in (("network", NETWORKS), ("optimizer", OPTIMIZERS)):
        check_argument(key, arg[key], known)
    fields, scaling, warmup, end_factor = OPTIMIZERS[arg.optimizer]
    config = base_config()
    config.batch_size = arg.batch
    config.duration = "30 epochs"
    config.data.name = "mnist"
    config.task = ConfigDict({"name": "classification", "label_smoothing": 0.0, "input_std": 255.0})
    config.model = ConfigDict({"name": arg.network})
    config.optimizer = ConfigDict({"name": arg.optimizer, **fields})
    config.schedule.base_batch_size = 1024
    config.schedule.scaling = scaling
    config.schedule.warmup = warmup
    config.schedule.decay = "polynomial"
    config.schedule.power = 0.5
    config.schedule.end_factor = end_factor
    # The decay counts from update 0, as in the author's lamb/optimization.py.
    config.schedule.decay_from = "zero"
    config.eval.batch_size = 2000
    config.checkpoint.every = "1 epochs"
    if arg.smoke:
        if arg.network != "lenet" or arg.batch != 1024:
            problem = "trains LeNet on 8x8 digits at batch 128"
            remedy = "leave network and batch out"
            raise UserError("the config's argument smoke", problem=problem, remedy=remedy)
        config.data.name = "digits"
        config.task.input_std = 16.0
        config.batch_size = 128
        config.duration = "2 epochs"
        config.eval.batch_size = 360
    return config
