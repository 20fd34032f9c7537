"""Tests custom names in stored configs: allowed names, and rejected names, which execute nothing."""

import json
import pathlib
import shutil
import sys
import textwrap

import pytest

from lamb_tpu import trust
from lamb_tpu.critical_batch.choices import StudyRequest
from lamb_tpu.critical_batch.measuring import measure
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from tests import tiny
from tests.raising import rejected

FLAG = "--trust-workdir"
# Files of a user's project. An imported module adds its name to `sys.argv`, which the fixture replaces.
PROJECT = {
    "my_net.py": """
        import subprocess
        from functools import partial
        from subprocess import getoutput

        import optax

        class Net:
            layer = subprocess.Popen

            @classmethod
            def small(cls):
                return cls()

        made = partial(subprocess.getoutput)

        def net(width: int = 3):
            return width
        """,
    "my_package/__init__.py": "from my_package.parts import Net\nfrom shutil import rmtree\n",
    "my_package/parts.py": "class Net: ...\n",
    "my_folder/inner/net.py": "class Net: ...\n",
    "runs/foreign/evil.py": "import sys\nsys.argv.append('evil ran')\ndef net(): ...\n",
    "lib/site-packages/installed.py": "import sys\nsys.argv.append('ran')\nclass Net: ...\n",
    "my_import/__init__.py": "",
    "my_import/fails.py": "1 / 0\n",
}


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "lib" / "site-packages")
    monkeypatch.setattr(sys, "argv", [])
    before = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in "my_net my_package my_folder my_import runs installed".split():
            del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [
        "my_net:Net",
        "my_net:net",
        "my_net:Net.small",
        "my_package.parts:Net",
        "my_package:Net",
        "my_folder.inner.net:Net",
        # Values that cannot be imported: a TFDS data set, text, a missing module.
        "tfds:mnist",
        "steps:first",
        "my_absent.net:Net",
        "my_net.inner:Net",
    ],
)
def test_names_that_are_followed(project: pathlib.Path, name: str) -> None:
    for key in ("model.name", "data.name", "phases.phase_1.task.name", "optimizer.inner"):
        trust.check({key: name, "model.width": 3}, project / "runs" / "config.json", FLAG)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("subprocess:getoutput", "subprocess belongs to Python's standard library"),
        ("os.path:join", "os belongs to Python's standard library"),
        ("sys:exit", "sys belongs to Python's standard library"),
        ("antigravity:fly", "antigravity belongs to Python's standard library"),
        ("optax:adabelief", "optax belongs to an installed package"),
        ("installed:Net", "installed belongs to an installed package"),
        ("lamb_tpu.launch.local:run_local", "lamb_tpu belongs to "),
        ("runs.foreign.evil:net", "runs.foreign.evil is in the folder of that file"),
        # Names in the user's modules for code that is defined elsewhere.
        ("my_net:getoutput", "my_net does not define it (subprocess does)"),
        ("my_net:subprocess.getoutput", "my_net does not define it (subprocess does)"),
        ("my_net:optax.sgd", "my_net does not define it (optax"),
        ("my_net:Net.layer", "my_net does not define it (subprocess does)"),
        ("my_net:made", "my_net does not define it (functools does)"),
        ("my_net:net.__class__", "my_net does not define it (builtins does)"),
        ("my_net:net.__globals__.get", "my_net does not define it"),
        ("my_package:rmtree", "my_package does not define it (shutil does)"),
    ],
)
def test_names_that_are_rejected(project: pathlib.Path, name: str, reason: str) -> None:
    file = project / "runs" / "foreign" / "config.json"
    for key, value in (
        ("model.name", name),
        ("phases.phase_1.optimizer.name", name),
        ("task.inner", [1, [name]]),
        ("parallel.exchange", {"name": name}),
    ):
        full_key = f"config.{key}.name" if isinstance(value, dict) else f"config.{key}"
        problem = f"in {file} is rejected: {reason}"
        with rejected(full_key, name, problem, f"give {FLAG}"):
            trust.check({key: value}, file, FLAG)
    assert sys.argv == []  # nothing else was imported


def test_link_to_an_installed_package(project: pathlib.Path) -> None:
    (project / "my_link.py").symlink_to(project / "lib" / "site-packages" / "installed.py")
    with rejected("config.model.name", "my_link:Net", "my_link belongs to an installed package"):
        trust.check({"model.name": "my_link:Net"}, project / "config" / "config.json", FLAG)
    assert sys.argv == []


def test_module_that_fails(project: pathlib.Path) -> None:
    with rejected("config.model.name", "my_import.fails:f", "ZeroDivisionError: division by zero"):
        trust.check({"model.name": "my_import.fails:f"}, project / "a" / "config.json", FLAG)


def test_commands_that_read_a_stored_config(
    trained: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands reject a folder whose config.json names a program as its model."""
    workdir, written = tmp_path / "foreign", tmp_path / "written"
    shutil.copytree(trained, workdir)
    config = json.loads((workdir / "config.json").read_text())
    for key in [key for key in config if key.startswith("model.")]:
        del config[key]
    config |= {"model.name": "subprocess:getoutput", "model.cmd": f"touch {written}"}
    (workdir / "config.json").write_text(json.dumps(config))
    untrusted = ("config.model.name", "subprocess:getoutput", "is rejected", "--trust-workdir")
    with rejected(*untrusted):
        evaluate_checkpoint(None, workdir)
    with rejected(*untrusted):
        measure(None, str(workdir), StudyRequest("4 steps", factors="1,2", span="8 steps"))
    assert not written.exists()
    # With the flag, the name is imported like a name on the command line.
    with rejected("config.model.name", "subprocess:getoutput", "returns ''"):
        evaluate_checkpoint(None, workdir, trust_workdir=True)
    assert written.exists()


def test_installed_optimizer_needs_the_flag(copy: pathlib.Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    for key in [key for key in config if key.startswith("optimizer.")]:
        del config[key]
    config |= {"optimizer.name": "optax:adabelief", "optimizer.learning_rate": 0.01}
    (copy / "config.json").write_text(json.dumps(config))
    with rejected("config.optimizer.name", "optax:adabelief", "an installed package"):
        evaluate_checkpoint(None, copy)
    # The name is accepted: the error is about the state, because the checkpoint is LAMB's.
    with pytest.raises(UserError) as raised:
        evaluate_checkpoint(None, copy, trust_workdir=True)
    assert "adabelief" not in str(raised.value)


def test_stored_configs_of_this_package_are_followed() -> None:
    """No committed record needs --trust-workdir."""
    for file in sorted(tiny.ROOT.glob("experiments/*/*.configs.json")):
        for stages in json.loads(file.read_text()).values():
            for stage in stages:
                trust.check(stage, file, FLAG)
