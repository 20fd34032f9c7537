"""Users' config files, and arguments of recipes."""

import pathlib
import random

from experiments.attack.bases import SHORT
from experiments.attack.inputs import WORDS, Input

_ARGUMENTS = {
    "digits": ("optimizer", "batch", "epochs", "smoke"),
    "mnist_lenet": ("network", "optimizer", "batch"),
    "ptb": ("size", "rule", "batch"),
    "bert_pretrain": ("size", "recipe", "batch", "phase", "scan"),
    "image_folder": ("dir", "weights", "model", "epochs", "batch"),
    "imagenet_resnet": ("size", "recipe", "batch"),
    "imagenet_efficientnet": ("size", "augment", "batch"),
    "cifar10": ("model", "data", "epochs"),
    "translation": ("data", "batch"),
    "mnist_lstm": ("rule", "batch"),
    "bert_squad": ("size", "batch"),
}
_SECTIONS = (
    "data",
    "task",
    "model",
    "optimizer",
    "schedule",
    "parallel",
    "mesh",
    "eval",
    "checkpoint",
    "log",
    "batch_rule",
    "phases",
    "init",
    "ema",
    "target",
    "guards",
)
_VALUES = {
    "None": "None",
    "a number": "5",
    "a negative number": "-1",
    "a string": "'x'",
    "a list": "[1, [2]]",
    "nan": "float('nan')",
    "infinity": "float('inf')",
    "10**30": "10**30",
    "an object": "object()",
    "a function": "print",
    "bytes": "b'x'",
    "a set": "{1}",
    "control characters": "'a\\x1b[31mb'",
    "a surrogate": "'\\ud800'",
    "a nested config": "ConfigDict({'a': {'b': {'c': 1}}})",
    "a dictionary": "{'name': ['x']}",
    "a tuple": "(1, 'x')",
    "a date": "__import__('datetime').date.today()",
    "an array": "__import__('numpy').ones(3)",
    "a complex number": "1j",
    "a long string": "'x' * 1_000_000",
}
# Lines that replace `return config` at the end of the function.
_BODIES = {
    "returns None": "return None",
    "returns a list": "return [config]",
    "exits": "raise SystemExit",
    "raises": "raise ValueError('a\\x1b[31mb\\nc')",
    "divides by zero": "1 / 0",
    "recursion": "return get_config()",
    "unknown key": "config.batchsize = 64; return config",
    "unknown key in a section": "config.task.input_sd = 16; return config",
    "locked": "config.lock(); config.x = 1; return config",
    "interrupt": "raise KeyboardInterrupt",
    "warning": "import warnings; warnings.warn('x'); return config",
    "no import": "import not_there",
    "out of memory": "raise MemoryError",
    "assertion": "assert False",
    "syntax": "return config(",
}


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a recipe's argument with an odd value, or a config file with an odd body or value."""
    number = rng.random()
    if number < 0.3:
        recipe = rng.choice(list(_ARGUMENTS))
        key = rng.choice(_ARGUMENTS[recipe])
        change, value = rng.choice(list(WORDS.items()))
        return Input(
            "recipes",
            f"argument, {change}",
            f"{recipe} {key}",
            "lamb_tpu.train",
            [f"--config={recipe}:{key}={value}", "--workdir=@/new", "--print_config"],
        )
    command = ["--config=@/recipe.py", "--workdir=@/new", *SHORT]
    if number < 0.55:
        change, body = rng.choice(list(_BODIES.items()))
        return Input(
            "recipes",
            change,
            "recipe.py",
            "lamb_tpu.train",
            command,
            files={"recipe.py": _recipe(body)},
        )
    change, value = rng.choice(list(_VALUES.items()))
    section = rng.choice(_SECTIONS)
    key = rng.choice(
        (
            section,
            f"{section}.name",
            f"{section}.every",
            "batch_size",
            "duration",
            "seed",
            "accumulation_steps",
            "prng",
        )
    )
    body = f"config.unlock(); config.{key} = {value}; return config"
    # Remove the override in SHORT that would replace the value.
    command = [word for word in command if f"config.{key}" not in word]
    return Input(
        "recipes",
        change,
        f"config.{key}",
        "lamb_tpu.train",
        command,
        files={"recipe.py": _recipe(body)},
    )


def _recipe(body: str) -> str:
    return (
        "import pathlib, runpy\n\nfrom ml_collections import ConfigDict\n\n"
        "from lamb_tpu.config import recipe_path\n\n\ndef get_config(argument=None):\n"
        "    config = runpy.run_path(recipe_path('digits'))['get_config']('smoke')\n"
        f"    {body}\n"
    )
