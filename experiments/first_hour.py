"""The first hour with lamb_tpu: runs a newcomer's commands at 80 columns and shows their output.

  python -m experiments.first_hour --write

With --write, writes experiments/first_hour.md. Paths of this machine, times and speeds are replaced
by words, so that the page does not depend on the machine. The program fails if a command ends with
an unexpected status, prints a traceback, or prints a line wider than 80 columns that is neither an
error nor a row of a table.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from lamb_tpu import terminal
from lamb_tpu.cluster import children
from lamb_tpu.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "experiments" / "first_hour.md"
_MOST_LINES = 26  # maximum lines of a command's output; the middle of a longer output is left out
_CONFIG = """\
from lamb_tpu.config import base_config


def get_config(argument=None):
    config = base_config()
    {}
    return config
"""

# Sections: title, commands, and the exit status of each. `lamb_tpu` is the installed command.
WALK: dict[str, list[tuple[str, int]]] = {
    "Getting help": [
        ("lamb_tpu", 0),
        ("lamb_tpu --version", 0),
        ("lamb_tpu --help", 0),
        ("lamb_tpu train --help", 0),
        ("lamb_tpu reproduce --help", 0),
        ("lamb_tpu completion bash > completion.bash && bash -n completion.bash", 0),
    ],
    "Typing errors": [
        ("lamb_tpu trian", 2),
        ("lamb_tpu train --config=digit --workdir=runs/digits", 2),
        ("lamb_tpu train --config=digits:bach=64 --workdir=runs/digits", 2),
        ("lamb_tpu train --config=digits --wordir=runs/digits", 2),
        ("lamb_tpu train --config=digits --workdir=runs/digits --config.batchsize=64", 2),
        ("lamb_tpu train --config=digits --workdir=runs/digits --config.batch_size=abc", 2),
    ],
    "A custom config": [
        ("lamb_tpu train --config=task.py --workdir=runs/task", 2),
        ("lamb_tpu train --config=batch.py --workdir=runs/batch", 2),
        ("lamb_tpu train --config=mine.py --workdir=runs/mine", 0),
    ],
    "Training": [
        ("lamb_tpu train --config=digits:smoke --workdir=runs/digits --profile=4", 0),
        ("lamb_tpu train --config=digits:smoke --workdir=runs/digits", 0),
        ("lamb_tpu train --config=digits:smoke,optimizer=adamw --workdir=runs/adamw", 0),
        ("lamb_tpu evaluate --workdir=runs/digits", 0),
    ],
    "Looking at runs": [
        ("lamb_tpu plots --workdir=runs/digits", 0),
        ("lamb_tpu compare runs/digits runs/adamw", 0),
        ("lamb_tpu export --workdir=runs/digits --output=exported", 2),
        ("lamb_tpu predict --checkpoint=runs/digits --text='a [MASK] b'", 2),
    ],
    "Papers and pods": [
        ("lamb_tpu reproduce show lamb/mnist", 0),
        (
            "lamb_tpu legw --base-batch=128 --base-lr=0.1 --base-warmup-epochs=0.1 \\\n"
            "    --batches=128..1024 --num_examples=60000",
            0,
        ),
        ("lamb_tpu plan --config=digits:batch=4096 --topology=v3-8", 0),
    ],
}
_CONFIGS = {
    "task.py": "config.task.input_std = 16",
    "batch.py": "config.batchsize = 64",
    "mine.py": "config.duration = '2 epochs'",
}


def walk(folder: pathlib.Path) -> str:
    """Runs all commands in a folder and returns the page.

    Raises:
      SystemExit: a command behaved unexpectedly.
    """
    for name, line in _CONFIGS.items():
        (folder / name).write_text(_CONFIG.format(line))
    paragraphs = [
        "# The first hour",
        "",
        "Commands that a newcomer runs, and their output at 80 columns; stdout is not a "
        "terminal.\nMade by `python -m experiments.first_hour --write`, which replaces times, "
        "speeds and paths of\nthe machine, and shortens long output. Some configs change "
        "`base_config()` by one line:\n",
        *(f"- `{name}`: `{line}`" for name, line in _CONFIGS.items()),
    ]
    for title, commands in WALK.items():
        paragraphs += ["", f"## {title}"]
        for command, expected in commands:
            print(f"$ {command}", file=sys.stderr, flush=True)
            paragraphs += ["", "```", f"$ {command}", *_run(command, expected, folder), "```"]
    return "\n".join(paragraphs) + "\n"


def _run(command: str, expected: int, folder: pathlib.Path) -> list[str]:
    """Returns the shortened output of a command, with its exit status if that is not 0."""
    function = f'lamb_tpu() {{ "{sys.executable}" -m lamb_tpu "$@"; }}\n'
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "c"),
    }
    done = subprocess.run(
        ["bash", "-c", function + command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=children.following(),
    )
    return _shown(command, expected, done, folder)


def _shown(
    command: str, expected: int, done: subprocess.CompletedProcess[str], folder: pathlib.Path
) -> list[str]:
    """Returns the output of a finished command; fails if the command behaved unexpectedly."""
    lines = [
        _neutral(line, folder)
        for line in done.stdout.rstrip().splitlines()
        # Matplotlib prints these when it first uses a new cache folder.
        if not line.startswith("WARNING:matplotlib.font_manager")
    ]
    # An error is one long line, and a table's last column may exceed the terminal's width.
    wide = [
        line
        for line in lines
        if len(line) > terminal.COLUMNS and not re.match(r"error: |  \S.*\S {2,}\S", line)
    ]
    if done.returncode != expected or "Traceback" in done.stdout or wide:
        sys.exit(f"error: {command!r} ended with {done.returncode}, wide: {wide}\n{done.stdout}")
    if len(lines) > _MOST_LINES:
        first, last = lines[: _MOST_LINES - 8], lines[-7:]
        lines = [*first, f"... ({len(lines) - len(first) - len(last)} more lines)", *last]
    lines = [segment for line in lines for segment in terminal.fit(line).split("\n")]
    return [*lines, *([f"(status {expected})"] if expected else [])]


def _neutral(line: str, folder: pathlib.Path) -> str:
    """Returns a line of output without values that vary between runs and machines."""
    line = line.replace(str(folder), ".").replace(str(ROOT), "CHECKOUT")
    for pattern, text in (
        (r"\d{4}(_\d\d){5}", "TIME"),
        (r"[\d,.]+ (examples|updates|tokens)/s", r"N \1/s"),
        (r"\d+:\d\d( left)?", r"M:SS\1"),
        (r"(?<![\w.-])[\d.]+(e-?\d+)? (s|min|seconds)\b", r"N \2"),
    ):
        line = re.sub(pattern, text, line)
    return line


def main() -> None:
    """Prints the page, or writes it."""
    parser = terminal.Parser(
        prog="python -m experiments.first_hour", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    try:
        options = parser.parse_all(None)
    except UserError as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory() as folder:
        page = walk(pathlib.Path(folder))
    if options.write:
        PAGE.write_text(page)
        print(PAGE)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
