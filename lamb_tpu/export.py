"""Writes a run's network as a folder that other libraries can read.

  python -m lamb_tpu.export --workdir=DIR --output=FOLDER

FOLDER receives config.json and model.safetensors. Hugging Face's transformers can read the folder
of a BERT, which also has vocab.txt and tokenizer_config.json if the run trained on text. timm can read
the folder of a ResNet (as resnet18 ... resnet152) or EfficientNet (as tf_efficientnet_b0 ... b7):

  timm.create_model('local-dir:FOLDER', pretrained=True)

For a custom network (config.model.name='my_package.my_module:Name'), config.json has the network's
fields, and the arrays are named by their paths, such as params/output/kernel. config.init_from can
read the folder.

The weights come from the newest readable checkpoint, or from --step. Averages of weights are not
exported. If the run has not ended, --unfinished exports its newest checkpoint.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_string("output", None, "Folder to write.")
    flags.DEFINE_integer("step", None, "Checkpoint: its completed updates; default: the newest.")
    flags.DEFINE_bool("unfinished", False, "Export a run that has not ended.")
    cli.answer_help()

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu import custom, models
from lamb_tpu.data.images.crops import tpu_fraction
from lamb_tpu.data.text import saved
from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.models.bert_huggingface import to_huggingface, write_folder
from lamb_tpu.models.convert import NETWORKS, to_timm
from lamb_tpu.run.weights import Weights, open_weights
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.tasks.classification import Classification

# Fields that affect the training of a network but not its output in evaluation.
_OF_TRAINING = (
    "name",
    "num_classes",
    "dtype",
    "group_size",
    "momentum",
    "zero_gamma",
    "dropout_rate",
    "stochastic_depth_rate",
)


def export(
    workdir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    step: int | None = None,
    unfinished: bool = False,
) -> str:
    """Writes the folder; returns a sentence that names the weights and the folder.

    Args:
      workdir: folder of a run. If the run has phases, exports the last phase with a checkpoint.
      output: folder to write; it must be missing or empty.
      step: completed updates of the checkpoint; None for the newest.
      unfinished: whether a run that has not ended may be exported; ignored if `step` is given.

    Raises:
      UserError: the checkpoint does not exist; the run has not ended; transformers or timm has no such
        network, for example a BERT with other heads; or `output` is not empty.
    """
    weights = open_weights(os.fspath(workdir), "--workdir", step)
    if weights.unfinished and not unfinished:
        raise UserError(
            f"--workdir {weights.describe()},",
            problem=f"is a run that has not ended ({weights.unfinished})",
            remedy="finish it first, or give --unfinished, or choose a checkpoint with --step",
        )
    folder = buckets.local(output, "--output").absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder}", ABSENT, "is a file", "give a folder")
    if folder.exists() and any(folder.iterdir()):
        remedy = "give a new or empty folder"
        raise UserError(f"--output {folder}", ABSENT, "is not empty", remedy)
    writing.check_folder(folder, "--output")
    # Maps this package's names of networks to timm's.
    theirs = {ours: name for name, ours in NETWORKS.items()}
    with writing.checked(folder, "--output"), writing.complete_folder(folder) as scratch:
        if weights.model["name"] == "bert":
            _bert(weights, scratch)
        elif weights.model["name"] in theirs:
            _of_timm(weights, theirs[weights.model["name"]], scratch)
        elif custom.is_custom(weights.model["name"]):
            _custom(weights, scratch)
        else:
            problem = f"has the model {weights.model['name']!r}, which cannot be exported"
            remedy = f"use bert, {', '.join(theirs)} or a custom model"
            raise UserError(f"--workdir {weights.folder}", ABSENT, problem, remedy)
    left = f"; the run has not ended ({weights.unfinished})" if weights.unfinished else ""
    return f"{weights.describe()} is written to {folder}{left}"


def _bert(weights: Weights, folder: pathlib.Path) -> None:
    config, text = weights.bert(), weights.text()
    assert config is not None  # the network is a BERT
    to_huggingface(config, weights.params(), folder)
    if text is not None:
        vocabulary, cased = text
        vocabulary.write(folder / saved.VOCABULARY)
        # By default, transformers lower-cases text.
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased}
        described = json.dumps(settings, indent=2) + "\n"
        writing.replace(folder / "tokenizer_config.json", described, "--output")


def _of_timm(weights: Weights, name: str, folder: pathlib.Path) -> None:
    module = models.MODULES[NETWORKS[name]]
    for field, value in weights.model.items():
        # Any other field makes the network differ from timm's. Compare values as JSON, because
        # config.json has lists in place of the module's tuples.
        default = getattr(module, field, None)
        if field not in _OF_TRAINING and json.dumps(value) != json.dumps(default):
            raise UserError(
                f"--workdir {weights.folder}: config.model.{field}",
                value,
                f"differs from timm's {name}",
                f"export a run with {default!r}",
            )
    try:
        tensors = to_timm(name, weights.variables())
    except UserError as error:
        raise error.at(f"--workdir {weights.folder}") from None
    # config.model may leave num_classes at its default, so count the classes in the weights.
    classes = len(tensors["fc.bias" if name.startswith("resnet") else "classifier.bias"])
    settings = {"architecture": name, "num_classes": classes}
    settings["pretrained_cfg"] = {"num_classes": classes, **_preprocessing(weights)}
    write_folder(folder, settings, tensors)


def _custom(weights: Weights, folder: pathlib.Path) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights.variables())
    tensors = {
        # safetensors has no bfloat16 for NumPy, so write float32; reading restores the parameter's
        # dtype. safetensors accepts only contiguous arrays, hence order="C".
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(
            leaf, np.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype, order="C"
        )
        for path, leaf in leaves
    }
    write_folder(folder, {"model": dict(weights.model)}, tensors)


def _preprocessing(weights: Weights) -> dict[str, Any]:
    """Returns the preprocessing of images in the form that timm's `resolve_data_config` reads."""
    config: Mapping[str, Any] = {}
    # Published weights have no config.json of a run.
    if weights.step is not None:
        config = Workdir(weights.folder).read_config()
    mean, deviation = weights.pixels or (
        config.get(f"task.{field}", getattr(Classification, field))
        for field in ("input_mean", "input_std")
    )
    # In timm, pixels are first scaled to 0 ... 1.
    settings: dict[str, Any] = {
        kind: (np.broadcast_to(value, 3) / 255).tolist()
        for kind, value in (("mean", mean), ("std", deviation))
    }
    size = config.get("data.options.size")
    if size is not None:
        settings["input_size"] = [3, size, size]
        settings["interpolation"] = config.get("data.options.resize", "bilinear")
        fraction = config.get("data.options.central_fraction", 0.875)
        # 0 means the fraction in Google's TPU code, which depends on the size.
        settings["crop_pct"] = fraction or tpu_fraction(size)
    return settings


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    print(export(values.workdir, values.output, values.step, values.unfinished))


if __name__ == "__main__":
    cli.run_main(main, required=("workdir", "output"))
