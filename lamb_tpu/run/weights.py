"""Saved weights: of a run, of a BERT in Hugging Face's layout, or of a network in timm's layout."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lamb_tpu import custom
from lamb_tpu.data.text import saved
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import ABSENT, UserError, listed, unreadable
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
from lamb_tpu.types import PyTree

# Fields of a state that can be loaded; published weights have no optimizer state.
PARTS = ("params", "model_state", "opt_state")
_OF_NETWORK = {network: name for name, network in NETWORKS.items()}


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that can be read.

    Attributes:
      folder: the workdir (that of one phase, if there are phases), or the published folder or file.
      step: update of the checkpoint; None for published weights.
      model: config.model of the network.
      shapes: the fields of `PARTS` that the weights have, as trees of `jax.ShapeDtypeStruct`s.
      updates_before: see `recipe.Recipe`.
      read: function from a subtree of `shapes` with shardings (dtypes may differ) to the arrays. If
        the subtree has parameters but no optimizer state, the function returns the parameters for
        evaluation, see `optim.evaluation_params`.
      unfinished: progress of a run that had not ended at this checkpoint; '' if it had ended, for
        published weights, for a checkpoint chosen by its update, and for checkpoints of older
        versions, which do not record the progress.
      pixels: mean and standard deviation with which the network normalises pixels 0 ... 255, one
        number per channel; None if unknown.
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
        """Returns the vocabulary and whether it is cased (`saved.read`); None if there is none."""
        if not (self.folder / saved.VOCABULARY).exists():
            return None
        return saved.read(self.folder)

    def bert(self) -> BertConfig | None:
        """Returns the network's config if it is a BERT, else None."""
        fields = dict(self.model)
        return BertConfig(**fields) if fields.pop("name") == "bert" else None

    def params(self) -> dict[str, Any]:
        """Returns the parameters on this process's first device."""
        return self._on_first_device("params")["params"]

    def variables(self) -> dict[str, Any]:
        """Returns parameters and other collections, such as 'batch_stats', on the first device."""
        parts = [part for part in ("params", "model_state") if part in self.shapes]
        arrays = self._on_first_device(*parts)
        return {"params": arrays["params"], **arrays.get("model_state", {})}

    def _on_first_device(self, *parts: str) -> dict[str, Any]:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        return self.read(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                {part: self.shapes[part] for part in parts},
            )
        )


def by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, such as 'params/output/bias'."""
    return dict(zip(parameters.leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def open_weights(
    folder: str,
    key: str,
    step: int | None = None,
    report: Callable[[str], None] = print,
    network: str | None = None,
) -> Weights:
    """Opens the weights of a folder; of a run with phases, the last phase that has a checkpoint.

    Args:
      folder: a run's workdir; a folder in the format of Hugging Face's transformers or timm, with
        config.json and model.safetensors (or shards with an index); or a .safetensors file from
        timm or torchvision.
      key: name of the folder's flag or config key, for error messages.
      step: completed updates of the checkpoint; None: the newest checkpoint that can be read.
      report: called with a sentence when a damaged checkpoint is skipped.
      network: config.model.name, which is assumed for a file without a config.json.

    Raises:
      UserError: there are no weights, they are damaged, or they have an unsupported format.
    """
    workdir = Workdir(folder, key)
    path = workdir.path
    if buckets.is_remote(path):
        buckets.check(path, key)
        if (file := tensors.find(path)) is not None:
            problem = f"has {file.name}, which can only be read from a local disk"
            remedy = f"copy the folder: gcloud storage cp -r {path} ."
            raise UserError(f"{key} {path}", ABSENT, problem, remedy)
        return _of_run(workdir, key, step, report)
    if not (path.is_file() or path.is_dir()):
        remedy = (
            f"give the workdir of a run, or a folder with Hugging Face's or timm's {CONFIG} and "
            f"{WEIGHTS}"
        )
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UserError(key, folder, problem, remedy)
    file = path if path.is_file() else tensors.find(path)
    if file is not None:
        if step is not None:
            problem = f"is not the workdir of a run and has no update {step}"
            raise UserError(f"{key} {path}", ABSENT, problem, "leave out the update")
        return _of_published(path, file, key, network)
    if not workdir.has_checkpoint():
        # If the folder has a PyTorch file, this raises a better message.
        for other in sorted(path.iterdir()):
            tensors.check_format(other, key)
    return _of_run(workdir, key, step, report)


def network_of(folder: str) -> tuple[str, Any] | None:
    """Reads config.model.name and `Weights.pixels` from a folder's config.json.

    Returns None if there is no config.json, or if this package lacks the network that it names.
    """
    try:
        settings = reading.read_json(buckets.parse(folder, "config.init_from") / CONFIG)
    except (OSError, UserError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    if "model.name" in settings:  # the config of a run
        types = (settings.get(f"task.input_{kind}") for kind in ("mean", "std"))
        # One number for all channels, or a list with a number for each.
        pixels = tuple(tuple(value) if isinstance(value, list) else value for value in types)
        return settings["model.name"], None if None in pixels else pixels
    # Names in timm may end with the recipe of the weights: resnet50.a1_in1k.
    name = NETWORKS.get(str(settings.get("architecture")).partition(".")[0])
    return None if name is None else (name, _pixels(settings))


def _of_published(path: pathlib.Path, file: pathlib.Path, key: str, network: str | None) -> Weights:
    tensors.check_format(file, key)
    settings: Any = {}
    if path.is_dir() and (path / CONFIG).exists():
        try:
            settings = reading.read_json(path / CONFIG)
        except ValueError as error:
            raise unreadable(path / CONFIG, error, "restore it", "is not JSON") from None
    name, taken = None, ""
    # `lamb_tpu.export` writes this key for a custom network.
    model = settings.get("model") if isinstance(settings, dict) else None
    if isinstance(model, dict) and custom.is_custom(model.get("name")):
        return _of_custom(path, file, model)
    if isinstance(settings, dict):
        name = settings.get("architecture")  # used by timm; transformers has 'architectures'
    # A file alone does not name its network.
    if not name and not settings and network in _OF_NETWORK:
        name = _OF_NETWORK[network]
        taken = f"; the file is read as {name}, because of config.model.name={network!r}"
    if name:
        return _of_timm(path, file, str(name), settings, key, taken)
    if path.is_file():
        needs = f", which config.model.name={network!r} needs" if network else ""
        problem = f"is a file without a {CONFIG}{needs}"
        remedy = f"give a folder with both files, or use the model {listed(_OF_NETWORK)}"
        raise UserError(f"{key} {path}", ABSENT, problem, remedy)
    return _of_huggingface(path)


def _of_custom(path: pathlib.Path, file: pathlib.Path, model: Mapping[str, Any]) -> Weights:
    def load() -> dict[str, Any]:
        variables = flax.traverse_util.unflatten_dict(tensors.load(file), sep="/")
        return {"params": variables.pop("params", {}), "model_state": variables}

    return _published(path, model, load(), load)


def _of_timm(
    path: pathlib.Path, file: pathlib.Path, name: str, settings: Any, key: str, taken: str
) -> Weights:
    def load() -> dict[str, Any]:
        try:
            variables = from_timm(name, file)
        except UserError as error:
            key_, value, problem, remedy = error.at(key).args
            raise UserError(key_, value, problem, f"{remedy}{taken}") from None
        return {"params": variables.pop("params"), "model_state": variables}

    variables = load()  # rejects a name that `NETWORKS` lacks
    model = {"name": NETWORKS[name.partition(".")[0]]}
    weights = _published(path, model, variables, load)
    return dataclasses.replace(weights, pixels=_pixels(settings))


def _pixels(settings: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    preprocessing = settings.get("pretrained_cfg") or settings  # older files lack the section
    try:
        # In timm, pixels are scaled to 0 ... 1 before they are normalised.
        mean, deviation = (
            tuple(round(255 * value, 3) for value in preprocessing[kind])
            for kind in ("mean", "std")
        )
    except (AttributeError, KeyError, TypeError):
        return None
    return mean, deviation


def _of_huggingface(folder: pathlib.Path) -> Weights:
    config, params = bert_huggingface.from_huggingface(folder)
    model = {"name": "bert", **dataclasses.asdict(config)}

    def load() -> dict[str, Any]:
        return {"params": bert_huggingface.from_huggingface(folder)[1]}

    return _published(folder, model, {"params": params}, load)


def _published(
    path: pathlib.Path,
    model: Mapping[str, Any],
    variables: PyTree,
    load: Callable[[], dict[str, Any]],
) -> Weights:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), variables)
    return Weights(path, None, model, shapes, updates_before=0, read=_reader(load))


def _reader(load: Callable[[], dict[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns `Weights.read` for a file that can only be loaded completely.

    The file is loaded again at each call: a cached copy would stay in memory until the run ends.
    """

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        values = by_path(load())

        def load_leaf(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            value = np.asarray(values[path], leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, value.__getitem__)

        tree = dict(wanted)
        leaves = map(load_leaf, parameters.leaf_paths(tree), jax.tree.leaves(tree))
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    return read


def _check_finite(arrays: Mapping[str, Any], where: str) -> None:
    """Rejects parameters or a model state with NaN or infinity."""
    # The optimizer's state is not checked: it may use NaN as a marker.
    leaves = by_path({part: arrays[part] for part in ("params", "model_state") if part in arrays})
    floats = {
        path: leaf for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    finite = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(floats)
    wrong = [path for path, is_finite in finite.items() if not is_finite]
    if wrong:
        problem = f"has NaN or infinity in {len(wrong)} array(s): {', '.join(wrong[:4])}"
        raise UserError(where, ABSENT, problem, "use weights from before the run diverged")


def _of_run(workdir: Workdir, key: str, step: int | None, report: Callable[[str], None]) -> Weights:
    config = workdir.read_config()
    if "model.name" not in config:
        problem = f"holds neither a run nor {WEIGHTS}: its config.json is not that of a run"
        remedy = "give the workdir of a run, or a folder with weights"
        raise UserError(f"{key} {workdir.path}", ABSENT, problem, remedy)
    remedy = "train the run, or give another folder"
    missing = UserError(f"{key} {workdir.path}", ABSENT, "has no checkpoint yet", remedy)
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
        raise missing

    def checkpoints() -> Checkpoints:
        return Checkpoints(workdir.checkpoints, 1, report, writes=False)

    with checkpoints() as there:
        latest = there.latest_shapes() if step is None else (step, there.shapes(step))
        if latest is None:
            raise missing
        newest, shapes = latest
        position = Position.from_json(there.position(newest) if step is None else {})
    model = {
        name.removeprefix("model."): value
        for name, value in config.items()
        if name.startswith("model.")
    }
    record = workdir.read_init()

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        with checkpoints() as there:
            arrays = _restored(lambda parts: there.restore_part(newest, parts), wanted, shapes)
        _check_finite(arrays, f"{key} {workdir.path}, update {newest:,},")
        return arrays

    return Weights(
        folder=workdir.path,
        step=newest,
        model=model,
        # A field may be empty, such as the model state of a network without BatchNorm.
        shapes={part: shapes[part] for part in PARTS if parameters.leaf_paths(shapes.get(part))},
        updates_before=record["updates_before"] if record else 0,
        read=read,
        unfinished=_unfinished(position, newest),
    )


def _restored(
    restore: Callable[[dict[str, Any]], dict[str, Any]],
    wanted: Mapping[str, Any],
    shapes: Mapping[str, Any],
) -> dict[str, Any]:
    """Restores parts of a checkpoint; without 'opt_state', 'params' are the parameters for evaluation."""
    parts = dict(wanted)
    if {"params", "opt_state"} & set(wanted) != {"params"} or not (
        schedule_free.keeps_evaluation_params(shapes.get("opt_state"))
    ):
        return restore(parts)
    # A schedule-free optimizer computes the parameters for evaluation from its state. Read the state
    # replicated, because only the shardings of the parameters are known here.
    sharding = next(leaf.sharding for leaf in jax.tree.leaves(wanted["params"]))
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec())
    parts["opt_state"] = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes["opt_state"],
    )
    arrays = restore(parts)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted["params"])
    evaluated = jax.jit(schedule_free.evaluation_params, out_shardings=shardings)
    return arrays | {"params": evaluated(arrays.pop("opt_state"), arrays["params"])}


def _unfinished(position: Position, step: int) -> str:
    total = position.total_steps
    ended = total is None or step >= total or position.end_reason
    return "" if ended else f"update {step:,} of {total:,}"
