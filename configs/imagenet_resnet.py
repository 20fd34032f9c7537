r"""ImageNet with ResNet v1.5: untuned LAMB from 512 to 32K, LARS as on TPUs, and momentum.

Papers: LAMB, arXiv:1904.00962, appendix (untuned LAMB for ResNet-50, 90 epochs); LARS,
arXiv:1708.03888, with the table of rates in tensorflow/tpu's ResNet and with entries to MLPerf;
momentum, arXiv:1706.02677. The papers' numbers are quoted below. The recipes were not run here,
because ImageNet is not available. [seen] means read in code, logs or a README; [recalled] means from
memory.

Top-1 by batch, ResNet-50:
            512    1K     2K     4K     8K     16K    32K    64K
  lamb      0.7696 0.7706 0.7692 0.7689 ?      0.7666 0.7642        the paper's [recalled, unsure]
  lamb                           0.7714 0.7731 0.7691 0.7671        NUS-HPC-AI-Lab/pytorch-lamb
                                                                    [seen]
  lamb, recipe=author                                 0.7634        fastalgo/imagenet_resnet50_lamb,
                                                                    its log [seen]
  lars, recipe=mlperf*                                0.759  0.759  the target of MLPerf, reached
                                                                    [seen]
  momentum                              0.763 at 256 and at 8K      [recalled]

  python -m lamb_tpu.train --config=configs/imagenet_resnet.py --workdir=DIR
  python -m lamb_tpu.train --config=configs/imagenet_resnet.py:optimizer=lars,recipe=mlperf \
      --workdir=DIR
  python -m lamb_tpu.train --config=configs/imagenet_resnet.py:optimizer=momentum,batch=8192 \
      --workdir=DIR
  python -m lamb_tpu.train --config=configs/imagenet_resnet.py:size=18,batch=512 --workdir=DIR \
      --config.data.name=image_folder --config.data.dir=IMAGENET --config.data.eval_split=val

TFDS's imagenet2012, prepared once, is read from --config.data.prepared_dir. image_folder is a folder
of photographs by class. Hardware and wall time of the sources: recipe=author ran on 256 cores of TPU
v3; mlperf reached 0.759 at 32K on 1,024 cores in 2.27 minutes, and at 64K on 8,192 cores in 0.48
minutes (JAX: 0.47) [seen: computed from the logs].

Recipes (`optimizer=` and `recipe=`; the first is the default):
  lamb      untuned: a rate of 0.04 at 32,768, scaled by the square root of the batch size; 20 epochs
            of warm-up at 32,768, and the same number of updates at other batch sizes (0.3125 epochs
            at 512); linear decay.
            The rates and warm-up for 4K to 32K are [seen], for smaller batches [recalled]. The
            weight decay is 1.5, there is no bias correction, gradients are clipped to 1, and
            BatchNorm is excluded, as in the authors' code [seen].
            author: the authors' run at 32,768, update for update: the rule of `untuned`, with
            durations rounded to whole updates as in that run.
  lars      tpu: the table LARS_TPU [seen]. In that code neither the loss nor the optimizer has an
            L2 term, so the weights do not decay: weight_decay only enters the ratio.
            mlperf: Google's entries in TensorFlow, v0.6 at 32,768 and v0.7 at 65,536;
            mlperf_jax: v0.7 in JAX at 65,536. Rates, warm-up, momentum and updates are [seen] in
            logs; that weights decay in the TensorFlow entries is [recalled]. The JAX entry warms up
            for 33 of its epochs of 19.75 updates (train.py rounds the updates of four epochs up to
            79). These 651.75 updates are 33.34 passes over the 1,281,167 images.
  momentum  goyal: a rate of 0.1 at batch 256, scaled linearly with the batch size, with a warm-up
            from 0.1 over 5 epochs; the rate is multiplied by 0.1 at epochs 30, 60 and 80 [recalled,
            sure]. Labels are not smoothed.

Crops are resized by TensorFlow 1's bicubic filter, and crops that cover less than a tenth of an
image are drawn again, as in tensorflow/tpu's resnet_preprocessing.py [seen]. MLPerf v0.6 did the same
[seen], and so did the LAMB authors' run, judging by its file names; MLPerf v0.7 in JAX uses
TensorFlow 2's bicubic filter [seen]. With optimizer=momentum, small crops are not drawn again, as in
fb.resnet.torch's transforms.lua [seen], which also uses a bicubic filter.
`--config.data.options.resize=bilinear` reads photographs in 0.6 of the time.

Set the batch size with the argument `batch`: --config.batch_size also rescales lamb and momentum, but
does not select another row for lars. BatchNorm's groups are 128 examples for lamb, which are one
device's examples in the runs of the table's second row [seen]; 32 for momentum [recalled] and lars; and 64
for lars at 65,536 (model_bn_span in the logs [seen]).
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument


class Row(NamedTuple):
    """The settings of a LARS run."""

    learning_rate: float
    warmup: str
    duration: str
    end_rate: float
    group_size: int
    optimizer: dict[str, Any]


_TPU = {"name": "lars", "preset": "unscaled", "weight_decay": 1e-4}
# tensorflow/tpu, models/official/resnet/lars_util.py: upper bound of the batch, peak, warm-up epochs.
LARS_TPU = ((16_384, 10.0, 5), (32_768, 25.0, 5), (65_536, 32.0, 14), (float("inf"), 35.6, 40))
# mlcommons/training_results_v0.6 and v0.7, Google/results/*/resnet. The logs have the warm-up in
# epochs, and the length of the decay: 2,007, 1,133 and 1,166.25 updates, one more than the run has after
# its warm-up.
MLPERF = {
    ("mlperf", 32_768): Row(
        learning_rate=31.2,
        warmup="977 steps",
        duration="2983 steps",
        end_rate=1e-4,
        group_size=32,
        optimizer={**_TPU, "l2_in_loss": False, "eps": 1e-5},
    ),
    ("mlperf", 65_536): Row(
        learning_rate=24.699,
        warmup="606 steps",
        duration="1738 steps",
        end_rate=1e-4,
        group_size=64,
        optimizer={**_TPU, "l2_in_loss": False, "momentum": 0.951807},
    ),
    ("mlperf_jax", 65_536): Row(
        learning_rate=23.080977304670448,
        warmup="651.75 steps",
        duration="1817 steps",
        end_rate=1e-4,
        group_size=64,
        optimizer={
            "name": "lars",
            "preset": "you2017",
            "weight_decay": 1e-4,
            "momentum": 0.9537213777059405,
        },
    ),
}
RECIPES = {
    "lamb": ("untuned", "author"),
    "lars": ("tpu", "mlperf", "mlperf_jax"),
    "momentum": ("goyal",),
}
SIZES = (18, 34, 50, 101, 152)


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: size=50 (18 | 34 | 50 | 101 | 152), optimizer=lamb|lars|momentum, recipe (of the
    optimizer; see above), batch=32768, smoke.
    """
    arg = parse_argument(argument, size=50, optimizer="lamb", recipe="", batch=32_768, smoke=False)
    check_argument("size", arg.size, SIZES)
    check_argument("optimizer", arg.optimizer, RECIPES)
    recipe = arg.recipe or RECIPES[arg.optimizer][0]
    check_argument("recipe", recipe, RECIPES[arg.optimizer])
    config = base_config()
    config.batch_size = arg.batch
    config.duration = "90 epochs"
    config.data.name = "imagenet2012"
    config.data.train_split, config.data.eval_split = "train", "validation"
    config.data.options = ConfigDict(
        {
            "size": 224,
            "crop": "inception",
            "min_covered": 0.1,
            "resize": "bicubic",
            "flip": True,
            "central_fraction": 0.875,
            "erasing": 0.0,
            "on_bad_record": "error",
            "max_megapixels": 100.0,
            "num_classes": 0,
            "threads": 0,
        }
    )
    config.task = ConfigDict(
        {
            "name": "classification",
            "label_smoothing": 0.1,
            # torchvision's mean and deviation of ImageNet's pixels by channel, 0 to 255.
            "input_mean": (123.675, 116.28, 103.53),
            "input_std": (58.395, 57.12, 57.375),
            "mixup_alpha": 0.0,
            "cutmix_alpha": 0.0,
        }
    )
    config.model = ConfigDict(
        {
            "name": f"resnet{arg.size}",
            "num_classes": 1000,
            "stem": "imagenet",
            "zero_gamma": True,
            "dtype": "bfloat16",
            "group_size": 32,
        }
    )
    config.schedule.decay = "polynomial"
    # Rates are for this batch, unless an optimizer below scales them.
    config.schedule.base_batch_size = arg.batch
    config.parallel.backend = "shard_map"
    config.eval.batch_size = 1024
    config.eval.every = "4 epochs"
    config.checkpoint.every = "4 epochs"
    config.log.every = "20 steps"

    if arg.optimizer == "lamb":
        _lamb(config, recipe)
    elif arg.optimizer == "lars":
        _lars(config, recipe)
    else:
        _momentum(config)
    if arg.smoke:
        _smoke(config)
    return config


def _lamb(config: ConfigDict, recipe: str) -> None:
    config.optimizer = ConfigDict(
        {
            "name": "lamb",
            "preset": "author",
            "learning_rate": 0.04,
            "weight_decay": 1.5,
            "rules": "resnet",
        }
    )
    config.model.group_size = 128
    config.schedule.base_batch_size = 32_768
    config.schedule.scaling = "legw"
    config.schedule.warmup = "20 epochs"
    if recipe == "author":
        check_argument("batch", config.batch_size, (32_768,))
        # 90 and 20 epochs of 1,281,167 images, rounded to updates of 32,768.
        config.duration = "3519 steps"
        config.schedule.scaling = "identity"
        config.schedule.warmup = "782 steps"


def _lars(config: ConfigDict, recipe: str) -> None:
    if recipe == "tpu":
        rate, epochs = next(row[1:] for row in LARS_TPU if config.batch_size < row[0])
        # tf.train.polynomial_decay ends at 1e-4 by default.
        row = Row(
            learning_rate=rate,
            warmup=f"{epochs} epochs",
            duration=config.duration,
            end_rate=1e-4,
            group_size=32,
            optimizer=_TPU,
        )
    else:
        known = [batch for name, batch in MLPERF if name == recipe]
        check_argument("batch", config.batch_size, known)
        row = MLPERF[recipe, config.batch_size]
    config.optimizer = ConfigDict(
        {**row.optimizer, "learning_rate": row.learning_rate, "rules": "no_bias_no_norm"}
    )
    config.duration = row.duration
    config.model.group_size = row.group_size
    config.schedule.warmup = row.warmup
    config.schedule.power = 2.0
    config.schedule.end_factor = row.end_rate / row.learning_rate


def _momentum(config: ConfigDict) -> None:
    config.optimizer = ConfigDict(
        {
            "name": "nesterov",
            "learning_rate": 0.1,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "rules": "resnet",
        }
    )
    config.task.label_smoothing = 0.0
    config.data.options.min_covered = 0.0
    config.schedule.base_batch_size = 256
    config.schedule.scaling = "linear"
    config.schedule.warmup = "5 epochs"
    # The warm-up starts at 0.1, the rate of batch 256, whatever the peak.
    config.schedule.start_factor = min(1.0, 256 / config.batch_size)
    config.schedule.decay = "step"
    config.schedule.decay_from = "zero"
    config.schedule.decay_factor = 0.1
    config.schedule.boundaries = "30 epochs, 60 epochs, 80 epochs"


def _smoke(config: ConfigDict) -> None:
    """Changes the config to ResNet-18 on 8x8 digits at batch 32, in float32."""
    config.data.name = "digits"
    config.data.eval_split = "test"
    config.data.options = ConfigDict()
    config.task = ConfigDict(
        {
            "name": "classification",
            "label_smoothing": config.task.label_smoothing,
            "input_std": 16.0,
        }
    )
    config.model.update(
        {"name": "resnet18", "num_classes": 10, "dtype": "float32", "group_size": 32}
    )
    config.model.momentum = 0.8  # BatchNorm's averages must keep up with a short run
    config.batch_size = config.schedule.base_batch_size = 32
    config.duration = "40 steps"
    config.schedule.warmup = "20 percent"
    config.schedule.start_factor = 0.0
    if config.schedule.decay == "step":
        config.schedule.boundaries = "60 percent, 80 percent"
    config.eval.batch_size = 360
    config.eval.every = config.checkpoint.every = "100 percent"
    config.log.every = "8 steps"
