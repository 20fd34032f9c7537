r"""Training on a folder of your images: ResNet-18 with LAMB, or fine-tuning of published weights.

  python -m lamb_tpu.train --config=configs/image_folder.py:dir=IMAGES,weights=FOLDER \
      --workdir=DIR
  python -m lamb_tpu.train --config=configs/image_folder.py:dir=IMAGES --workdir=DIR

The classes, splits and image sizes are read from the folder. IMAGES has IMAGES/train/CLASS/*.jpg and
IMAGES/val/CLASS/*.jpg (or `test` or `validation` in place of `val`); or only IMAGES/CLASS/*.jpg: a
tenth of these images is then used for evaluation instead of training
(`--config.data.options.holdout`); or a labels.tsv.
Images may be JPEG, PNG, WebP or BMP of any size, in the folder of their class or below it. They are
cropped to the network's image size or, if most images are smaller, to the size of the images, rounded
to a multiple of 32.

FOLDER, if given, has config.json and model.safetensors of a ResNet or tf_efficientnet from timm. It
may also be the workdir of a run, or a .safetensors file from torchvision, for which the network
must be given too, such as `model=resnet50`. The weights determine the network, and the mean and
standard deviation of the pixels. All parameters are trained; the output layer is new, because the
classes differ.

Source: none; this is a setting of this project. Rates are for batches of 64 images, and scale by the
square root of the batch size (momentum: linearly). The rates without weights were chosen for ResNet-18
on 20 classes of Tiny ImageNet: 0.01 for LAMB and 0.2 for momentum at batch 256 (measured here,
experiments/report/vision-tiny_imagenet.md). The rates for fine-tuning were chosen on ten of these
classes, with 60 images of each class, by the accuracy on 500 validation images, after 10 epochs at
32 pixels, with one seed. The runs started from a ResNet-18 trained on the ten other classes (accuracy
0.546), exported for timm and imported again. Rates, each followed by its accuracy:

  LAMB      0.00125 0.402   0.0025 0.476   0.005 0.518   0.01 0.508   from scratch, 0.005: 0.482
  momentum  0.01    0.464   0.02   0.466   0.05  0.458

These are single runs, with a standard error of 2.2 points each. Hardware: any; wall time and
accuracy depend on your images.
"""

import math
import pathlib
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument
from lamb_tpu.data.images.survey import Survey, survey
from lamb_tpu.models import MODULES
from lamb_tpu.run.weights import network_of

# Optimizer fields, scaling rule, and rates at 64 images, from scratch and for fine-tuning.
OPTIMIZERS: dict[str, tuple[dict[str, Any], str, float, float]] = {
    "lamb": (
        {"name": "lamb", "preset": "author", "weight_decay": 0.01, "rules": "resnet"},
        "sqrt",
        0.005,
        0.005,
    ),
    "momentum": (
        {"name": "nesterov", "momentum": 0.9, "weight_decay": 1e-4, "rules": "resnet"},
        "linear",
        0.05,
        0.02,
    ),
}
MODELS = tuple(name for name in MODULES if name.startswith(("resnet", "efficientnet")))
_BATCH = 64
_HOLDOUT = 0.1
# Pixel mean and deviation of ImageNet: weights without a config.json were trained on ImageNet.
_PIXELS = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# Arbitrary values for a missing folder; the trainer reports later that it is missing.
_ABSENT = Survey(
    train_split="train", eval_split="val", num_examples=10_000, num_classes=1000, side=256
)


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: dir (of the images), weights (to start from), model (if the weights do not name one:
    resnet18 ... resnet152, efficientnet_b0 ... b7), optimizer=lamb|momentum, batch=0 (0: 64, or
    less if an epoch would have fewer than eight updates), epochs=20, smoke.
    """
    arg = parse_argument(
        argument, dir="", weights="", model="", optimizer="lamb", batch=0, epochs=20.0, smoke=False
    )
    check_argument("optimizer", arg.optimizer, OPTIMIZERS)
    # The argument `model` takes precedence over the network that the weights' config.json names.
    named, pixels = network_of(arg.weights) or ("", None)
    name = arg.model or named or "resnet18"
    check_argument("model", name, MODELS)
    images = _ABSENT
    if arg.dir and pathlib.Path(arg.dir).expanduser().is_dir():
        images = survey(pathlib.Path(arg.dir).expanduser())
    fields, scaling, scratch, tuned = OPTIMIZERS[arg.optimizer]
    network: Any = MODULES[name]
    mean, deviation = pixels or _PIXELS

    config = base_config()
    config.batch_size = arg.batch or _batch(images.num_examples)
    config.duration = f"{arg.epochs:.12g} epochs"
    config.data.name = "image_folder"
    if arg.dir:
        config.data.dir = arg.dir
    config.data.train_split, config.data.eval_split = images.train_split, images.eval_split
    config.data.options = ConfigDict(
        {
            # A multiple of 32, because the networks halve the image five times.
            "size": min(network.image_size, max(32, 32 * round(images.side / 32))),
            "crop": "inception",
            "min_area": 0.25,
            "min_covered": 0.1,
            "resize": "bilinear",
            "flip": True,
            "central_fraction": 0.875,
            "erasing": 0.0,
            "on_bad_record": "error",
            "max_megapixels": 100.0,
            # Needed only if the folder has no split for evaluation.
            "holdout": _HOLDOUT if images.eval_split == images.train_split else 0.0,
            "num_classes": images.num_classes,
            "threads": 0,
        }
    )
    config.task = ConfigDict(
        {
            "name": "classification",
            "label_smoothing": 0.1,
            "input_mean": mean,
            "input_std": deviation,
            "mixup_alpha": 0.0,
            "cutmix_alpha": 0.0,
        }
    )
    config.model = ConfigDict({"name": name, "num_classes": images.num_classes, "dtype": "float32"})
    config.optimizer = ConfigDict({**fields, "learning_rate": tuned if arg.weights else scratch})
    if arg.weights:
        config.init_from = arg.weights
        # The classes differ, so the output layer is randomly initialised.
        config.init.new_parameters = "^output/"
    config.schedule.base_batch_size = _BATCH
    config.schedule.scaling = scaling
    config.schedule.warmup = "10 percent"
    config.schedule.decay = "polynomial"
    config.eval.batch_size = 256
    config.checkpoint.best = "accuracy"
    config.log.every = "1 epochs"
    if arg.smoke:
        _smoke(config)
    return config


def _batch(num_examples: int) -> int:
    """Returns 64, or a smaller power of two if an epoch would have fewer than eight updates."""
    return min(_BATCH, max(8, 2 ** int(math.log2(max(1, num_examples) / 8))))


def _smoke(config: ConfigDict) -> None:
    """Changes the config to ResNet-18 on 8x8 digits at batch 32."""
    config.data.name = "digits"
    config.data.train_split, config.data.eval_split = "train", "test"
    config.data.options = ConfigDict()
    config.task = ConfigDict({"name": "classification", "label_smoothing": 0.1, "input_std": 16.0})
    config.model.update({"name": "resnet18", "num_classes": 10})
    config.model.momentum = 0.8  # BatchNorm's averages must keep up with a short run
    config.batch_size = config.schedule.base_batch_size = 32
    config.duration = "40 steps"
    config.schedule.warmup = "20 percent"
    config.eval.batch_size = 360
    config.eval.every = config.checkpoint.every = "100 percent"
    config.log.every = "8 steps"
