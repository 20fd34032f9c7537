r"""CIFAR-10 with DavidNet at batch 512 for 24 epochs, as in the LAMB paper, or at larger batches.

Paper: arXiv:1904.00962, appendix, CIFAR-10/DavidNet, test accuracy: LAMB 0.9408, momentum 0.9372,
AdamW 0.9271, Adam 0.9225, Adagrad 0.9074. These accuracies are quoted from memory, not read in the
paper; only 2 of the 24 epochs were run here: experiments/report/lamb-cifar10.md. [seen] means read
in code, logs or a README.

  python -m lamb_tpu.train --config=configs/cifar10.py --workdir=DIR
  python -m lamb_tpu.train --config=configs/cifar10.py:optimizer=momentum,batch=4096 --workdir=DIR
  python -m lamb_tpu.train --config=configs/cifar10.py:model=resnet18,data=cifar10_jpeg \
      --workdir=DIR --config.data.dir=FOLDER

data=cifar10 is the original archive, which is downloaded or read from --config.data.dir=FOLDER.
data=cifar10_jpeg has the same images as JPEGs of quality 75 in one file in FOLDER. The compression
costs some accuracy, so mention the JPEGs beside results with these images. Hardware: any accelerator; the
paper's runs used TPU cores.

The network was designed for momentum: github.com/davidcpage/cifar10-fast, dawn.py, uses Nesterov's
momentum, a peak of 0.4 after 5 epochs, weight decay 5e-4, images padded by 4 and mirrored, and a
cut-out square of 8 pixels [seen]. The settings of the other optimizers are from logs and code of the
LAMB authors' search, github.com/fastalgo/davidnet-cifar [seen], where losses are summed, not
averaged, over a batch:
  lamb      Their best run, 0.9409: a rate of "10.0", which their code divides by 512, weight decay
            1.0, 6 epochs of warm-up, then linear decay; no bias correction and, unlike for BERT, no
            clipping; eps is divided by 512, as the gradients are.
  adamw     Their best run, 0.9340 after 30 epochs: a rate of "5.0", which is divided by 512, and 5
            epochs of warm-up. They decay the weights by 1e-4 in each update. If the rate does not
            multiply the decay, as in TensorFlow, this equals a decay of 0.02 times the rate,
            averaged over the run.
  adam      The rate of adamw. In the public commit, the code in their folder for Adam is LAMB's, so
            the rate of 0.02 in that folder's log is not Adam's.
  adagrad   Their best run, 0.9044 after 30 epochs: a constant rate of 0.013; the accumulator starts
            at 0.1 / 512^2.
  lars      Not in the paper's table. The rate of 4.0 and the power of 2 are those of ResNet-50 at
            batch 512 in NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch [seen]; not tuned for this network.
In this recipe, no optimizer decays BatchNorm's parameters; in dawn.py these parameters decay.

`batch=` (meant for at most 16,384) scales the rate of momentum linearly and the rates of LAMB and
LARS by the square root; the other rates do not change. The warm-up has the same number of epochs at
every batch size, because LEGW's warm-up would outlast the run. BatchNorm's groups are 512 examples at
every batch size, as in dawn.py. The LAMB authors' groups were the examples of one TPU core: in one of
their settings, 64 examples on each of 8 cores (--config.model.group_size=64). These authors drop the
last examples of an epoch, so their runs have 2,328 updates instead of 2,344. The running averages
decay by 0.9 per 512 examples at every batch size, and therefore by 0.9^32 per update of 16,384: with
0.9 per update, the averages would mostly reflect old weights. model=resnet18 uses the same rates,
which were not tuned for it. `epochs=` scales the warm-up by epochs / 24. --config.model.width=16
makes DavidNet narrower, for a CPU.
"""

from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument

EPOCHS = 24
_SUM = 512  # ratio of a loss summed over the batch to the mean loss

# Optimizer fields, scaling rule, epochs of warm-up (out of 24), decay, and the power of the decay.
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
    # ImageNet's stem, which halves the image twice, would leave 8x8 pixels.
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
            # Mean and standard deviation of the training pixels by channel, from 0 to 255.
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
            # The running averages decay by 0.9 per 512 examples, whatever the batch size.
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
