r"""CIFAR-10, DavidNet at batch 512 for 24 epochs: the LAMB paper's appendix; and larger batches.

Paper: arXiv:1904.00962, appendix, CIFAR-10/DavidNet, test accuracy: LAMB 0.9408, momentum 0.9372,
AdamW 0.9271, Adam 0.9225, Adagrad 0.9074; [recalled], not read in the paper. All quoted; of the
24 epochs 2 were run here: experiments/report/lamb-cifar10.md.

  python -m lamb_tpu.train --config=configs/cifar10.py --workdir=DIR
  python -m lamb_tpu.train --config=configs/cifar10.py:optimizer=momentum,batch=4096 --workdir=DIR
  python -m lamb_tpu.train --config=configs/cifar10.py:model=resnet18,data=cifar10_jpeg \
      --workdir=DIR --config.data.dir=FOLDER

data=cifar10 is the original archive, downloaded, or in a folder: --config.data.dir=FOLDER.
data=cifar10_jpeg is the same pictures as JPEGs of quality 75 in one file in FOLDER. That costs some
accuracy, and numbers from it should say so. Hardware: any accelerator; the paper's runs were on
TPU cores.

The network was made for momentum: github.com/davidcpage/cifar10-fast, dawn.py, has Nesterov's
momentum, a peak of 0.4 after 5 epochs, weight decay 5e-4, pictures padded by 4 and mirrored, with a
square of 8 cut out [seen]. The settings of the other optimizers are from logs and code of the LAMB
authors' search, github.com/fastalgo/davidnet-cifar [seen], where losses are summed, not averaged,
over a batch:
  lamb      their best run, 0.9409: "10.0", which their code divides by 512, weight decay 1.0,
            warm-up of 6 epochs, a triangle; no bias correction and, other than for BERT, no
            clipping; eps is divided by 512 as the gradients are.
  adamw     their best, 0.9340 after 30 epochs: "5.0", which is divided by 512, warm-up 5. They
            decay the weights by 1e-4 in each update. If the rate does not multiply that, as in
            TensorFlow, it equals 0.02 times the rates of a triangle.
  adam      adamw's rate. In the public commit, the code in their folder for Adam is LAMB's, so the
            rates in its log (0.02) are not Adam's.
  adagrad   their best, 0.9044 after 30 epochs: 0.013, constant; first accumulator 0.1 / 512^2.
  lars      not in the paper's table; 4.0 with power 2, the row of batch 512 of ResNet-50 in
            NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch [seen]; not tuned for this network.
Here no optimizer decays BatchNorm's parameters; in dawn.py they decay.

`batch=` up to 16,384 scales momentum's rate linearly, those of LAMB and LARS by the square root,
and the others not at all. The warm-up's epochs stay, because LEGW's warm-up would outlast the run.
BatchNorm's groups are 512 examples at every batch, as in dawn.py. The LAMB authors' groups were one
core's part: 64 examples on 8 cores, by one of their flags (--config.model.group_size=64). They drop
an epoch's last examples, which gives 2,328 updates instead of 2,344. The running averages decay by
0.9 for each 512 examples at every batch, so by 0.9^32 for 16,384. With 0.9 an update they would
mostly describe old weights. model=resnet18 has the same rates, not tuned for it. `epochs=` scales
the warm-up by epochs / 24. --config.model.width=16 makes DavidNet narrower, for a CPU.
"""

from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument

EPOCHS = 24
_SUM = 512  # a loss summed over the batch is this many times the mean

# Optimizer fields, scaling rule, epochs of warm-up of 24, decay and its power.
OPTIMIZERS: dict[str, tuple[dict[str, Any], str, int, str, float]] = {
    "lamb": (
        {
            "name": "lamb",
            "learning_rate": 10.0 / _SUM,
            "weight_decay": 1.0,
            "bias_correction": "none",
            "eps": 1e-6 / _SUM,
        },
        "sqrt",
        6,
        "polynomial",
        1.0,
    ),
    "momentum": (
        {"name": "nesterov", "learning_rate": 0.4, "momentum": 0.9, "weight_decay": 5e-4},
        "linear",
        5,
        "polynomial",
        1.0,
    ),
    "adamw": (
        {"name": "adamw", "learning_rate": 5.0 / _SUM, "weight_decay": 0.02},
        "identity",
        5,
        "polynomial",
        1.0,
    ),
    "adam": ({"name": "adam", "learning_rate": 5.0 / _SUM}, "identity", 5, "polynomial", 1.0),
    "adagrad": (
        {
            "name": "adagrad",
            "learning_rate": 0.013,
            "initial_accumulator_value": 0.1 / _SUM**2,
            "eps": 0.0,
        },
        "identity",
        0,
        "constant",
        1.0,
    ),
    "lars": (
        {"name": "lars", "preset": "you2017", "learning_rate": 4.0, "weight_decay": 5e-4},
        "sqrt",
        5,
        "polynomial",
        2.0,
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "davidnet": {"name": "davidnet", "width": 64},
    # ImageNet's stem, which halves the picture twice, would leave 8x8 pixels.
    "resnet18": {"name": "resnet18", "stem": "cifar", "zero_gamma": True},
}
DATA = ("cifar10", "cifar10_jpeg")


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: model=davidnet|resnet18, optimizer=lamb|momentum|adamw|adam|adagrad|lars,
    batch=512, epochs=24, data=cifar10|cifar10_jpeg, smoke.
    """
    arg = parse_argument(
        argument,
        model="davidnet",
        optimizer="lamb",
        batch=512,
        epochs=float(EPOCHS),
        data="cifar10",
        smoke=False,
    )
    for key, known in (("model", MODELS), ("optimizer", OPTIMIZERS), ("data", DATA)):
        check_argument(key, arg[key], known)
    fields, scaling, warmup_epochs, decay, power = OPTIMIZERS[arg.optimizer]
    config = base_config()
    config.batch_size = arg.batch
    config.duration = f"{arg.epochs:.12g} epochs"
    config.data.name = arg.data
    config.data.options = ConfigDict({"pad": 4, "pad_mode": "reflect", "flip": True, "cutout": 8})
    config.task = ConfigDict(
        {
            "name": "classification",
            "label_smoothing": 0.0,
            # Mean and deviation of the training pixels, 0 to 255.
            "input_mean": (125.307, 122.950, 113.865),
            "input_std": (62.993, 62.089, 66.705),
            "mixup_alpha": 0.0,
            "cutmix_alpha": 0.0,
        }
    )
    config.model = ConfigDict(
        {
            **MODELS[arg.model],
            "num_classes": 10,
            "dtype": "float32",
            # The running averages keep 0.9 of themselves for each 512 examples, whatever the batch.
            "group_size": min(512, arg.batch),
            "momentum": 0.9 ** max(1.0, arg.batch / 512),
        }
    )
    config.optimizer = ConfigDict({**fields, "rules": "no_bias_no_norm"})
    config.schedule.base_batch_size = 512
    config.schedule.scaling = scaling
    config.schedule.warmup = f"{warmup_epochs * arg.epochs / EPOCHS:.12g} epochs"
    config.schedule.decay = decay
    config.schedule.power = power
    config.eval.batch_size = 2000
    config.checkpoint.every = "4 epochs"
    if arg.smoke:
        config.data.name = "digits"
        config.data.options = ConfigDict()
        config.task = ConfigDict({"name": "classification", "input_std": 16.0})
        config.model.group_size = 16
        config.batch_size = config.schedule.base_batch_size = 32
        config.duration = "20 steps"
        config.schedule.warmup = "20 percent" if warmup_epochs else "0 epochs"
        config.eval.batch_size = 360
        config.eval.every = config.checkpoint.every = "100 percent"
        config.log.every = "4 steps"
    return config
