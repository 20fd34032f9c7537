"""Tests that errors in a config file name the line, key, value, nearest known key, and remedy."""

import pathlib

import pytest

from lamb_tpu import cli
from lamb_tpu.errors import UserError
from tests import tiny


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "config.task.input_std = 16",
            "config.task.input_std is not set in the base config, which is locked; set the section "
            "with config.task = ConfigDict({'name': 'classification', 'input_std': 16}), or give "
            "--config.task.input_std=16 on the command line",
        ),
        ("config.update({'task': {'input_std': 3}})", "ConfigDict({'name': 'classification', 'i"),
        (
            "config.task.inputstd = 16",
            "config.task.inputstd is unknown; 'classification' has: label_smoothing, input_mean, "
            "input_std, mixup_alpha, cutmix_alpha; did you mean config.task.input_std?",
        ),
        (
            "config.task.blocks = 16",
            "to use another name, replace the section: config.task = ConfigDict(",
        ),
        ("config.batchsize = 64", "config.batchsize is unknown; config has: accumulation_steps, "),
        ("config['batchsize'] = 64", "; did you mean config.batch_size?"),
        ("config.data.dri = 'x'", "config.data.dri is unknown; config.data has: dir, eval_split, "),
        (
            "config.data.options.rows = 3",
            "config.data.options.rows is unknown; config.data.options ",
        ),
        ("config.phases.a = 3", "config.phases.a is unknown; config.phases has: no keys"),
        ("config.tsk.name = 'x'", "config.tsk is unknown; config has: "),
        (
            "config.batch_size = 'many'",
            "config.batch_size='many' has the wrong type; use a whole number, such as 128",
        ),
        ("config.task = 5", "config.task=5 is not a section; use a ConfigDict"),
        ("config.batch_size = (", "SyntaxError: '(' was never closed"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_error_names_line_key_and_remedy(tmp_path: pathlib.Path, body: str, message: str) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from lamb_tpu.config import base_config\ndef get_config(argument=None):\n"
        f"    config = base_config()\n    {body}\n    return config\n"
    )
    with pytest.raises(UserError) as caught:
        cli.load_recipe(str(file))
    text = str(caught.value)
    assert text.startswith(f"the config file {file} fails at line 4: ") and message in text
    assert "\n" not in text and "locked. Other fields" not in text


def test_proposed_replacement_is_accepted(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from ml_collections import ConfigDict\nfrom lamb_tpu.config import base_config\n"
        "def get_config(argument=None):\n    config = base_config()\n"
        "    config.task = ConfigDict({'name': 'classification', 'input_std': 16})\n"
        "    return config\n"
    )
    assert cli.load_recipe(str(file)).task.input_std == 16


def test_value_error_on_a_command_line(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "recipe.py"  # absl would attribute the file's ValueError to the flag
    file.write_text("def get_config(argument=None):\n    raise ValueError('no\\nsuch rate')\n")
    done = tiny.command("lamb_tpu.train", f"--config={file}", "--workdir=x")
    output = f"error: the config file {file} fails at line 2: ValueError: no such rate\n"
    assert (done.returncode, done.stderr) == (2, output)
