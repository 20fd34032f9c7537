"""Tests the command `lamb_tpu`, and the time that every command takes for --help."""

import os
import pathlib
import re
import resource
import subprocess
import sys

import pytest

from lamb_tpu import command
from tests import tiny

# Runnable modules that are not commands for users.
INTERNAL = {"lamb_tpu.cluster.relay", "lamb_tpu.keys", "lamb_tpu.run.compatibility"}
# `python -m lamb_tpu`, and commands whose modules are in subpackages.
OTHER_NAMES = {"lamb_tpu.__main__", "lamb_tpu.prepare_text", "lamb_tpu.check_images"}
HEAVY = ("jax", "flax", "orbax.checkpoint", "grain", "optax", "tensorboardX")


def run(*arguments: str, after: str = "pass", before: str = "pass"):
    return tiny.python(
        f"import sys\n{before}\nfrom lamb_tpu import command\n"
        f"sys.argv = ['lamb_tpu', *{list(arguments)}]\n"
        f"try:\n    command.main()\nfinally:\n    {after}"
    )


def test_all_commands_are_listed() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for name in command.MODULES:
        assert f"\n  {name} " in done.stdout
    assert "Trains a model from a recipe" in done.stdout
    # `MODULES` includes every runnable module of the package.
    package = pathlib.Path(command.__file__).parent
    programs = {
        ".".join(["lamb_tpu", *path.relative_to(package).with_suffix("").parts])
        for path in package.rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert programs - INTERNAL - OTHER_NAMES == set(command.MODULES.values())
    assert programs > INTERNAL | OTHER_NAMES


def test_without_arguments_the_command_teaches() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    for line in lines:
        if line.startswith("  lamb_tpu "):
            assert line.split()[1] in command.MODULES
    assert "  lamb_tpu train --config=digits --workdir=runs/digits" in lines


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"lamb_tpu \d+\.\d+\.\d+ \(jax [\d.]+, Python [\d.]+\)\n", done.stdout)
    assert tiny.command("lamb_tpu", "--version").stdout == done.stdout


def helps(script: str) -> dict[str, str]:
    """Returns the help of every command and subcommand, each run in a fork of one process."""
    names = [[name] for name in command.MODULES]
    names += [
        ["reproduce", name] for name in ("list", "show", "run", "commands", "adopt", "report")
    ]
    names += [
        ["launch", name] for name in ("local", "tpu-vm", "queued-resource", "jobset", "slurm")
    ]
    done = tiny.python(
        "import os, runpy, sys\nfrom lamb_tpu import command, cli\n"
        f"for words in {names}:\n"
        "    print(f'\\f{\" \".join(words)}\\v', end='', flush=True)\n"
        "    if not os.fork():\n"
        f"        sys.argv = ['lamb_tpu', *words, '--help']\n        {script}\n"
        "        os._exit(1)\n"
        "    if os.wait()[1]:\n        sys.exit(f'{words} fails')\n"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return dict(part.split("\v") for part in done.stdout.split("\f")[1:])


def test_both_forms_of_every_command() -> None:
    """`lamb_tpu NAME` and `python -m lamb_tpu.NAME` print the same help, at most 80 columns wide."""
    by_name = helps("command.main()")
    by_module = helps(
        "name = sys.argv.pop(1); runpy.run_module(f'lamb_tpu.{name}', run_name='__main__', "
        "alter_sys=True)"
    )
    assert by_name == by_module
    for name, text in by_name.items():
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80, (name, max(lines, key=len))
        summary = command.summary(command.MODULES[name.split()[0]])
        assert " " in name or " ".join(summary.split()) in " ".join(text.split()), name
        assert not re.search(r"(?m)^ +--[a-z]+_|default: 'None'|\.py:$", text), name
        if "usage: " in text:  # the description ends with a full stop
            assert text.split("\n\n")[1].rstrip().endswith("."), name


@pytest.mark.parametrize("name", command.MODULES)
def test_help_comes_at_once(name: str) -> None:
    """Help takes less than 1.5 s of CPU time, a measure that does not depend on the machine's load.

    `models` may take 4 s, because its package imports JAX and Flax.
    """

    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = seconds()
    done = run(name, "--help", after="print([m for m in sys.modules], file=sys.stderr)")
    assert done.returncode == 0 and ("flags:" in done.stdout or "usage:" in done.stdout)
    assert seconds() - began < (1.5 if name != "models" else 4)
    imported = [module for module in HEAVY if f"'{module}'" in done.stderr]
    assert imported == ([] if name != "models" else ["jax", "flax"]), imported


@pytest.mark.long
def test_command_is_the_module() -> None:
    arguments = ("--config=digits", "--print-config", "--config.optimizer.b2=0.98")
    done, module = run("train", *arguments), tiny.command("lamb_tpu.train", *arguments)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == module.stdout
    done = run("train", "--config=digits")
    assert (done.returncode, done.stderr) == (2, "error: --workdir is missing; see --help\n")


@pytest.mark.long
def test_current_folder_is_searched_for_modules(tmp_path: pathlib.Path) -> None:
    """As with `python -m`, modules in the current folder are found, although the script is elsewhere."""
    script = tmp_path / "bin" / "lamb_tpu"
    script.parent.mkdir()
    script.write_text("from lamb_tpu.command import main\n\nmain()\n")
    (tmp_path / "my_net.py").write_text("def net(width: int = 7): ...\n")

    def printed(**environment: str) -> subprocess.CompletedProcess:
        model = "--config.model={'name': 'my_net:net'}"
        return subprocess.run(
            [sys.executable, str(script), "train", "--config=digits", "--print-config", model],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tiny.ROOT), **environment},
        )

    done = printed()
    assert done.returncode == 0, done.stderr
    assert "config.model.width = 7  # default of my_net:net\n" in done.stdout
    done = printed(PYTHONSAFEPATH="1")  # with this, Python does not search the current folder
    assert done.returncode == 2 and "needs the module 'my_net', which" in done.stderr


def test_errors() -> None:
    done = run("trian")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: lamb_tpu has no command 'trian'; did you mean train? The commands are: demo, train, "
    )
    done = run("train", "--help", before="sys.modules['ml_collections'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "error: lamb_tpu train needs ml_collections, which is not installed; install the packages "
        f"for training: pip install -e '{tiny.ROOT}[train]'\n"
    )
