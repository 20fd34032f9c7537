"""Initial weights from a checkpoint or published weights: `config.init_from` and `config.init`.

With `config.init.optimizer_state = 'keep'`, moments and counts are loaded too. Bias correction then
continues, but the schedule starts at 0: the learning rate depends on the count minus its initial
value. init.json records that value, so a run that has begun no longer needs the folder of init_from.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lamb_tpu.data import Source, title
from lamb_tpu.data.text import saved
from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.files import buckets
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.models.transformer import stack_layers, unstack_layers
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.weights import Weights, by_path, open_weights
from lamb_tpu.spec import Spec
from lamb_tpu.spec_keys import Component
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.tasks.classification import Classification
from lamb_tpu.types import PyTree

# Fields of a BERT model to compare, because shapes reveal a difference too late or not at all.
_SAME = ("num_layers", "num_heads", "gelu", "layer_norm_eps")
_LISTED = 8  # paths in a message


@dataclasses.dataclass(frozen=True)
class Match:
    """The arrays of a state that the initial weights provide; paths begin with a field of the state.

    Attributes:
      taken: paths of parameters and model state that are loaded.
      new: paths of arrays that start from random values, because the initial weights lack them or
        have them in another shape.
      left: paths in the initial weights that the state does not have.
      convert: stacks or unstacks the layers of the initial weights; None if no change is needed.
    """

    taken: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]
    convert: Callable[[Any], Any] | None


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """The source of a run's initial weights.

    Attributes:
      record: content of init.json: init_from, update (None for published weights),
        optimizer_state, updates_before (see `recipe.Recipe`), new, left, and `unfinished` if the
        source run had not ended.
      weights: the weights; None if the run resumes from its own checkpoint.
      match: the arrays that are loaded; None before `check`.
      notes: further lines for the terminal.
    """

    record: Mapping[str, Any]
    weights: Weights | None = None
    match: Match | None = None
    notes: tuple[str, ...] = ()

    @property
    def updates_before(self) -> int:
        """The field `updates_before` of `recipe.Recipe`."""
        return self.record["updates_before"]

    def describe(self) -> str:
        """Returns a line about the weights and the optimizer's state."""
        origin = f"kept, its counts {self.updates_before:,} ahead"
        if self.record["optimizer_state"] != "keep":
            origin = "new"
        return "; ".join([self.describe_weights(), f"optimizer state {origin}", *self.notes])

    def describe_weights(self) -> str:
        """Returns a line about the weights, without the optimizer's state."""
        record = self.record
        update = "" if record["update"] is None else f", update {record['update']:,}"
        text = f"initial weights: {record['init_from']}{update}"
        if self.match is not None:
            text += f"; {len(self.match.taken)} arrays taken"
            for name, paths in (("new, at random", self.match.new), ("not used", self.match.left)):
                text += f"; {name}: {_list(paths)}" if paths else ""
        return text

    def values(self, abstract: TrainState) -> dict[str, jax.Array]:
        """Loads the arrays from which the state starts, by path and with the state's shardings."""
        if self.weights is None or self.match is None:
            problem = f"began from {self.record['init_from']} and has lost its checkpoints"
            raise UserError("the run", ABSENT, problem, "start again in another --workdir")
        here = by_path({"params": abstract.params, "model_state": abstract.model_state})
        wanted = {path: here[path] for path in self.match.taken}
        # The weights have stacked layers and the state unrolled layers, or the reverse.
        if self.match.convert is not None:
            return _converted(self.weights, self.match.convert, wanted)
        # Weights are read in the containers in which they were written.
        nested = _as_there(self.weights.shapes, wanted)
        if self.record["optimizer_state"] == "keep":
            # `_check_opt_state` has compared the paths of both states; the containers may differ.
            ours = by_path(abstract.opt_state)
            theirs = self.weights.shapes["opt_state"]
            leaves = [ours[path] for path in parameters.leaf_paths(theirs)]
            nested["opt_state"] = jax.tree.unflatten(jax.tree.structure(theirs), leaves)
        return by_path(self.weights.read(nested))


def _converted(
    weights: Weights, of_params: Callable[[Any], Any], wanted: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    # Read the weights in their layout (stacked or unrolled layers), replicated on each device, and
    # convert them on the devices.
    shapes = weights.shapes
    replicated = mesh_lib.replicated(next(iter(wanted.values())).sharding.mesh)
    trees = {part: shapes[part] for part in ("params", "model_state") if part in shapes}
    arrays = weights.read(
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), trees
        )
    )

    def convert(arrays: dict[str, Any]) -> dict[str, jax.Array]:
        flat = by_path(arrays | {"params": of_params(arrays["params"])})
        return {path: flat[path].astype(leaf.dtype) for path, leaf in wanted.items()}

    shardings = {path: leaf.sharding for path, leaf in wanted.items()}
    return jax.jit(convert, out_shardings=shardings)(arrays)


def find(spec: Spec, folder: Workdir | None) -> InitialWeights | None:
    """Returns the source of the initial weights, without checking that they fit the run.

    Returns None for random weights, and for a run without a folder, which is only planned.
    """
    if folder is None:
        return None
    source, record = spec.init_from, folder.read_init()
    # A run that has begun takes its state from its own checkpoint and its counts from the record.
    if folder.has_checkpoint():
        if record is None and source is not None:
            problem = (
                f"does not fit the run in --workdir {folder.path}, which began from random weights"
            )
            remedy = "give another --workdir, or leave out config.init_from to resume that run"
            raise UserError("config.init_from", source, problem, remedy)
        return None if record is None else InitialWeights(record, notes=_changed(record, source))
    if source is None:
        # The run was started but has saved nothing, so it needs its initial weights again.
        if record is not None:
            began = record["init_from"]
            problem = f"holds a run that began from {began} and has no checkpoint yet"
            remedy = f"set config.init_from={began!r} again"
            raise UserError(f"--workdir {folder.path}", ABSENT, problem, remedy)
        return None
    start = of_weights(spec)
    if start.weights is not None and start.weights.unfinished and not spec.init.unfinished:
        raise UserError(
            f"config.init_from: {start.weights.describe()},",
            problem=f"is a run that has not ended ({start.weights.unfinished})",
            remedy="finish that run first, or set config.init.unfinished=True to start from its "
            "newest checkpoint",
        )
    return start


def of_weights(spec: Spec) -> InitialWeights:
    """Returns the weights of config.init_from, without checking that they fit."""
    assert spec.init_from is not None
    weights = open_weights(spec.init_from, "config.init_from", network=spec.model.name)
    keeps = spec.init.optimizer_state == "keep"
    if keeps and "opt_state" not in weights.shapes:
        problem = f"needs an optimizer state, which {weights.folder} does not have"
        raise UserError("config.init.optimizer_state", "keep", problem, "use 'reset'")
    record = {
        "init_from": str(weights.folder),
        "update": weights.step,
        "optimizer_state": spec.init.optimizer_state,
        # The other run may have continued the counts of a third run.
        "updates_before": weights.updates_before + (weights.step or 0) if keeps else 0,
    }
    notes: tuple[str, ...] = ()
    if weights.unfinished:
        record["unfinished"] = weights.unfinished
        notes = (f"the source run has not ended ({weights.unfinished})",)
    return InitialWeights(record, weights, notes=notes)


def _changed(record: Mapping[str, Any], source: str | None) -> tuple[str, ...]:
    """Returns a note if config.init_from is not the folder from which the run began."""
    if source is None:
        return ()
    began, given = (
        buckets.parse(path, "config.init_from") for path in (record["init_from"], source)
    )
    if given == began or given in began.parents:  # the folder of a run whose last phase was used
        return ()
    return (f"config.init_from, now {source}, changes nothing in a run that has begun",)


def check(
    start: InitialWeights, spec: Spec, abstract: TrainState, train_set: Source
) -> InitialWeights:
    """Returns `start` with `match` filled in, after checking that its weights fit the run."""
    weights = start.weights
    if weights is None:
        return start
    _check_text(weights, train_set)
    matched = match(spec, abstract, weights.shapes, weights.model, str(weights.folder))
    record = {**start.record, "new": matched.new, "left": matched.left}
    notes = (*start.notes, *_other_pixels(weights, spec.task))
    return dataclasses.replace(start, record=record, match=matched, notes=notes)


def match(
    spec: Spec, abstract: TrainState, there: Mapping[str, Any], model: Mapping[str, Any], where: str
) -> Match:
    """Decides which arrays a run takes from another state.

    Args:
      spec, abstract: the run's config, and shapes and dtypes of its state.
      there: 'params' of the other state, and 'model_state' and 'opt_state' if it has them.
      model: config.model of the other state.
      where: name of the other state in error messages.
    """
    where = f"config.init_from: {where}"
    _check_model(model, spec.model.as_dict(), where)
    here = by_path({"params": abstract.params, "model_state": abstract.model_state})
    available = {part: there.get(part, {}) for part in ("params", "model_state")}
    # Arrays are compared in this run's layout, stacked or unrolled.
    convert = _conversion(available["params"], abstract.params)
    if convert is not None:
        available["params"] = jax.eval_shape(convert, available["params"])
    available = by_path(available)
    pattern = spec.init.new_parameters
    # An array is taken if its path and shape agree. `new_parameters` must match every other parameter.
    fits = {
        path for path in here if path in available and available[path].shape == here[path].shape
    }
    taken = tuple(path for path in here if path in fits)
    new = tuple(path for path in here if path not in fits)
    wrong = [path for path in new if not (pattern and re.search(pattern, _short(path)))]
    missing = [path for path in wrong if path not in available]
    remedy = (
        f"let config.init.new_parameters, now {pattern!r}, match all parameters that may start at "
        "random"
    )
    if missing:
        raise UserError(where, ABSENT, f"has no {_list(missing)}", remedy)
    for path in wrong:
        ours, theirs = here[path].shape, available[path].shape
        words = ""
        if path == "params/embeddings/word" and ours[1:] == theirs[1:]:
            words = f": its vocabulary has {theirs[0]:,} words, and this run's has {ours[0]:,}"
        problem = f"has {_short(path)} of shape {theirs}, but this model needs {ours}{words}"
        raise UserError(where, ABSENT, problem, remedy)
    if not taken:
        problem = "has no array of this model"
        raise UserError(where, ABSENT, problem, "use the weights of a similar network")
    if spec.init.optimizer_state == "keep":
        _check_opt_state(abstract.opt_state, there["opt_state"], convert, where)
    return Match(taken, new, tuple(path for path in available if path not in here), convert)


def _check_opt_state(
    here: Any, there: Any, convert: Callable[[Any], Any] | None, where: str
) -> None:
    if convert is not None:
        problem = f"has its layers {'unrolled' if convert is stack_layers else 'stacked'}"
        remedy = (
            f"set config.model.scan_layers={convert is unstack_layers} or "
            "config.init.optimizer_state='reset'"
        )
        raise UserError(where, ABSENT, problem, remedy)
    ours, theirs = (
        {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(tree).items()}
        for tree in (here, there)
    )
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            raise UserError(
                where,
                problem="has the state of another optimizer or of other parameters: "
                f"{path} is {theirs.get(path, 'missing')}, but in this run {ours.get(path, 'missing')}",
                remedy="use the same optimizer, or config.init.optimizer_state='reset'",
            )


def _check_model(there: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    """Rejects weights of another network, even if all names and shapes agree."""
    if there["name"] != here["name"]:
        problem = (
            f"has weights of the model {there['name']!r}, but config.model.name is {here['name']!r}"
        )
        raise UserError(where, ABSENT, problem, "use the same model")
    if here["name"] != "bert":
        return
    theirs, ours = (
        BertConfig(**{field: model[field] for field in model if field != "name"})
        for model in (there, here)
    )
    for field in _SAME:
        if getattr(theirs, field) != getattr(ours, field):
            value = getattr(theirs, field)
            actual = getattr(ours, field)
            problem = (
                f"is for a network with {field}={value!r}, but this run has {field}={actual!r}"
            )
            raise UserError(where, ABSENT, problem, f"set config.model.{field}={value!r}")


def _check_text(weights: Weights, train_set: Source) -> None:
    """Rejects weights with another vocabulary of the same size, or another setting of `cased`."""
    text, here = weights.text(), train_set.vocabulary
    # `match` has a better message for another size, which changes the embedding's shape.
    if text is None or here is None or len(text[0]) != len(here):
        return
    vocabulary, cased = text
    if cased not in (None, train_set.cased):
        problem = (
            f"is for text with cased={cased}, but {title(train_set)} has cased={train_set.cased}"
        )
        remedy = f"prepare the text with cased={cased}"
        raise UserError(f"config.init_from: {weights.folder}", ABSENT, problem, remedy)
    for number, (theirs, ours) in enumerate(zip(vocabulary.tokens, here.tokens, strict=True)):
        if theirs != ours:
            raise UserError(
                f"config.init_from: {weights.folder}",
                problem=f"has a different vocabulary from {title(train_set)}: its token {number} is "
                f"{theirs!r} and not {ours!r}",
                remedy="prepare the data with the vocab.txt of these weights",
            )


def _other_pixels(weights: Weights, task: Component) -> tuple[str, ...]:
    """Returns notes if the task normalises pixels differently from the training of the weights."""
    notes = []
    for field, theirs in zip(("input_mean", "input_std"), weights.pixels or (), strict=False):
        ours = task.get(field, getattr(Classification, field))
        # The published values are rounded; pixels are 0 ... 255.
        if not np.allclose(ours, theirs, atol=0.01):
            notes.append(
                f"the weights were trained with config.task.{field}={theirs}, but this run has {ours}"
            )
    return tuple(notes)


def _conversion(there: Any, here: Any) -> Callable[[Any], Any] | None:
    def has(tree: PyTree, name: str) -> bool:
        return any(re.search(f"(^|/){name}/", path) for path in parameters.leaf_paths(tree))

    # Unrolled layers are named layer_0, layer_1, ...; stacked layers share the name layers.
    if has(there, "layer_0") and has(here, "layers"):
        return stack_layers
    if has(there, "layers") and has(here, "layer_0"):
        return unstack_layers
    return None


def _as_there(there: Any, wanted: Mapping[str, Any], path: str = "") -> Any:
    """Arranges arrays, given by path, in the same containers as `there`; returns None for no arrays."""
    if isinstance(there, Mapping):
        items = {key: _as_there(value, wanted, f"{path}{key}/") for key, value in there.items()}
        return {key: value for key, value in items.items() if value is not None} or None
    if not isinstance(there, (list, tuple)):
        return wanted.get(path.removesuffix("/"))
    items_there = [_as_there(value, wanted, f"{path}{index}/") for index, value in enumerate(there)]
    # A list without some of its elements would have other indices, and thus other paths.
    if any(value is None for value in items_there) and any(
        value is not None for value in items_there
    ):
        raise UserError(
            f"config.init_from: {path.removesuffix('/')}",
            problem="is a list, and only some of its elements fit",
            remedy="use a dictionary for such parameters",
        )
    return None if all(value is None for value in items_there) else items_there


def _short(path: str) -> str:
    """Returns a path without its first component, the field of the state."""
    return path.partition("/")[2]


def _list(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(map(_short, paths[:_LISTED])) + more


def data_options(
    given: Mapping[str, Any], folder: Workdir | None, start: InitialWeights | None
) -> dict[str, Any]:
    """Returns config.data.options; replaces an empty `vocab` by a folder with a saved vocabulary."""
    options = dict(given)
    if options.get("vocab") == "":
        beside = [] if folder is None else [folder.path]  # a resumed run has saved its vocabulary
        beside += [start.weights.folder] if start is not None and start.weights else []
        options["vocab"] = next(
            (str(path) for path in beside if (path / saved.VOCABULARY).exists()), ""
        )
    return options
