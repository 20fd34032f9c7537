"""Writes a run's network as a folder that other libraries read.

  python -m lamb_tpu.export --workdir=DIR --output=FOLDER

FOLDER receives config.json and model.safetensors. Hugging Face's transformers reads the folder of a
BERT, which also has vocab.txt and tokenizer_config.json if the run was on text. timm reads the
folder of a ResNet (as resnet18 ... resnet152) or EfficientNet (as tf_efficientnet_b0 ... b7):

  timm.create_model('local-dir:FOLDER', pretrained=True)

A network of your own, config.model.name='my_package.my_module:Name', is written with its fields in
config.json and its arrays by their paths, such as params/output/kernel; config.init_from reads it.

The weights are those of the newest readable checkpoint, or of --step; averages are not exported.
If the run has not ended, --unfinished exports its newest checkpoint.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_string("output", None, "Folder to write.")
    flags.DEFINE_integer("step", None, "Completed updates of the checkpoint; default the newest.")
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

from lamb_tpu import models, own
from lamb_tpu.data.images.crops import tpu_fraction
from lamb_tpu.data.text import saved
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.models.bert_huggingface import to_huggingface, write_folder
from lamb_tpu.models.convert import NETWORKS, to_timm
from lamb_tpu.run.weights import Weights, open_weights
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.tasks.classification import Classification

# Fields that change how a network is trained but not what it computes in evaluation.
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
    """Writes the folder; returns a sentence about what was written and where.

    Args:
      workdir: folder of a run with one of these networks. Of several phases the last one with a
        checkpoint is exported.
      output: folder to write; it must be missing or empty.
      step: completed updates of the checkpoint; None for the newest.
      unfinished: without `step`, whether a run that has not ended may be exported.

    Raises:
      UserError: there is no such checkpoint; the run has not ended; the other library does not
        have the network, such as a BERT with a combination of heads that transformers lacks; or the
        folder is not empty.
    """
    weights = open_weights(os.fspath(workdir), "--workdir", step)
    if weights.unfinished and not unfinished:
        raise UserError(
            f"--workdir {weights.describe()}, is of a run that has not ended "
            f"({weights.unfinished}); finish it first, or give --unfinished, or choose a "
            "checkpoint with --step"
        )
    folder = buckets.local(output, "--output").absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; give a folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--output {folder} holds something already; give a new or empty folder")
    # This package's names of networks -> timm's.
    theirs = {ours: name for name, ours in NETWORKS.items()}
    with writing.checked(folder, "--output"):
        if weights.model["name"] == "bert":
            _bert(weights, folder)
        elif weights.model["name"] in theirs:
            _of_timm(weights, theirs[weights.model["name"]], folder)
        elif own.is_own(weights.model["name"]):
            _own(weights, folder)
        else:
            raise UserError(
                f"--workdir {weights.folder} has the model {weights.model['name']!r}; those that "
                f"can be written are bert, {', '.join(theirs)}, and your own"
            )
    left = f"; the run has not ended ({weights.unfinished})" if weights.unfinished else ""
    return f"{weights.describe()} is written to {folder}{left}"


def _bert(weights: Weights, folder: pathlib.Path) -> None:
    config, text = weights.bert(), weights.text()
    assert config is not None  # the network is a BERT
    to_huggingface(config, weights.params(), folder)
    if text is not None:
        vocabulary, cased = text
        vocabulary.write(folder / saved.VOCABULARY)
        # transformers lower-cases text unless it is told not to.
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _of_timm(weights: Weights, name: str, folder: pathlib.Path) -> None:
    module = models.MODULES[NETWORKS[name]]
    for field, value in weights.model.items():
        # A field that is not of training makes it another network than timm's. Values are compared
        # as JSON, because config.json has lists where the module has tuples.
        default = getattr(module, field, None)
        if field not in _OF_TRAINING and json.dumps(value) != json.dumps(default):
            raise UserError(
                f"--workdir {weights.folder} has config.model.{field}={value!r}; timm's {name} is "
                f"this network with {default!r}, so it cannot be written"
            )
    try:
        tensors = to_timm(name, weights.variables())
    except UserError as error:
        raise UserError(f"--workdir {weights.folder} cannot be written: {error}") from None
    # config.model may leave num_classes to its default, so the weights are asked.
    classes = len(tensors["fc.bias" if name.startswith("resnet") else "classifier.bias"])
    settings = {"architecture": name, "num_classes": classes}
    settings["pretrained_cfg"] = {"num_classes": classes, **_preprocessing(weights)}
    write_folder(folder, settings, tensors)


def _own(weights: Weights, folder: pathlib.Path) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights.variables())
    tensors = {
        # safetensors has no bfloat16 for NumPy; what is read back takes the parameter's dtype.
        # safetensors takes contiguous arrays only, hence order='C'.
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(
            leaf, np.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype, order="C"
        )
        for path, leaf in leaves
    }
    write_folder(folder, {"model": dict(weights.model)}, tensors)


def _preprocessing(weights: Weights) -> dict[str, Any]:
    """Returns the preprocessing of pictures in the form that timm's `resolve_data_config` reads."""
    config: Mapping[str, Any] = {}
    # Published weights have no run's config.json beside them.
    if weights.step is not None:
        config = Workdir(weights.folder).read_config()
    mean, deviation = weights.pixels or (
        config.get(f"task.{field}", getattr(Classification, field))
        for field in ("input_mean", "input_std")
    )
    # timm scales pixels to 0 ... 1 first.
    found: dict[str, Any] = {
        kind: (np.broadcast_to(value, 3) / 255).tolist()
        for kind, value in (("mean", mean), ("std", deviation))
    }
    size = config.get("data.options.size")
    if size is not None:
        found["input_size"] = [3, size, size]
        found["interpolation"] = config.get("data.options.resize", "bilinear")
        fraction = config.get("data.options.central_fraction", 0.875)
        # A fraction of 0 stands for that of the TPU code.
        found["crop_pct"] = fraction or tpu_fraction(size)
    return found


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    print(export(values.workdir, values.output, values.step, values.unfinished))


if __name__ == "__main__":
    cli.run_main(main, required=("workdir", "output"))
