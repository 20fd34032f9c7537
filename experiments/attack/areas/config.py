"""Config keys of several recipes, on the command line."""

import functools
import pathlib
import random
from typing import Any

from experiments.attack.bases import SHORT
from experiments.attack.inputs import WORDS, Input, flag

# Relative frequency of each recipe. Some recipes train for half a minute if the value is valid.
RECIPES = {
    "digits:smoke": 10,
    "mnist_lenet:smoke": 2,
    "ptb:smoke": 2,
    "bert_squad:smoke": 1,
    "translation:smoke": 1,
    "cifar10:smoke": 1,
    "imagenet_resnet:smoke,size=18": 1,
    "mnist_lstm:smoke": 1,
}
# Valid values of keys that the recipes leave out.
_FURTHER = {
    "batch_rule.name": "ramp",
    "batch_rule.points": "((0,64),(1000,256))",
    "target.value": "0.9",
    "target.metric": "accuracy",
    "checkpoint.best": "accuracy",
    "init_from": "@/run",
    "parallel.exchange": "aps",
    "parallel.backend": "shard_map",
    "optimizer.b1": "0.9",
    "optimizer.ratio_bounds": "(0.1, 10.0)",
    "optimizer.rules": "all",
    "data.dir": "@/data",
    "data.prepared_dir": "@/data",
    "statistics.every": "1 steps",
    "guards.nan": "stop",
    "mesh.model": "1",
    "ema.decay": "0.9",
    "model.dtype": "float32",
    "log.mlperf": "true",
}


@functools.cache
def _keys(recipe: str) -> dict[str, Any]:
    """Returns the flattened config of a recipe."""
    from lamb_tpu.cli import load_recipe
    from lamb_tpu.config import flatten

    return dict(flatten(load_recipe(recipe)))


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a recipe and a key, and sets the key to an odd value."""
    recipe = rng.choices(list(RECIPES), list(RECIPES.values()))[0]
    known = _keys(recipe)
    key = rng.choice([*known, *_FURTHER])
    change, value = rng.choice(list(WORDS.items()))
    if rng.random() < 0.05:
        change, key, value = "unknown key", f"{key}x", "1"
    rest = [item for item in SHORT if not item.startswith(f"--config.{key}=")]
    return Input(
        "config keys",
        change,
        f"{recipe.partition(':')[0]} {key}",
        "lamb_tpu.train",
        [f"--config={recipe}", "--workdir=@/new", *rest, flag(f"config.{key}", value)],
        ["run"] if key == "init_from" else [],
    )
