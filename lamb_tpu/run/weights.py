"""Saved weights: of a run, of a BERT in Hugging Face's layout, of a network in timm's layout."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lamb_tpu import own
from lamb_tpu.data.text import saved
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading, tensors
from lamb_tpu.files.tensors import WEIGHTS
from lamb_tpu.models import bert_huggingface
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.models.bert_huggingface import CONFIG
from lamb_tpu.models.convert import NETWORKS, from_timm
from lamb_tpu.optim import parameters, schedule_free
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.position import Position
from lamb_tpu.store.workdir import Workdir

# Fields of a state that can be taken; published weights have no optimizer state.
PARTS = ("params", "model_state", "opt_state")
_OF_NETWORK = {network: name for name, network in NETWORKS.items()}


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that can be read.

    Attributes:
      folder: the workdir (with phases, that of one phase), or the published folder or file.
      step: update of the checkpoint; None for published weights.
      model: config.model of the network.
      shapes: the fields of `PARTS` that the weights have, as trees of dicts and lists of
        `jax.ShapeDtypeStruct`s.
      updates_before: see `recipe.Recipe`.
      read: function from a part of `shapes` with shardings (some keys of its dicts; dtypes may
        differ) to the arrays. Parameters that are read without the optimizer's state are those for
        evaluation, see `optim.evaluation_params`.
      unfinished: how far the run had come, if it had not ended at this checkpoint; '' if it had,
        for published weights, for a checkpoint chosen by its update, and for those of older
        versions, which do not record it.
      pixels: mean and standard deviation by which the network normalises pixels 0 ... 255, a number
        for each channel; None if unknown.
    """

    folder: pathlib.Path
    step: int | None
    model: Mapping[str, Any]
    shapes: Mapping[str, Any]
    updates_before: int
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    unfinished: str = ""
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def describe(self) -> str:
        """Returns the origin of the weights, for messages."""
        return str(self.folder) + ("" if self.step is None else f", update {self.step:,}")

    def text(self) -> tuple[Vocabulary, bool | None] | None:
        """Returns the network's vocabulary, and whether it is cased, see `saved.read`.

        Returns None if there is no vocabulary.

        Raises:
          UserError: the vocabulary is damaged.
        """
        if not (self.folder / saved.VOCABULARY).exists():
            return None
        return saved.read(self.folder)

    def bert(self) -> BertConfig | None:
        """Returns the network's config if it is a BERT, else None."""
        fields = dict(self.model)
        return BertConfig(**fields) if fields.pop("name") == "bert" else None

    def params(self) -> dict[str, Any]:
        """Returns the parameters, on this process' first device."""
        return self._on_first_device("params")["params"]

    def variables(self) -> dict[str, Any]:
        """Returns parameters and other collections, such as 'batch_stats', on the first device."""
        kept = [part for part in ("params", "model_state") if part in self.shapes]
        found = self._on_first_device(*kept)
        return {"params": found["params"], **found.get("model_state", {})}

    def _on_first_device(self, *parts: str) -> dict[str, Any]:
        place = SingleDeviceSharding(jax.local_devices()[0])
        return self.read(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                {part: self.shapes[part] for part in parts},
            )
        )


def open_weights(
    folder: str,
    key: str,
    step: int | None = None,
    report: Callable[[str], None] = print,
    network: str | None = None,
) -> Weights:
    """Opens the weights of a folder; of a run with phases, those of the last phase that has any.

    Args:
      folder: a run's workdir; a folder with config.json and model.safetensors (or shards with an
        index), of Hugging Face's transformers or of timm; or a .safetensors file alone, of timm or
        torchvision.
      key: name of the folder's flag or config key, for error messages.
      step: completed updates of the checkpoint; None for the newest that can be read.
      report: called with a sentence when a damaged checkpoint is skipped.
      network: config.model.name. A file without a config.json is assumed to be of this network.

    Raises:
      UserError: there are no weights, they are damaged, or they are of a kind that cannot be read.
    """
    workdir = Workdir(folder, key)
    path = workdir.path
    if buckets.is_remote(path):
        buckets.check(path, key)
        if (found := tensors.find(path)) is not None:
            raise UserError(
                f"{key} {path} has {found.name}, which is read from a disk only; copy the folder: "
                f"gcloud storage cp -r {path} ."
            )
        return _of_run(workdir, key, step, report)
    if not (path.is_file() or path.is_dir()):
        raise UserError(
            f"{key} is {folder!r}, which is no folder; give the workdir of a run, or a folder with "
            f"Hugging Face's or timm's {CONFIG} and {WEIGHTS}"
        )
    file = path if path.is_file() else tensors.find(path)
    if file is not None:
        if step is not None:
            raise UserError(f"{key} {path} is no run's, so it has no update {step}")
        return _of_published(path, file, key, network)
    if not workdir.has_checkpoint():
        # Perhaps the folder has a file of PyTorch's, for which there is a better message.
        for other in sorted(path.iterdir()):
            tensors.check_format(other, key)
    return _of_run(workdir, key, step, report)


def network_of(folder: str) -> tuple[str, Any] | None:
    """Reads config.model.name and `Weights.pixels` from a folder's config.json.

    Returns None if there is no config.json, or it is of a network that this package lacks.
    """
    try:
        settings = reading.read_json(buckets.parse(folder, "config.init_from") / CONFIG)
    except (OSError, UserError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    if "model.name" in settings:  # of a run
        kinds = (settings.get(f"task.input_{kind}") for kind in ("mean", "std"))
        # One number for all channels, or a list with one for each.
        pixels = tuple(tuple(found) if isinstance(found, list) else found for found in kinds)
        return settings["model.name"], None if None in pixels else pixels
    # timm's names may end with the recipe of the weights: resnet50.a1_in1k.
    name = NETWORKS.get(str(settings.get("architecture")).partition(".")[0])
    return None if name is None else (name, _pixels(settings))


def _of_published(path: pathlib.Path, file: pathlib.Path, key: str, network: str | None) -> Weights:
    """Opens published weights: a folder with the file, or the file alone."""
    tensors.check_format(file, key)
    settings: Any = {}
    if path.is_dir() and (path / CONFIG).exists():
        try:
            settings = reading.read_json(path / CONFIG)
        except ValueError as error:
            raise UserError(f"{path / CONFIG} is not JSON ({error})") from None
    name, taken = None, ""
    # `lamb_tpu.export` writes this key for a user's own network.
    model = settings.get("model") if isinstance(settings, dict) else None
    if isinstance(model, dict) and own.is_own(model.get("name")):
        return _of_own(path, file, model)
    if isinstance(settings, dict):
        name = settings.get("architecture")  # timm's word; transformers' is in the plural
    # A file alone does not say which network it is of.
    if not name and not settings and network in _OF_NETWORK:
        name = _OF_NETWORK[network]
        taken = f"; it is taken to be {name}, for config.model.name is {network!r}"
    if name:
        return _of_timm(path, file, str(name), settings, key, taken)
    if path.is_file():
        raise UserError(
            f"{key} {path} is a file, which is read for config.model.name of "
            f"{', '.join(_OF_NETWORK)}, not {network!r}; give a folder that has a {CONFIG} too"
        )
    return _of_huggingface(path)


def _of_own(path: pathlib.Path, file: pathlib.Path, model: Mapping[str, Any]) -> Weights:
    """Opens the weights of a user's own network, which `lamb_tpu.export` wrote."""

    def load() -> dict[str, Any]:
        variables = flax.traverse_util.unflatten_dict(tensors.load(file), sep="/")
        return {"params": variables.pop("params", {}), "model_state": variables}

    return Weights(path, None, model, _shapes(load()), 0, _reader(load))


def _of_timm(
    path: pathlib.Path, file: pathlib.Path, name: str, settings: Any, key: str, taken: str
) -> Weights:
    def load() -> dict[str, Any]:
        try:
            variables = from_timm(name, file)
        except UserError as error:
            raise UserError(f"{key}: {error}{taken}") from None
        return {"params": variables.pop("params"), "model_state": variables}

    shapes = _shapes(load())
    model = {"name": NETWORKS[name.partition(".")[0]]}
    return Weights(path, None, model, shapes, 0, _reader(load), pixels=_pixels(settings))


def _pixels(settings: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns `Weights.pixels` of timm's config.json."""
    preprocessing = settings.get("pretrained_cfg") or settings  # early files have it flat
    try:
        # timm normalises pixels scaled to 0 ... 1.
        mean, deviation = (
            tuple(round(255 * value, 3) for value in preprocessing[kind])
            for kind in ("mean", "std")
        )
    except (AttributeError, KeyError, TypeError):
        return None
    return mean, deviation


def _of_huggingface(folder: pathlib.Path) -> Weights:
    config, params = bert_huggingface.from_huggingface(folder)
    model, shapes = {"name": "bert", **dataclasses.asdict(config)}, _shapes({"params": params})

    def load() -> dict[str, Any]:
        return {"params": bert_huggingface.from_huggingface(folder)[1]}

    return Weights(folder, None, model, shapes, 0, _reader(load))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _reader(load: Callable[[], dict[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns `Weights.read` for a file that is loaded whole.

    It is loaded anew at each call: a cached copy would stay in memory during the whole run.
    """

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        flat = flax.traverse_util.flatten_dict(load(), sep="/")

        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            value = flat[jax.tree_util.keystr(path, simple=True, separator="/")]
            value = np.asarray(value, leaf.dtype)
            return jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index: value[index]
            )

        return jax.tree_util.tree_map_with_path(place, dict(wanted))

    return read


def _check_finite(found: Mapping[str, Any], where: str) -> None:
    """Raises UserError if a run's parameters or model state have a NaN or an infinity."""
    # An optimizer's state may use NaN as a mark.
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        {part: found[part] for part in ("params", "model_state") if part in found}
    )
    floats = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    finite = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(floats)
    wrong = [path for path, is_finite in finite.items() if not is_finite]
    if wrong:
        raise UserError(
            f"{where} has values that are not finite (NaN or infinity) in {len(wrong)} array(s): "
            f"{', '.join(wrong[:4])}; use weights from before the run diverged"
        )


def _of_run(workdir: Workdir, key: str, step: int | None, report: Callable[[str], None]) -> Weights:
    config = workdir.read_config()
    if "model.name" not in config:
        raise UserError(
            f"{key} {workdir.path} holds no run, for its config.json is of something else, and "
            f"{WEIGHTS} is not there either"
        )
    phases = sorted({name.split(".")[1] for name in config if name.startswith("phases.")})
    for number, phase in reversed(list(enumerate(phases))):
        of_phase = Workdir(workdir.path / phase, key)
        if of_phase.has_checkpoint():
            weights = _of_run(of_phase, key, step, report)
            if step is None and not weights.unfinished and phase != phases[-1]:
                left = f"its phase {phases[number + 1]} has no checkpoint yet"
                weights = dataclasses.replace(weights, unfinished=left)
            return weights
    if not workdir.has_checkpoint():
        raise UserError(f"{key} {workdir.path} has no checkpoint yet")

    def checkpoints() -> Checkpoints:
        return Checkpoints(workdir.checkpoints, 1, report, writes=False)

    with checkpoints() as there:
        found = there.latest_shapes() if step is None else (step, there.shapes(step))
        if found is None:
            raise UserError(f"{key} {workdir.path} has no checkpoint yet")
        newest, shapes = found
        position = Position.from_json(there.position(newest) if step is None else {})
    model = {
        name.removeprefix("model."): value
        for name, value in config.items()
        if name.startswith("model.")
    }
    record = workdir.read_init()

    averages = schedule_free.keeps_evaluation_params(shapes.get("opt_state"))

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        wanted, averaged = dict(wanted), averages and {"params", "opt_state"} & set(wanted)
        # Parameters alone are wanted for evaluation. A schedule-free optimizer computes these from
        # its state, which is read whole on every device: the shardings at hand are the parameters'.
        if averaged == {"params"}:
            place = next(leaf.sharding for leaf in jax.tree.leaves(wanted["params"]))
            if isinstance(place, NamedSharding):
                place = place.update(spec=PartitionSpec())
            wanted["opt_state"] = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                shapes["opt_state"],
            )
        with checkpoints() as there:
            found = there.restore_part(newest, wanted)
        if averaged == {"params"}:
            places = jax.tree.map(lambda leaf: leaf.sharding, wanted["params"])
            found["params"] = jax.jit(schedule_free.evaluation_params, out_shardings=places)(
                found.pop("opt_state"), found["params"]
            )
        _check_finite(found, f"{key} {workdir.path}, update {newest:,},")
        return found

    return Weights(
        workdir.path,
        newest,
        model,
        # A part may be empty, as the model state of a network without BatchNorm.
        {part: shapes[part] for part in PARTS if parameters.leaf_paths(shapes.get(part))},
        record["updates_before"] if record else 0,
        read,
        _unfinished(position, newest),
    )


def _unfinished(position: Position, step: int) -> str:
    total = position.total_steps
    ended = total is None or step >= total or position.end_reason
    return "" if ended else f"update {step:,} of {total:,}"
