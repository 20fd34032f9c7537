"""The families of cases: a small network with its data and task, as the config that a case changes."""

import ast
import copy
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.models.bert_rules import PARAMETERS_SCANNED
from tests import tiny
from tests.fuzz import networks

UPDATES = 4
EXAMPLES = 37  # of an evaluation; odd, so that its last batch has padding
SAVED = 2  # the update from which a case is resumed in another setting
_FOLDER = "LAMB_TPU_FUZZ_TEXT"
_RUN = {
    "batch_size": 16,
    "duration": f"{UPDATES} steps",
    "checkpoint.every": f"{SAVED} steps",
    "eval.every": f"{SAVED} steps",
    "eval.batch_size": 16,
    "schedule.warmup": "2 steps",
    "schedule.start_factor": 0.25,
    "log.heartbeat_seconds": 0.0,
    "guards.spike_factor": 0.0,
}


def _mlp() -> ConfigDict:
    return tiny.digits(model__hidden_sizes=(8, 8))


def _cnn() -> ConfigDict:
    return tiny.digits(model=ConfigDict({"name": networks.NAME}))


def _row_lstm() -> ConfigDict:
    return tiny.digits(model=ConfigDict({"name": "row_lstm", "features": 4, "transform": 4}))


def _bert() -> ConfigDict:
    small = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 512}
    options = {"vocab_size": 512, "sequence_length": 16, "max_predictions": 3}
    return tiny.bert(
        **{f"model__{key}": value for key, value in {**small, "max_positions": 16}.items()},
        **{f"data__options__{key}": value for key, value in options.items()},
        data__eval_split="test",
    )


def _bert_scanned() -> ConfigDict:
    config = _bert()
    return tiny.change(config, {"model.scan_layers": True, "model.num_layers": 2})


@functools.cache
def _text() -> pathlib.Path:
    """Returns the folder of a text, which processes that this one starts read too."""
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="lamb_tpu_fuzz_text_")
        tiny.text(pathlib.Path(os.environ[_FOLDER]))
    return pathlib.Path(os.environ[_FOLDER])


def _lstm() -> ConfigDict:
    config = tiny.words(_text(), model__features=4, model__num_layers=1, model__dropout_rate=0.0)
    return tiny.change(config, {"data.options.steps": 5})


# Each family, with the size of its batches and the splits that it trains on and evaluates.
FAMILIES: dict[str, tuple[Callable[[], ConfigDict], dict[str, Any]]] = {
    "mlp": (_mlp, {"data.train_split": "train[:40]", "data.eval_split": "test[:37]"}),
    "cnn": (_cnn, {"data.train_split": "train[:40]", "data.eval_split": "test[:37]"}),
    "row_lstm": (_row_lstm, {"data.train_split": "train[:40]", "data.eval_split": "test[:21]"}),
    "bert": (_bert, {"batch_size": 8, "eval.batch_size": 8}),
    "bert_scanned": (_bert_scanned, {"batch_size": 8, "eval.batch_size": 8}),
    "lstm": (_lstm, {"batch_size": 8, "eval.batch_size": 4}),
}


def base(family: str) -> ConfigDict:
    """Returns the config of a family, without a case's changes."""
    make, values = FAMILIES[family]
    config = tiny.change(make(), _RUN | values)
    config.optimizer = ConfigDict({"name": "sgd", "learning_rate": 0.05, "rules": rules(family)})
    return config


def batch_size(family: str) -> int:
    """Returns the batch size of a family."""
    return int(FAMILIES[family][1].get("batch_size", _RUN["batch_size"]))


def rules(family: str) -> Any:
    """Returns rules that fit any optimizer: layers of a stack need `layer_axes`."""
    return PARAMETERS_SCANNED if family == "bert_scanned" else "all"


def first(source: data.Source, count: int) -> data.Source:
    """Returns a source with only the first examples, so that an evaluation takes little time."""
    shorter = copy.copy(source)
    shorter.__class__ = type("First", (type(source),), {"__len__": lambda self: count})
    return shorter


@functools.cache
def _loaded(name: str, split: str, options: str, arguments: str) -> data.Source:
    given = ast.literal_eval(arguments)
    source = data.load(name, split, options=json.loads(options), **given)
    is_long = not given["training"] and source.streams is None and len(source) > EXAMPLES
    return first(source, EXAMPLES) if is_long else source


def load(name: str, split: str, options: Any, **arguments: Any) -> data.Source:
    """Loads a data set once in a process, as `data.load`; cuts long evaluation sets."""
    return _loaded(name, split, json.dumps(dict(options or {})), repr(arguments))
