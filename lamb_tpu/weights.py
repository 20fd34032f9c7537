"""Weights that lie in a folder: those of a run, or of a BERT as Hugging Face publishes it."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from lamb_tpu.checkpoint import Checkpoints
from lamb_tpu.data.text import saved
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.models import bert_huggingface
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.optim import parameters
from lamb_tpu.workdir import Workdir

# What a state has besides that can be taken from it; of Hugging Face there are the parameters.
PARTS = ("params", "model_state", "opt_state")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that can be read.

    Attributes:
      folder: the workdir, of a phase where there are several, or Hugging Face's folder.
      step: the update of the checkpoint; None for Hugging Face.
      model: config.model of the network.
      shapes: those of `PARTS` that are there, as trees of dicts and lists of
        `jax.ShapeDtypeStruct`s.
      updates_before: see `recipe.Recipe`.
      read: takes a part of `shapes` with shardings (some keys of its dicts; dtypes may differ) and
        returns the arrays.
    """

    folder: pathlib.Path
    step: int | None
    model: Mapping[str, Any]
    shapes: Mapping[str, Any]
    updates_before: int
    read: Callable[[Mapping[str, Any]], dict[str, Any]]

    def describe(self) -> str:
        """Where they are from, in a few words."""
        return str(self.folder) + ("" if self.step is None else f", update {self.step:,}")

    def text(self) -> tuple[Vocabulary, bool | None] | None:
        """The vocabulary of the network, and whether it is cased, see `saved.read`.

        None where there is no vocabulary.

        Raises:
          UserError: it is damaged.
        """
        if not (self.folder / saved.VOCABULARY).exists():
            return None
        return saved.read(self.folder)

    def bert(self) -> BertConfig | None:
        """The network's config where it is a BERT."""
        fields = dict(self.model)
        return BertConfig(**fields) if fields.pop("name") == "bert" else None

    def params(self) -> dict[str, Any]:
        """The parameters, on this process' first device."""
        place = SingleDeviceSharding(jax.local_devices()[0])
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            self.shapes["params"],
        )
        return self.read({"params": shapes})["params"]


def open_weights(
    folder: str, key: str, step: int | None = None, report: Callable[[str], None] = print
) -> Weights:
    """The weights of a folder; of a run with phases those of the last phase that has any.

    Args:
      folder: a run's workdir, or one with Hugging Face's config.json and model.safetensors.
      key: what errors call the folder.
      step: completed updates of the checkpoint; None for the newest that can be read.
      report: called with a sentence when a damaged checkpoint is passed over.

    Raises:
      UserError: there are none, or they are damaged.
    """
    workdir = Workdir(folder, key)
    if not workdir.path.is_dir():
        raise UserError(
            f"{key} is {folder!r}, which is no folder; give the workdir of a run, or a folder with "
            f"Hugging Face's {bert_huggingface.CONFIG} and {bert_huggingface.WEIGHTS}"
        )
    if (workdir.path / bert_huggingface.WEIGHTS).exists():
        if step is not None:
            raise UserError(f"{key} {workdir.path} is no run's, so it has no update {step}")
        return _of_huggingface(workdir.path)
    return _of_run(workdir, key, step, report)


def _of_huggingface(folder: pathlib.Path) -> Weights:
    config, params = bert_huggingface.from_huggingface(folder)
    model = {"name": "bert", **dataclasses.asdict(config)}
    shapes = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)}
    del params  # a run would keep them for as long as it lasts

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        _, params = bert_huggingface.from_huggingface(folder)
        flat = flax.traverse_util.flatten_dict({"params": params}, sep="/")

        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            value = flat[jax.tree_util.keystr(path, simple=True, separator="/")]
            value = np.asarray(value, leaf.dtype)
            return jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index: value[index]
            )

        return jax.tree_util.tree_map_with_path(place, dict(wanted))

    return Weights(folder, None, model, shapes, 0, read)


def _of_run(
    workdir: Workdir, key: str, step: int | None, report: Callable[[str], None]
) -> Weights:
    config = workdir.read_config()
    if "model.name" not in config:
        raise UserError(
            f"{key} {workdir.path} holds no run, for its config.json is of something else, and "
            f"{bert_huggingface.WEIGHTS} is not there either"
        )
    phases = {name.split(".")[1] for name in config if name.startswith("phases.")}
    for phase in sorted(phases, reverse=True):
        of_phase = Workdir(workdir.path / phase, key)
        if of_phase.has_checkpoint():
            return _of_run(of_phase, key, step, report)
    if not workdir.has_checkpoint():
        raise UserError(f"{key} {workdir.path} has no checkpoint yet")

    def checkpoints() -> Checkpoints:
        return Checkpoints(workdir.checkpoints, 1, report, writing=False)

    with checkpoints() as there:
        found = there.latest_shapes() if step is None else (step, there.shapes(step))
    if found is None:
        raise UserError(f"{key} {workdir.path} has no checkpoint yet")
    newest, shapes = found
    model = {
        name.removeprefix("model."): value
        for name, value in config.items()
        if name.startswith("model.")
    }
    record = workdir.read_init()

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        with checkpoints() as there:
            return there.restore_part(newest, dict(wanted))

    return Weights(
        workdir.path,
        newest,
        model,
        {part: shapes[part] for part in PARTS if parameters.leaf_paths(shapes.get(part))},
        record["updates_before"] if record else 0,
        read,
    )
