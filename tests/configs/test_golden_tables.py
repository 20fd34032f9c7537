"""Tests the parameter tables of all recipes, with decay and adaptation, against text files.

To update the files: python -m tests.configs.test_golden_tables
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.optim import parameters
from tests import tiny

FOLDER = pathlib.Path(__file__).parent.parent / "golden_tables"
Inputs = Any


def _image(*shape: int) -> Inputs:
    return jax.ShapeDtypeStruct((1, *shape), jnp.float32)


_TOKENS = {
    name: jax.ShapeDtypeStruct((1, 8), jnp.int32)
    for name in ("input_ids", "token_type_ids", "attention_mask")
}
_WORDS = {"inputs": jax.ShapeDtypeStruct((1, 8), jnp.int32)}
_PAIRS = {
    "source_ids": jax.ShapeDtypeStruct((1, 8), jnp.int32),
    "source_length": jax.ShapeDtypeStruct((1,), jnp.int32),
    "target_ids": jax.ShapeDtypeStruct((1, 9), jnp.int32),
}
_ALL, _BERT = ("lamb", "adamw", "momentum"), ("lamb", "adamw")
# A recipe with its argument, the inputs of its network, and its optimizers.
TABLES = {
    "digits": ("digits.py", "", _image(8, 8, 1), (*_ALL, "nesterov", "lars")),
    "mnist_lenet": ("mnist_lenet.py", "", _image(28, 28, 1), (*_ALL, "sgd", "adagrad")),
    "mnist_lenet5": ("mnist_lenet.py", "network=lenet5", _image(28, 28, 1), _ALL),
    "mnist_lstm": ("mnist_lstm.py", "", _image(28, 28, 1), ("momentum", "adam")),
    "bert_pretrain": ("bert_pretrain.py", "", _TOKENS, _BERT),
    "bert_pretrain_scanned": ("bert_pretrain.py", "scan", _TOKENS, _BERT),
    "bert_squad": ("bert_squad.py", "size=base", _TOKENS, _BERT),
    "translation": ("translation.py", "", _PAIRS, ("adam", "lamb")),
    "translation_wmt16": ("translation.py", "data=wmt16", _PAIRS, ("adam", "lamb")),
    "imagenet_resnet": ("imagenet_resnet.py", "", _image(224, 224, 3), ("lamb", "momentum")),
    "imagenet_resnet_lars": (
        "imagenet_resnet.py",
        "optimizer=lars",
        _image(224, 224, 3),
        ("lars",),
    ),
    "imagenet_efficientnet": (
        "imagenet_efficientnet.py",
        "size=b0",
        _image(224, 224, 3),
        ("rmsprop",),
    ),
    "imagenet_efficientnet_lars": (
        "imagenet_efficientnet.py",
        "size=b0,optimizer=lars,batch=32768",
        _image(224, 224, 3),
        ("lars",),
    ),
    "image_folder": ("image_folder.py", "", _image(224, 224, 3), ("lamb", "momentum")),
    "cifar10": ("cifar10.py", "", _image(32, 32, 3), (*_ALL, "lars", "adam", "adagrad")),
    "ptb": ("ptb.py", "batch=80", _WORDS, ("sgd", "momentum", "adam")),
    "cifar10_resnet18": ("cifar10.py", "model=resnet18", _image(32, 32, 3), ("lamb",)),
}


@functools.cache
def shapes(model: str, name: str) -> Any:
    """Returns the parameter shapes of the network with the JSON config `model`, for inputs from `TABLES`."""
    built = models.build(**json.loads(model))
    return jax.eval_shape(built.init, jax.random.key(0), TABLES[name][2])["params"]


def table(name: str, optimizer: str) -> str:
    file, argument, *_ = TABLES[name]
    get_config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config
    config: ConfigDict = get_config(f"{argument},optimizer={optimizer}")
    # Trace the network once for all optimizers.
    params = shapes(config.model.to_json(), name)
    return parameters.table(params, config.optimizer.to_dict()["rules"]) + "\n"


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, chosen) for name, (*_, known) in TABLES.items() for chosen in known],
)
def test_table(name: str, optimizer: str) -> None:
    assert table(name, optimizer) == (FOLDER / f"{name}.txt").read_text()


def test_every_recipe_has_a_table() -> None:
    files = {file for file, *_ in TABLES.values()}
    assert files == {p.name for p in (tiny.ROOT / "configs").glob("*.py")} - {"__init__.py"}
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLES)


if __name__ == "__main__":
    for name, (*_, known) in TABLES.items():
        (FOLDER / f"{name}.txt").write_text(table(name, known[0]))
