"""The command `lamb_tpu`, which runs any command of the package by its name.

`lamb_tpu train ...` runs the same module as `python -m lamb_tpu.train ...`.
"""

# Import only the standard library: without the extra `train`, the command must still start and
# name the missing packages.
import ast
import os
import pathlib
import platform
import runpy
import sys
import textwrap
from importlib import metadata
from typing import NoReturn

import lamb_tpu
from lamb_tpu import terminal
from lamb_tpu.errors import hint

# The module of each command. `python -m lamb_tpu.NAME` also runs it; for a module such as
# lamb_tpu.data.prepare_text, lamb_tpu/prepare_text.py calls `run`.
MODULES = {
    "demo": "lamb_tpu.demo",
    "train": "lamb_tpu.train",
    "evaluate": "lamb_tpu.evaluate",
    "predict": "lamb_tpu.predict",
    "export": "lamb_tpu.export",
    "plan": "lamb_tpu.plan.__main__",
    "launch": "lamb_tpu.launch.__main__",
    "sweep": "lamb_tpu.sweep",
    "compare": "lamb_tpu.compare",
    "legw": "lamb_tpu.legw",
    "critical_batch": "lamb_tpu.critical_batch.__main__",
    "reproduce": "lamb_tpu.reproduce.__main__",
    "plots": "lamb_tpu.plots",
    "models": "lamb_tpu.models.__main__",
    "prepare_text": "lamb_tpu.data.prepare_text",
    "check_images": "lamb_tpu.data.images.check",
    "completion": "lamb_tpu.completion",
}
_SHORT = """\
usage: lamb_tpu COMMAND ...

Try it on handwritten digits, which come with the package. The demo takes three
minutes, the other commands seconds:

  lamb_tpu demo
  lamb_tpu train --config=digits --workdir=runs/digits
  lamb_tpu evaluate --workdir=runs/digits
  lamb_tpu plots --workdir=runs/digits

lamb_tpu --help lists all commands, and lamb_tpu COMMAND --help explains one.
"""


def main() -> None:
    """Runs the command named by the first argument with the remaining arguments."""
    if len(sys.argv) == 1:
        _print(_SHORT)
    name = sys.argv[1]
    if name in ("-h", "--help", "help"):
        _print(_help())
    if name in ("-V", "--version"):
        _print(
            f"lamb_tpu {lamb_tpu.__version__} (jax {_jax()}, Python {platform.python_version()})"
        )
    # Accept - and _, as in flags.
    if name.replace("-", "_") not in MODULES:
        near = hint(name, MODULES) or "."
        _fail(f"lamb_tpu has no command {name!r}{near} The commands are: {', '.join(MODULES)}")
    # Remove the command's name, so that its arguments begin at index 1.
    del sys.argv[1]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # like `python -m`, for the user's modules
    run(name.replace("-", "_"))


def run(name: str) -> None:
    """Runs a command's module as a program with the arguments in `sys.argv`."""
    try:
        # alter_sys makes the module sys.modules["__main__"]; --help begins with its docstring.
        runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        _fail(f"lamb_tpu {name} needs {error.name}, which is not installed; {_remedy()}")


def _remedy() -> str:
    """Returns an instruction to install the packages that training needs."""
    checkout = pathlib.Path(lamb_tpu.__file__).parents[1]
    if (checkout / "pyproject.toml").exists():
        return f"install the packages for training: pip install -e '{checkout}[train]'"
    # lamb_tpu is not on PyPI, so it must be installed from a checkout.
    return (
        "install the packages for training, in the folder of a checkout of lamb_tpu: "
        "pip install '.[train]'"
    )


def _jax() -> str:
    try:
        return metadata.version("jax")
    except metadata.PackageNotFoundError:
        return "not installed"


def _print(text: str) -> NoReturn:
    terminal.run_and_exit(lambda: print(text.rstrip()) or 0)  # type: ignore[func-returns-value]


def _fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _help() -> str:
    width = max(map(len, MODULES))
    lines = [
        textwrap.fill(
            summary(module),
            80,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
        )
        for name, module in MODULES.items()
    ]
    return "\n".join(
        [
            "usage: lamb_tpu COMMAND ...",
            "",
            *lines,
            "",
            "lamb_tpu COMMAND --help explains a command. `python -m lamb_tpu.COMMAND` runs",
            "the same command. lamb_tpu --version prints the version.",
        ]
    )


def summary(module: str) -> str:
    """Returns the first line of a module's docstring; does not import the module, which would be slow."""
    path = pathlib.Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return str(ast.get_docstring(ast.parse(path.read_text()))).partition("\n")[0]
