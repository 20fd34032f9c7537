"""The command `lamb_tpu`, and how soon every command answers --help."""

import os
import pathlib
import resource
import subprocess
import sys

import pytest

from lamb_tpu import command
from tests import tiny

# What the package starts by itself.
INTERNAL = {"lamb_tpu.cluster.relay"}
HEAVY = ("jax", "flax", "orbax.checkpoint", "grain", "optax", "tensorboardX")


def run(*arguments: str, after: str = "pass", before: str = "pass"):
    return tiny.python(
        f"import sys\n{before}\nfrom lamb_tpu import command\n"
        f"sys.argv = ['lamb_tpu', *{list(arguments)}]\n"
        f"try:\n    command.main()\nfinally:\n    {after}"
    )


def test_all_commands_are_listed() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == run("--help").stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for name in command.MODULES:
        assert f"\n  {name} " in done.stdout
    assert "Trains a model by a recipe" in done.stdout
    # Every module of the package that can be run is one of them.
    package = pathlib.Path(command.__file__).parent
    programs = {
        ".".join(["lamb_tpu", *path.relative_to(package).with_suffix("").parts])
        for path in package.rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert programs - INTERNAL == set(command.MODULES.values()) and programs > INTERNAL


@pytest.mark.parametrize("name", command.MODULES)
def test_help_comes_at_once(name: str) -> None:
    """In less than 1.5 s, of computing: how long a test waits for a core says nothing.

    The package of `models` is that of the networks, which need JAX and Flax; their imports alone
    take a second.
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
    arguments = ("--config=digits", "--print_config", "--config.optimizer.b2=0.98")
    done, module = run("train", *arguments), tiny.command("lamb_tpu.train", *arguments)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == module.stdout
    done = run("train", "--config=digits")
    assert (done.returncode, done.stderr) == (2, "error: --workdir is missing; see --help\n")


@pytest.mark.long
def test_current_folder_is_searched_for_modules(tmp_path: pathlib.Path) -> None:
    """The module path of `python -m`, although the command is a script in another folder."""
    script = tmp_path / "bin" / "lamb_tpu"
    script.parent.mkdir()
    script.write_text("from lamb_tpu.command import main\n\nmain()\n")
    (tmp_path / "my_net.py").write_text("def net(width: int = 7): ...\n")

    def printed(**environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [
                sys.executable,
                str(script),
                "train",
                "--config=digits",
                "--print_config",
                "--config.model={'name': 'my_net:net'}",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tiny.ROOT), **environment},
        )

    done = printed()
    assert done.returncode == 0, done.stderr
    assert "config.model.width = 7  # default of my_net:net\n" in done.stdout
    done = printed(PYTHONSAFEPATH="1")  # asks for the opposite
    assert done.returncode == 2 and "finds no module 'my_net' from" in done.stderr


def test_mistakes() -> None:
    done = run("trian")
    assert done.returncode == 2
    assert done.stderr.startswith("error: lamb_tpu has no command 'trian'; it has: train, evaluate")
    done = run("train", "--help", before="sys.modules['ml_collections'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "error: lamb_tpu train needs ml_collections, which is not installed; install what training "
        "needs, as by pip install 'lamb_tpu[train]'\n"
    )
