"""Tests custom models, tasks, data sets and optimizers, named 'module:Name': errors and exits."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import optax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import custom, data, overrides
from lamb_tpu.config import base_config
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected


def test_names() -> None:
    assert custom.is_custom("a.b:C") and custom.is_custom("optax:adabelief")
    assert not custom.is_custom("mlp") and not custom.is_custom(3) and not custom.is_custom(None)
    assert custom.find("optax:adabelief", "config.optimizer.name") is optax.adabelief
    assert custom.find("collections.abc:Mapping.get", "config.x").__name__ == "get"


# Each entry has a section, the name of its component or its fields, and part of the problem. Some
# entries also have the error's key (below the section) and value, and some part of the remedy.
ERRORS: dict[str, tuple[Any, ...]] = {
    "form": ("model", "my_linen:", "is not the name of a component"),
    "path": ("model", "./my_linen.py:Net", "is not the name of a"),
    "module": (
        "model",
        "my_absent:Net",
        "needs the module 'my_absent', which is not in the folder",
        "name",
        "my_absent:Net",
        "run in the module's folder, or add that",
    ),
    "module below": ("task", "my_linen.more:Net", "needs the module"),
    "attribute": (
        "model",
        "my_linen:Net",
        "does not exist",
        "name",
        "my_linen:Net",
        "the module my_linen (",
    ),
    "import": ("data", "my_failing:load", "cannot be imported at line 3 of"),
    "its import": (
        "optimizer",
        "my_importing:f",
        "ModuleNotFoundError: No module named 'absent_library'",
    ),
    "exit": ("model", "my_exiting:Net", "cannot be imported at line"),
    "syntax": ("model", "my_misspelt:f", "cannot be imported at line"),
    "constant": ("model", "my_broken:NUMBER", "names 3"),
    "number": ("model", "my_broken:returns_number", "returns 3"),
    "refused": (
        "model",
        {"name": "my_broken:refuses", "width": 3},
        "cannot be built at line 20 of",
    ),
    "required": ("model", "my_broken:refuses", "is missing", "width", ..., "set it, because model"),
    "field": (
        "model",
        {"name": "my_linen:TwoLayers", "widht": 3},
        "is unknown",
        "widht",
        ...,
        "model 'my_linen:TwoLayers' has: name,",
    ),
    "hidden field": ("model", {"name": "my_nnx:TwoLayers", "rngs": 3}, "is unknown", "rngs", ...),
    "type": (
        "model",
        {"name": "my_nnx:TwoLayers", "width": "x"},
        "has the wrong type",
        "width",
        "x",
    ),
    "untrained": ("model", "my_broken:Untrained", "has a __call__ without the", "name", ...),
    "params": ("model", "my_broken:without_params", "returns no 'params'", "name", ...),
    "state": ("model", "my_broken:without_state", "has an apply that returns", "name", ...),
    "methods": ("task", "my_broken:Lossless", "makes"),
    "task's field": (
        "task",
        {"name": "my_tasks:SquaredError", "sclae": 1.0},
        "is unknown",
        "sclae",
        ...,
        "task 'my_tasks:SquaredError' has: name,",
    ),
    "split": ("data", "my_broken:without_split", "has no argument 'split'", "name", ...),
    "source": ("data", "my_broken:no_source", "returns [1, 2, 3], which lacks"),
    "empty": ("data", "my_broken:empty", "holds no example in split 'train'"),
    "shapes": ("data", "my_broken:Shapes", "gathers float32[3] for field 'image'"),
    "options": (
        "data",
        {"name": "my_arrays:rings", "options": {"nois": 1.0}},
        "is unknown",
        "options.nois",
        ...,
        "data set 'my_arrays:rings' has: size,",
    ),
    "folder": (
        "data",
        {"name": "my_arrays:rings", "dir": "."},
        "is not used by 'my_arrays:rings'",
        "dir",
        ".",
        "leave it out",
    ),
    "split's name": (
        "data",
        {"name": "my_arrays:rings", "eval_split": "validation"},
        "cannot be built at line 8 of",
    ),
    "rate": ("optimizer", "my_broken:rateless", ": my_broken:rateless has no argument", "", ...),
    "transform": (
        "optimizer",
        "my_broken:not_optax",
        ": my_broken:not_optax()=3 must be an Optax",
        "",
        ...,
    ),
    "argument": (
        "optimizer",
        {"name": "my_broken:whole", "b2": 0.1},
        "is unknown",
        "b2",
        ...,
        "optimizer 'my_broken:whole' has: name,",
    ),
    "argument's type": (
        "optimizer",
        {"name": "my_broken:whole", "b1": "x"},
        "has the wrong type",
        "b1",
        "x",
    ),
    "preset": (
        "optimizer",
        {"name": "my_broken:whole", "preset": "paper"},
        ": optimizer=<function whole at",
        "",
        ...,
    ),
}


def configured(section: str, fields: Any) -> ConfigDict:
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


@pytest.mark.parametrize("name", ERRORS)
def test_error(custom_folder: pathlib.Path, name: str) -> None:
    section, fields, problem, *others = ERRORS[name]
    named = ("name", fields if isinstance(fields, str) else fields["name"])
    key, value, *remedy = others or named
    with rejected(f"config.{section}.{key}".rstrip("."), value, problem, *remedy) as caught:
        prepare(configured(section, fields), None)
    assert "\n" not in str(caught.value)


def test_sharded_tensors_need_an_argument(custom_folder: pathlib.Path) -> None:
    split = {"parallel.backend": "shard_map", "parallel.optimizer_state": "zero1"}
    with pytest.raises(UserError, match="='my_broken:whole' has no argument 'axis_name'"):
        prepare(tiny.change(configured("optimizer", "my_broken:whole"), split), None)
    prepare(tiny.change(configured("optimizer", "my_optimizers:sign_momentum"), split), None)
    prepare(configured("optimizer", "my_broken:whole"), None)


def test_command_line_values_have_the_types_of_the_arguments(custom_folder: pathlib.Path) -> None:
    (custom_folder / "my_strings.py").write_text(
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
    actual, rest = overrides.take(
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
    overrides.apply(config, actual)
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
        ("model.width=1.5", ("config.model.width", "1.5", "has the wrong type")),
        (
            "model.depth=3",
            ("config.model.depth", ..., "is unknown", "model 'my_strings:net' has: name,"),
        ),
        ("data.options.seed=3", ("config.data.options.seed", ..., "is unknown")),
        ("optimizer.axis_name=data", ("config.optimizer.axis_name", ..., "is unknown")),
        ("task.name=my_tasks:Other", ("config.task.name", "my_tasks:Other", "does not exist")),
    ):
        with rejected(*message):
            overrides.apply(config, overrides.take([f"--config.{flag}"])[0])


LEAVING = "custom module my_leaving"
# A config section, the custom code in it that exits, and the expected error.
EXITS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "model": ("model", "made", ("config.model.name", "my_leaving:made", "cannot be built at line")),
    "aborts": ("model", "aborted", ("config.model.name", "my_leaving:aborted", ": Abort: enough")),
    "closes": ("model", "closed", ("config.model.name", "my_leaving:closed", ": GeneratorExit")),
    "init": ("model", "init", (LEAVING, ..., ": SystemExit")),
    "apply": ("model", "apply", (LEAVING, ..., ": SystemExit")),
    "loss": ("task", "Loss", (LEAVING, ..., ": Abort: in loss")),
    "evaluate": ("task", "Metrics", (LEAVING, ..., ": SystemExit: 0")),
    "gather": ("data", "Examples", ("config.data.name", "my_leaving:Examples", ": SystemExit: 0")),
    "optimizer": ("optimizer", "optimizer", (LEAVING, ..., ": SystemExit")),
    "update": ("optimizer", "update", (LEAVING, ..., ": SystemExit")),
    "library": ("model", "sys:exit", ("config.model.name", "sys:exit", "cannot be built: System")),
}


@pytest.mark.parametrize("name", EXITS)
def test_exit_is_an_error(custom_folder: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    section, part, message = EXITS[name]
    fields = part if ":" in part else f"my_leaving:{part}"
    with rejected(*message) as caught:
        train(configured(section, fields), tmp_path / "run", quiet=True)
    assert "\n" not in str(caught.value)


def test_exit_in_a_thread_that_reads_ahead(custom_folder: pathlib.Path) -> None:
    """An unhandled exit would end only the thread, and the run would wait for a batch forever."""
    source = data.load("my_leaving:Examples", "train", options={"allowed": 3})
    loader = data.TrainLoader(source, 64, 0)
    with rejected(LEAVING, ..., ": SystemExit: 0"):
        for _ in range(4):
            next(loader)


def test_end_of_the_run_passes_custom_code(custom_folder: pathlib.Path) -> None:
    with pytest.raises(Preempted, match="the machine is needed"):
        prepare(configured("model", "my_leaving:preempted"), None)


@pytest.mark.long
@pytest.mark.parametrize("flag", ["model=my_leaving:init", "task=my_leaving:Metrics"])
def test_exit_is_no_success_of_the_command(custom_folder: pathlib.Path, flag: str) -> None:
    section, _, name = flag.partition("=")
    (custom_folder / "leaving.py").write_text(
        "from ml_collections import ConfigDict\nfrom tests import custom_modules\n"
        f"exec(custom_modules.MINE.replace('def get_config', 'def mine'))\n"
        "def get_config():\n    config = mine()\n"
        f"    config.{section} = ConfigDict({{'name': {name!r}}})\n    return config\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "lamb_tpu.train", "--config=leaving.py", "--workdir=run"],
        env={**os.environ, "PYTHONPATH": str(tiny.ROOT), "JAX_NUM_CPU_DEVICES": "1"},
        cwd=custom_folder,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "my_leaving fails at line" in tiny.unbroken(ended.stderr)


# Optimizers with a wrong update, and the message about it.
UPDATES = {
    "none": "update must return (updates, state), not None",
    "no_updates": "update must return updates like the parameters: updates=",
    "tree": "update must return updates like the parameters: ",
    "shape": "has the shape (1, ",
    "whole": "update must return floating-point updates, not int32",
    "grows": "(number of arrays before: 1, after: 2, only in one of them: 'g1')",
    "lists": "(number of arrays before: 1, after: 2, only in one of them: '1')",
    "widens": "of its state, but changed 'count' from float32[] to float32[2]",
    "casts": "of its state, but changed 'count' from float32[] to bfloat16[]",
}


@pytest.mark.parametrize("backend", ["jit", "shard_map"])
@pytest.mark.parametrize("name", UPDATES)
def test_wrong_update(custom_folder: pathlib.Path, name: str, backend: str) -> None:
    config = configured("optimizer", f"my_updates:{name}")
    config.parallel.backend = backend
    with rejected("config.optimizer", ..., UPDATES[name]) as caught:
        prepare(config, None)
    assert "\n" not in str(caught.value)
