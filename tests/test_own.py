"""Models, tasks, data sets and optimizers of a user's own, by 'module:Name'."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import optax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, own
from lamb_tpu.config import base_config
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.run import overrides
from lamb_tpu.run.build import prepare
from lamb_tpu.train import train
from tests import tiny


def test_names() -> None:
    assert own.is_own("a.b:C") and own.is_own("optax:adabelief")
    assert not own.is_own("mlp") and not own.is_own(3) and not own.is_own(None)
    assert own.find("optax:adabelief", "config.optimizer.name") is optax.adabelief
    assert own.find("collections.abc:Mapping.get", "config.x").__name__ == "get"


MISTAKES = {
    "form": ("model", "my_linen:", "name is 'my_linen:'; one of your own has the form 'my_pack"),
    "path": ("model", "./my_linen.py:Net", "one of your own has the form"),
    "module": (
        "model",
        "my_absent:Net",
        "config.model.name is 'my_absent:Net'; Python finds no module 'my_absent' from the current "
        "folder, /.*; run in the folder that it lies in, or name that folder in PYTHONPATH$",
    ),
    "module below": ("task", "my_linen.more:Net", "Python finds no module 'my_linen.more' "),
    "attribute": (
        "model",
        "my_linen:Net",
        r"the module my_linen \(.*my_linen.py\) has no 'Net', it has: TwoLayers$",
    ),
    "import": (
        "data",
        "my_failing:load",
        "config.data.name is 'my_failing:load'; importing my_failing fails at line 3 of "
        ".*my_failing.py: ValueError: ",
    ),
    "its import": (
        "optimizer",
        "my_importing:f",
        "config.optimizer.name is 'my_importing:f'; importing my_importing fails at line 1 of "
        ".*: ModuleNotFoundError: No module named 'absent_library'$",
    ),
    "exit": ("model", "my_exiting:Net", "my_exiting fails at line 1 of .*: SystemExit: 3$"),
    "syntax": ("model", "my_misspelt:f", "fails at line 1 of .*my_misspelt.py: SyntaxError: inv"),
    "constant": ("model", "my_broken:NUMBER", "which is 3; it must be a class or a function"),
    "number": ("model", "my_broken:returns_number", "which makes 3; it must be a Linen module, "),
    "refused": (
        "model",
        {"name": "my_broken:refuses", "width": 3},
        "name is 'my_broken:refuses'; making it fails at line 20 of .*my_broken.py: ValueError: "
        "the width is odd$",
    ),
    "required": ("model", "my_broken:refuses", "config.model.width is missing; model 'my_broken:"),
    "field": (
        "model",
        {"name": "my_linen:TwoLayers", "widht": 3},
        "config.model.widht is not a field of model 'my_linen:TwoLayers'; known: num_classes, "
        "width, dropout_rate$",
    ),
    "hidden field": (
        "model",
        {"name": "my_nnx:TwoLayers", "rngs": 3},
        "config.model.rngs is not a field of model",
    ),
    "type": (
        "model",
        {"name": "my_nnx:TwoLayers", "width": "x"},
        "config.model.width is 'x'; it must be a whole number$",
    ),
    "untrained": ("model", "my_broken:Untrained", "whose __call__ has no argument 'train'; it mus"),
    "params": (
        "model",
        "my_broken:without_params",
        "whose init must return a mapping with the key 'par",
    ),
    "state": (
        "model",
        "my_broken:without_state",
        r"whose apply must return \(outputs, state\), where ",
    ),
    "methods": ("task", "my_broken:Lossless", "without init, weights, loss, evaluate; a task has"),
    "task's field": (
        "task",
        {"name": "my_tasks:SquaredError", "sclae": 1.0},
        "config.task.sclae is not a field of task 'my_tasks:SquaredError'; known: scale$",
    ),
    "split": ("data", "my_broken:without_split", "which has no argument 'split'; it must take one"),
    "source": (
        "data",
        "my_broken:no_source",
        "which makes .1, 2, 3. without name, num_classes, element",
    ),
    "empty": (
        "data",
        "my_broken:empty",
        "config.data.name is 'my_broken:empty', of which split 'train' has no example",
    ),
    "shapes": (
        "data",
        "my_broken:Shapes",
        r"whose gather gives 'image' as float32\[3\] for one example, and whose element_spec says "
        r"float32\[2\]",
    ),
    "options": (
        "data",
        {"name": "my_arrays:rings", "options": {"nois": 1.0}},
        "config.data.options.nois is not a field of data set 'my_arrays:rings'; known: size, "
        "noise$",
    ),
    "folder": (
        "data",
        {"name": "my_arrays:rings", "dir": "."},
        "config.data.dir is '.', and 'my_arrays:rings' has no argument 'source_dir' to take it",
    ),
    "split's name": (
        "data",
        {"name": "my_arrays:rings", "eval_split": "validation"},
        "making it fails at line .* of .*my_arrays.py: KeyError: 'validation'$",
    ),
    "rate": (
        "optimizer",
        "my_broken:rateless",
        "config.optimizer: my_broken:rateless has no argument 'learning_rate'",
    ),
    "transform": (
        "optimizer",
        "my_broken:not_optax",
        "config.optimizer: what my_broken:not_optax returns must be an Optax transform, not 3",
    ),
    "argument": (
        "optimizer",
        {"name": "my_broken:whole", "b2": 0.1},
        "config.optimizer: my_broken:whole has no argument 'b2'; known: b1, clip_global_norm",
    ),
    "argument's type": (
        "optimizer",
        {"name": "my_broken:whole", "b1": "x"},
        "config.optimizer.b1 is 'x'; it must be a number$",
    ),
    "preset": ("optimizer", {"name": "my_broken:whole", "preset": "paper"}, "has no presets"),
}


def configured(section: str, fields: Any) -> ConfigDict:
    """The small run on digits with one part replaced."""
    config = tiny.digits()
    fields = {"name": fields} if isinstance(fields, str) else fields
    if section == "optimizer":
        fields = {"learning_rate": 0.01, **fields}
    if section == "data":
        return tiny.change(
            config,
            {
                f"data.{key}": value
                for key, value in {"train_split": "train", "options": {}, **fields}.items()
            },
        )
    return tiny.change(config, {section: ConfigDict(fields)})


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(own_folder: pathlib.Path, name: str) -> None:
    section, fields, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as caught:
        prepare(configured(section, fields), None)
    assert "\n" not in str(caught.value)


def test_parts_of_tensors_need_an_argument(own_folder: pathlib.Path) -> None:
    split = {"parallel.backend": "shard_map", "parallel.optimizer_state": "zero1"}
    with pytest.raises(UserError, match="is 'my_broken:whole', which has no argument 'axis_name'"):
        prepare(tiny.change(configured("optimizer", "my_broken:whole"), split), None)
    prepare(tiny.change(configured("optimizer", "my_optimizers:sign_momentum"), split), None)
    prepare(configured("optimizer", "my_broken:whole"), None)


def test_command_line_values_have_the_types_of_the_arguments(own_folder: pathlib.Path) -> None:
    (own_folder / "my_strings.py").write_text(
        "from __future__ import annotations\n\ndef net(width: int = 3, scale: float = 1.0, odd: "
        "Unknown = 'a', *more, **rest): ...\n"
    )
    config = tiny.change(
        base_config(),
        {
            "model": ConfigDict({"name": "my_strings:net"}),
            "task": ConfigDict({"name": "my_tasks:SquaredError"}),
            "optimizer": ConfigDict({"name": "my_optimizers:sign_momentum", "learning_rate": 0.1}),
            "data.name": "my_records:Rings",
        },
    )
    found, rest = overrides.take(
        [
            "--config.model.width=32",
            "--config.model.scale=2",
            "--config.model.odd=b",
            "--config.task.scale=8",
            "--config.optimizer.momentum=0.5",
            "--config.data.options.size=64",
            "--config.optimizer.weight_decay=0.0",
            "--config.optimizer.clip_global_norm=1",
        ]
    )
    overrides.apply(config, found)
    assert not rest and config.model.to_dict() == {
        "name": "my_strings:net",
        "width": 32,
        "scale": 2.0,
        "odd": "b",
    }
    assert config.task.scale == 8.0 and config.data.options.to_dict() == {"size": 64}
    assert config.optimizer.to_dict() == {
        "name": "my_optimizers:sign_momentum",
        "learning_rate": 0.1,
        "momentum": 0.5,
        "clip_global_norm": 1.0,
    }
    shown = overrides.describe(config).splitlines()
    assert "config.data.options.noise = 0.1  # default of my_records:Rings" in shown
    assert "config.optimizer.weight_decay = 0.0  # default of my_optimizers:sign_momentum" in shown
    for flag, message in (
        ("model.width=1.5", "config.model.width is '1.5'; it must be a whole number, such as 3"),
        ("model.depth=3", "config.model.depth is unknown; model 'my_strings:net' has: name, width"),
        ("data.options.seed=3", "seed is unknown; data set 'my_records:Rings' has: size, noise$"),
        ("optimizer.axis_name=data", "config.optimizer.axis_name is unknown"),
        ("task.name=my_tasks:Other", "config.task.name is 'my_tasks:Other'; the module my_tasks "),
    ):
        with pytest.raises(UserError, match=message):
            overrides.apply(config, overrides.take([f"--config.{flag}"])[0])


# Part of the config with code that exits, and where the message says that it does.
EXITS = {
    "model": ("model", "my_leaving:made", "config.model.name is 'my_leaving:made'; making it fai"),
    "aborts": ("model", "my_leaving:aborted", "making it fails at line .*: Abort: enough$"),
    "closes": ("model", "my_leaving:closed", "making it fails at line .*: GeneratorExit$"),
    "library": ("model", "sys:exit", "config.model.name is 'sys:exit'; making it fails: System"),
    "init": ("model", "my_leaving:init", "your own module my_leaving fails at line .*: SystemExit"),
    "apply": ("model", "my_leaving:apply", "your own module my_leaving fails at line .*SystemExit"),
    "loss": ("task", "my_leaving:Loss", "module my_leaving fails at line .*: Abort: in loss$"),
    "evaluate": ("task", "my_leaving:Metrics", "module my_leaving fails at line .*: SystemExit: 0"),
    "gather": (
        "data",
        "my_leaving:Examples",
        "config.data.name is 'my_leaving:Examples'; making it fails at line .*: SystemExit: 0$",
    ),
    "optimizer": ("optimizer", "my_leaving:optimizer", "module my_leaving fails at line .*: Syst"),
    "update": ("optimizer", "my_leaving:update", "module my_leaving fails at line .*: SystemExit"),
}


@pytest.mark.parametrize("name", EXITS)
def test_exit_is_an_error(own_folder: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    section, fields, message = EXITS[name]
    with pytest.raises(UserError, match=message) as caught:
        train(configured(section, fields), tmp_path / "run", quiet=True)
    assert "\n" not in str(caught.value)


def test_exit_in_a_thread_that_reads_ahead(own_folder: pathlib.Path) -> None:
    """It would end the thread alone, and the run would wait for its batch forever."""
    source = data.load("my_leaving:Examples", "train", options={"allowed": 3})
    loader = data.TrainLoader(source, 64, 0)
    with pytest.raises(UserError, match="own module my_leaving fails at line .*: SystemExit: 0"):
        for _ in range(4):
            next(loader)


def test_end_of_the_run_passes_custom_code(own_folder: pathlib.Path) -> None:
    with pytest.raises(Preempted, match="the machine is needed"):
        prepare(configured("model", "my_leaving:preempted"), None)


@pytest.mark.long
@pytest.mark.parametrize("flag", ["model=my_leaving:init", "task=my_leaving:Metrics"])
def test_exit_is_no_success_of_the_command(own_folder: pathlib.Path, flag: str) -> None:
    section, _, name = flag.partition("=")
    (own_folder / "leaving.py").write_text(
        "from ml_collections import ConfigDict\nfrom tests import own_modules\n"
        f"exec(own_modules.MINE.replace('def get_config', 'def mine'))\n"
        "def get_config():\n    config = mine()\n"
        f"    config.{section} = ConfigDict({{'name': {name!r}}})\n    return config\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "lamb_tpu.train", "--config=leaving.py", "--workdir=run"],
        env={**os.environ, "PYTHONPATH": str(tiny.ROOT), "JAX_NUM_CPU_DEVICES": "1"},
        cwd=own_folder,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "my_leaving fails at line" in tiny.unbroken(ended.stderr)


# Optimizers whose update is wrong, and what the message says.
UPDATES = {
    "none": r"update must return \(updates, state\), not None",
    "no_updates": "update must return updates like the parameters: updates must have the structure",
    "tree": "update must return updates like the parameters: ",
    "shape": r"updates hold an array of the shape \(1, .*\) for the parameter '.*' of the shape",
    "whole": "update must return floating-point updates, not int32",
    "grows": "are 1 arrays before and 2 after it, 'g1' is in one of them only",
    "lists": "are 1 arrays before and 2 after it, '1' is in one of them only",
    "widens": r"its state: 'count' is float32\[\] before and float32\[2\] after it",
    "casts": r"its state: 'count' is float32\[\] before and bfloat16\[\] after it",
}


@pytest.mark.parametrize("backend", ["jit", "shard_map"])
@pytest.mark.parametrize("name", UPDATES)
def test_wrong_update(own_folder: pathlib.Path, name: str, backend: str) -> None:
    config = configured("optimizer", f"my_updates:{name}")
    config.parallel.backend = backend
    with pytest.raises(UserError, match=f"^config.optimizer: .*{UPDATES[name]}") as caught:
        prepare(config, None)
    assert "\n" not in str(caught.value)
