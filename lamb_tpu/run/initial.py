"""Initial weights from other weights: `config.init_from` and `config.init`.

The parameters come from another run's newest checkpoint, a Hugging Face folder, or a network of
timm's or torchvision's with its BatchNorm averages. Everything else starts anew: the step, the
data, the random key, and averages of the weights, which start at the parameters that were taken.

With `config.init.optimizer_state = 'keep'` moments and counts are taken too. Bias correction then
continues, but the schedule starts at 0: the learning rate depends on the count minus its initial
value. That value is kept in init.json, so a run that has begun no longer needs the other folder.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from lamb_tpu.data import Source, title
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.models.transformer import stack_layers, unstack_layers
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.weights import Weights, open_weights
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.tasks.classification import Classification

# Fields of a BERT that are compared because shapes do not show them, or show them too late.
_SAME = ("num_layers", "num_heads", "gelu", "layer_norm_eps")
_LISTED = 8  # paths in a message


@dataclasses.dataclass(frozen=True)
class Match:
    """Arrays of a state that initial weights provide; paths are '/'-joined, from the state's field.

    Attributes:
      taken: paths of parameters and model state that are taken.
      new: paths that start at random, because they are missing or have another shape.
      left: paths in the initial weights that the state does not have.
      convert: stacks or unstacks the layers of the initial weights; None if both agree.
    """

    taken: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]
    convert: Callable[[Any], Any] | None


@dataclasses.dataclass(frozen=True)
class Start:
    """Source of a run's initial weights.

    Attributes:
      record: content of init.json: init_from, update (None for published weights),
        optimizer_state, updates_before (see `recipe.Recipe`), new, left, and `unfinished` if that
        run had not ended.
      weights: the weights; None if the run resumes from a checkpoint of its own.
      match: the arrays that are taken; None before `check`.
      notes: further lines for the terminal.
    """

    record: Mapping[str, Any]
    weights: Weights | None = None
    match: Match | None = None
    notes: tuple[str, ...] = ()

    @property
    def updates_before(self) -> int:
        """See `recipe.Recipe`."""
        return self.record["updates_before"]

    def describe(self) -> str:
        """A line for the terminal."""
        kept = f"kept, its counts {self.updates_before:,} ahead"
        if self.record["optimizer_state"] != "keep":
            kept = "new"
        return "; ".join([self.describe_weights(), f"optimizer state {kept}", *self.notes])

    def describe_weights(self) -> str:
        """Returns a line about the weights, without the optimizer's state."""
        record = self.record
        update = "" if record["update"] is None else f", update {record['update']:,}"
        text = f"first weights: {record['init_from']}{update}"
        if self.match is not None:
            text += f"; {len(self.match.taken)} arrays taken"
            for name, paths in (("new, at random", self.match.new), ("left", self.match.left)):
                text += f"; {name}: {_list(paths)}" if paths else ""
        return text

    def values(self, abstract: TrainState) -> dict[str, jax.Array]:
        """Returns the arrays that are taken, by their paths, placed as in the state.

        Args:
          abstract: shapes, dtypes and shardings of the state.

        Raises:
          UserError: the run has begun, but its own checkpoints are gone.
        """
        if self.weights is None or self.match is None:
            raise UserError(
                f"the run began from {self.record['init_from']} and has no checkpoint of its own "
                "any more; start again in another --workdir"
            )
        here = _flat({"params": abstract.params, "model_state": abstract.model_state})
        wanted = {path: here[path] for path in self.match.taken}
        # The layers are stacked on one side and unrolled on the other.
        if self.match.convert is not None:
            return _converted(self.weights, self.match.convert, wanted)
        # Weights are read by the containers that they were written with.
        nested = _as_there(self.weights.shapes, wanted)
        if self.record["optimizer_state"] == "keep":
            # `_check_kept` found the same paths in both optimizer states; the containers may
            # differ.
            ours = _flat({"opt_state": abstract.opt_state})
            kept = {"opt_state": self.weights.shapes["opt_state"]}
            nested |= jax.tree_util.tree_map_with_path(lambda path, _: ours[_join(path)], kept)
        return _flat(self.weights.read(nested))


def _converted(
    weights: Weights, of_params: Callable[[Any], Any], wanted: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    # Read in the other layout, whole on every device; then converted on the devices.
    shapes = weights.shapes
    whole = mesh_lib.replicated(next(iter(wanted.values())).sharding.mesh)
    parts = {part: shapes[part] for part in ("params", "model_state") if part in shapes}
    found = weights.read(
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), parts
        )
    )

    def convert(found: dict[str, Any]) -> dict[str, jax.Array]:
        flat = _flat(found | {"params": of_params(found["params"])})
        return {path: flat[path].astype(leaf.dtype) for path, leaf in wanted.items()}

    places = {path: leaf.sharding for path, leaf in wanted.items()}
    return jax.jit(convert, out_shardings=places)(found)


def find(config: ConfigDict, folder: Workdir | None) -> Start | None:
    """Finds the source of the initial weights, without checking that they fit.

    Args:
      config: the run's config.
      folder: the run's workdir; None for a run that is only planned, which needs no weights.

    Returns:
      The source; None for random weights.

    Raises:
      UserError: config.init_from has no weights, or those of a run that has not ended without
        config.init.unfinished; or the run in the folder began at random.
    """
    if folder is None:
        return None
    source, record = config.init_from, folder.read_init()
    # The run has begun: its state comes from its own checkpoint, its counts from the record.
    if folder.has_checkpoint():
        if record is None and source is not None:
            raise UserError(
                f"config.init_from is {source!r}, but --workdir {folder.path} holds a run that "
                "began at random; give another folder, or leave config.init_from out to resume it"
            )
        return None if record is None else Start(record, notes=_changed(record, source))
    if source is None:
        # The run was started but has saved nothing, so it needs the weights again.
        if record is not None:
            raise UserError(
                f"--workdir {folder.path} holds a run that began from {record['init_from']} and "
                "has no checkpoint yet; give that as config.init_from again"
            )
        return None
    start = of_weights(config)
    if start.weights is not None and start.weights.unfinished and not config.init.unfinished:
        raise UserError(
            f"config.init_from: {start.weights.describe()}, is of a run that has not ended "
            f"({start.weights.unfinished}); finish that run first, or set "
            "config.init.unfinished=True to start from its newest checkpoint"
        )
    return start


def of_weights(config: ConfigDict) -> Start:
    """Returns the start from config.init_from, without checking that the weights fit.

    Raises:
      UserError: config.init_from has no weights.
    """
    weights = open_weights(config.init_from, "config.init_from", network=config.model.get("name"))
    keeps = config.init.optimizer_state == "keep"
    if keeps and "opt_state" not in weights.shapes:
        raise UserError(
            f"config.init.optimizer_state is 'keep', but {weights.folder} has no optimizer's "
            "state; it must be 'reset'"
        )
    record = {
        "init_from": str(weights.folder),
        "update": weights.step,
        "optimizer_state": config.init.optimizer_state,
        # The other run may itself have continued the counts of a third one.
        "updates_before": weights.updates_before + (weights.step or 0) if keeps else 0,
    }
    notes: tuple[str, ...] = ()
    if weights.unfinished:
        record["unfinished"] = weights.unfinished
        notes = (f"that run has not ended ({weights.unfinished})",)
    return Start(record, weights, notes=notes)


def _changed(record: Mapping[str, Any], source: str | None) -> tuple[str, ...]:
    """Returns a note if config.init_from is not the folder that the run began from."""
    if source is None:
        return ()
    began, given = (
        buckets.parse(path, "config.init_from") for path in (record["init_from"], source)
    )
    if given == began or given in began.parents:  # a folder of phases: the last was taken
        return ()
    return (f"config.init_from, now {source}, changes nothing in a run that has begun",)


def check(start: Start, config: ConfigDict, abstract: TrainState, train_set: Source) -> Start:
    """Returns `start` with `match` filled in, after checking that its weights fit the run.

    Args:
      start: result of `find` or `of_weights`.
      config: the run's config.
      abstract: shapes and dtypes of the run's state.
      train_set: the run's training set.

    Raises:
      UserError: the weights do not fit the run, or belong to another vocabulary.
    """
    weights = start.weights
    if weights is None:
        return start
    _check_text(weights, train_set)
    found = match(config, abstract, weights.shapes, weights.model, str(weights.folder))
    record = {**start.record, "new": found.new, "left": found.left}
    notes = (*start.notes, *_other_pixels(weights, config.task))
    return dataclasses.replace(start, record=record, match=found, notes=notes)


def match(
    config: ConfigDict,
    abstract: TrainState,
    there: Mapping[str, Any],
    model: Mapping[str, Any],
    where: str,
) -> Match:
    """Returns the arrays that a run takes of another state.

    Args:
      config: the run's config.
      abstract: shapes and dtypes of the run's state.
      there: 'params' of the other state and, if it has them, 'model_state' and 'opt_state'.
      model: config.model of the other state.
      where: name of the other state in error messages.

    Raises:
      UserError: an array is missing or has another shape, or the networks compute differently.
    """
    where = f"config.init_from: {where}"
    _check_model(model, config.model, where)
    here = _flat({"params": abstract.params, "model_state": abstract.model_state})
    found = {part: there.get(part, {}) for part in ("params", "model_state")}
    # Arrays are compared in this run's layout, stacked or unrolled.
    convert = _conversion(found["params"], abstract.params)
    if convert is not None:
        found["params"] = jax.eval_shape(convert, found["params"])
    found = _flat(found)
    pattern = config.init.new_parameters
    # An array is taken if its path and its shape agree. All others must be allowed to start at
    # random.
    fits = {path for path in here if path in found and found[path].shape == here[path].shape}
    taken = tuple(path for path in here if path in fits)
    new = tuple(path for path in here if path not in fits)
    wrong = [path for path in new if not (pattern and re.search(pattern, _short(path)))]
    missing = [path for path in wrong if path not in found]
    told = f"config.init.new_parameters, now {pattern!r}, is the regex of paths that may start "
    if missing:
        raise UserError(f"{where} has no {_list(missing)}; {told}at random")
    for path in wrong:
        ours, theirs = here[path].shape, found[path].shape
        words = ""
        if path == "params/embeddings/word" and ours[1:] == theirs[1:]:
            words = f": its vocabulary has {theirs[0]:,} words, this run's {ours[0]:,}"
        raise UserError(
            f"{where} has {_short(path)} of shape {theirs}, this model of {ours}{words}; {told}at "
            "random"
        )
    if not taken:
        raise UserError(f"{where} has nothing that this model has")
    if config.init.optimizer_state == "keep":
        _check_kept(abstract.opt_state, there["opt_state"], convert, where)
    return Match(taken, new, tuple(path for path in found if path not in here), convert)


def _check_kept(here: Any, there: Any, convert: Callable[[Any], Any] | None, where: str) -> None:
    if convert is not None:
        raise UserError(
            f"{where} has its layers {'unrolled' if convert is stack_layers else 'stacked'}; "
            "config.init.optimizer_state is 'keep', which needs config.model.scan_layers as there"
        )
    ours, theirs = (
        {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in _flat(tree).items()}
        for tree in (here, there)
    )
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            raise UserError(
                f"{where} has the state of another optimizer, or of other parameters: {path} is "
                f"{theirs.get(path, 'not there')}, here {ours.get(path, 'not there')}; "
                "config.init.optimizer_state is 'keep', so they must be the same, or it 'reset'"
            )


def _check_model(there: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    """Refuses weights of another network, even if all its names and shapes agree."""
    if there["name"] != here["name"]:
        raise UserError(
            f"{where} is of the model {there['name']!r}, and config.model.name is "
            f"{here['name']!r}; make it the same"
        )
    if here["name"] != "bert":
        return
    theirs, ours = (
        BertConfig(**{field: model[field] for field in model if field != "name"})
        for model in (there, here)
    )
    for field in _SAME:
        if getattr(theirs, field) != getattr(ours, field):
            raise UserError(
                f"{where} is of a network with {field} = {getattr(theirs, field)!r}, and "
                f"config.model.{field} is {getattr(ours, field)!r}; make it the same"
            )


def _check_text(weights: Weights, train_set: Source) -> None:
    """Refuses text with another vocabulary or case; the vocabulary's size is checked by shapes."""
    text, here = weights.text(), train_set.vocabulary
    # A vocabulary of another size shows in the embedding's shape, for which `match` has a better
    # message.
    if text is None or here is None or len(text[0]) != len(here):
        return
    vocabulary, cased = text
    if cased not in (None, train_set.cased):
        raise UserError(
            f"config.init_from: {weights.folder} is of text with cased = {cased}, "
            f"{title(train_set)} has cased = {train_set.cased}; prepare the text alike"
        )
    for number, (theirs, ours) in enumerate(zip(vocabulary.tokens, here.tokens, strict=True)):
        if theirs != ours:
            raise UserError(
                f"config.init_from: {weights.folder} is of another vocabulary: its token {number} "
                f"is {theirs!r}, that of {title(train_set)} {ours!r}; give the data its vocab.txt"
            )


def _other_pixels(weights: Weights, task: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns notes if the task normalises pixels in another way than the weights expect."""
    notes = []
    for field, theirs in zip(("input_mean", "input_std"), weights.pixels or (), strict=False):
        ours = task.get(field, getattr(Classification, field))
        # Pixels are 0 ... 255, and the published values are rounded.
        if not np.allclose(ours, theirs, atol=0.01):
            notes.append(f"they were trained with config.task.{field}={theirs}, here it is {ours}")
    return tuple(notes)


def _conversion(there: Any, here: Any) -> Callable[[Any], Any] | None:
    def has(tree: Any, name: str) -> bool:
        return any(re.search(f"(^|/){name}/", path) for path in _flat(tree))

    # Unrolled layers are named layer_0, layer_1 and so on; stacked layers share the name layers.
    if has(there, "layer_0") and has(here, "layers"):
        return stack_layers
    if has(there, "layers") and has(here, "layer_0"):
        return unstack_layers
    return None


def _as_there(there: Any, wanted: Mapping[str, Any], path: str = "") -> Any:
    """Arranges wanted arrays, given by path, in the containers of the other weights; None if empty.

    Raises:
      UserError: only a part of a list is wanted.
    """
    if isinstance(there, Mapping):
        items = {key: _as_there(value, wanted, f"{path}{key}/") for key, value in there.items()}
        return {key: value for key, value in items.items() if value is not None} or None
    if not isinstance(there, (list, tuple)):
        return wanted.get(path.removesuffix("/"))
    found = [_as_there(value, wanted, f"{path}{index}/") for index, value in enumerate(there)]
    # A list without some of its elements would have other indices, and so other paths.
    if any(value is None for value in found) and any(value is not None for value in found):
        raise UserError(
            f"config.init_from: {path.removesuffix('/')} is a list, of which only a part fits; "
            "such parameters must be in a dictionary"
        )
    return None if all(value is None for value in found) else found


def _flat(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_join(path): leaf for path, leaf in leaves}


def _join(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _short(path: str) -> str:
    """Returns a path without the field of the state."""
    return path.partition("/")[2]


def _list(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(map(_short, paths[:_LISTED])) + more
