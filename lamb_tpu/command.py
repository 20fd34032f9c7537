"""The command `lamb_tpu`, which runs every command of the package by its name.

`lamb_tpu train ...` is `python -m lamb_tpu.train ...`: the same module is run the same way.
"""

# The standard library only: without the extra `train`, the command must still start, to say what is
# missing.
import ast
import os
import pathlib
import runpy
import sys
import textwrap

MODULES = {
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
}


def main() -> None:
    """Runs the command that the first argument names, with the others as its own."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return
    if name not in MODULES:
        print(
            f"error: lamb_tpu has no command {name!r}; it has: {', '.join(MODULES)}",
            file=sys.stderr,
        )
        sys.exit(2)
    # The command's own arguments begin at index 1.
    del sys.argv[1]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for modules of the user's own
    try:
        # alter_sys makes the module the __main__ whose docstring is the head of its --help.
        runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        print(
            f"error: lamb_tpu {name} needs {error.name}, which is not installed; install what "
            "training needs, as by pip install 'lamb_tpu[train]'",
            file=sys.stderr,
        )
        sys.exit(2)


def _help() -> str:
    width = max(map(len, MODULES))
    lines = [
        textwrap.fill(
            _summary(module),
            80,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
        for name, module in MODULES.items()
    ]
    return "\n".join(
        ["usage: lamb_tpu COMMAND ...", "", *lines, "", "lamb_tpu COMMAND --help tells more."]
    )


def _summary(module: str) -> str:
    """Returns the first line of a module's docstring without importing it, which takes seconds."""
    path = pathlib.Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return str(ast.get_docstring(ast.parse(path.read_text()))).partition("\n")[0]
