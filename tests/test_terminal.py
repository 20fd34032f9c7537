"""Tests text that must fit a terminal of 80 columns, and output that cannot be written."""

import ast
import contextlib
import doctest
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from rich.console import Console

from lamb_tpu import terminal
from lamb_tpu.errors import UserError
from lamb_tpu.terminal import fit, fit_docstring
from tests import tiny
from tests.shared import ROOT

COMMANDS = [  # commands whose help is their docstring
    path
    for path in sorted((ROOT / "lamb_tpu").rglob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text() and ".run_main(" in path.read_text()
]


def test_lines_that_fit_stay_as_they_are() -> None:
    text = "\n".join(["a  table   row", "", "x" * 80, "  indented", "path/" + "y" * 90])
    assert fit(text) == text


def test_long_lines_break_between_words_and_nothing_is_lost() -> None:
    line = "  data: " + ", ".join(f"word-{number}" for number in range(30))
    lines = fit(f"before\n{line}\nafter").splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and len(lines) > 4
    assert max(map(len, lines)) <= 80
    assert all(part.startswith("      word-") for part in lines[2:-1])
    assert " ".join(" ".join(lines[1:-1]).split()) == line.strip()


def test_a_path_is_never_broken() -> None:
    path = "/" + "/".join(["a-long folder".replace(" ", "_")] * 9)
    lines = fit(f"workdir: {path} and more").splitlines()
    assert lines == ["workdir:", f"    {path}", "    and more"]


def test_docstring_is_refilled_paragraph_by_paragraph() -> None:
    long = "word " * 18
    text = (
        f"A first line.\n\n  python -m a.command\n\n{long}and so on\nto its end.\n\n- item {long}\n"
        "  goes on\n- short item\n  stays\n--flag begins a line\nshort"
    )
    lines = fit_docstring(text).splitlines()
    assert lines[:4] == text.splitlines()[:4] and max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    item = lines.index(next(line for line in lines if line.startswith("- item")))
    assert lines[item + 1].startswith("  ")
    assert lines[-4:] == ["- short item", "  stays", "--flag begins a line", "short"]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstring_of_a_command_fits_where_its_help_shows_it(path: pathlib.Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    lines = fit_docstring(text).splitlines()
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    "module",
    ["lamb_tpu.models.__main__", "lamb_tpu.data.prepare_text", "lamb_tpu.data.images.check"],
)
def test_help_of_argparse_fits(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8 and [line for line in lines if len(line) > 80] == []


LOST = "error: standard output cannot be written (No space left on d"


@pytest.mark.parametrize(
    "body, status, printed",
    [
        ("print('x'); return 0", 2, LOST),
        ("print('x', flush=True)", 2, LOST),
        ("return 1", 1, ""),
        ("return 0", 0, ""),
        ("open('/nowhere/x')", 1, "Traceback"),
    ],
)
def test_full_output(body: str, status: int, printed: str) -> None:
    code = f"from lamb_tpu import terminal\ndef main():\n    {body}\nterminal.run_and_exit(main)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == status and done.stderr.startswith(printed), done.stderr
    assert bool(printed) == bool(done.stderr) and "ignored" not in done.stderr


def test_reader_that_has_seen_enough() -> None:
    code = (
        "from lamb_tpu import terminal\nterminal.run_and_exit(lambda: print('line\\n' * 100_000))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


BODIES = {
    "a line": "def main(): print('line')",
    "flushed": "def main(): print('line', flush=True)",
    "an exit": "def main(): print('line'); sys.exit(0)",
}


ENDS = [
    "from lamb_tpu import cli; cli.run_main(main)",
    "from lamb_tpu import terminal; terminal.run_and_exit(main)",
]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("run", ENDS)
def test_closed_pipe(run: str, body: str) -> None:
    done = with_closed_pipe(sys.executable, "-c", f"import sys\n{body}\n{run}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["lamb_tpu"],
        ["lamb_tpu.reproduce", "show", "lamb/mnist"],
        ["lamb_tpu.reproduce", "--help"],
        ["lamb_tpu.train", "--help"],
        ["lamb_tpu.models"],
        ["lamb_tpu.compare", "--help"],
        ["lamb_tpu.launch", "slurm", "--help"],
        ["lamb_tpu.data.prepare_text", "--help"],
    ],
)
def test_closed_pipe_of_a_command(words: list[str]) -> None:
    done = with_closed_pipe(sys.executable, "-m", *words)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_counts_more_than_a_closed_pipe() -> None:
    done = with_closed_pipe(
        sys.executable,
        "-c",
        "from lamb_tpu import cli; from lamb_tpu.errors import UserError\n"
        "def main():\n    print('line')\n    raise UserError('wrong')\n"
        "cli.run_main(main)",
    )
    assert (done.returncode, done.stderr) == (2, "error: wrong\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_shell_has_closed(closed: str) -> None:
    code = (
        "from lamb_tpu import cli\n"
        "def main():\n    print('line')\n    assert open('/dev/null').fileno() > 2\n"
        "cli.run_main(main)"
    )
    command = f"{shlex.join([sys.executable, '-c', code])} {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT).returncode == 0


def with_closed_pipe(*command: str) -> subprocess.CompletedProcess:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("run", ENDS)
def test_current_folder_is_removed(tmp_path: pathlib.Path, run: str) -> None:
    code = (
        f"def main(): print('went on')\nimport os; os.chdir({str(tmp_path)!r}); "
        f"os.rmdir({str(tmp_path)!r})\n{run}"
    )
    done = tiny.python(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the current folder no longer exists; change to another folder\n"


def test_output_that_may_be_lost(capfd: pytest.CaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone, contextlib.redirect_stdout(gone):
        with terminal.lasting():
            for _ in range(3):
                print("line", flush=True)
            Console(file=sys.stdout).print("line")
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "standard output cannot be written (Broken pipe); the run continues without it"
    ]


def test_docstrings() -> None:
    assert doctest.testmod(terminal).failed == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["show", "--name=", "x"], "--name is empty; give a value, or omit the flag$"),
        (["show", ""], "--path is empty; give a value"),
        (["show", "--nam=a", "x"], "unrecognized arguments: --nam=a; see --help"),
        (["hide"], "invalid choice: 'hide'"),
    ],
)
def test_errors_in_options(arguments: list[str], message: str) -> None:
    parser = terminal.Parser()
    kind = parser.add_subparsers(dest="kind").add_parser("show")
    kind.add_argument("--name")
    kind.add_argument("path")
    with pytest.raises(UserError, match=message):
        parser.parse_all(arguments)


@pytest.mark.parametrize("module", ["reproduce", "compare", "launch"])
def test_an_error_in_an_option_ends_a_command(module: str) -> None:
    done = tiny.command(f"lamb_tpu.{module}", "--no-such-flag=x", fresh=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and line.startswith("error: "), line


ODD = "a\x1b]0;owned\x07\r\x9b2J\u202eb\udcff"
SAFE = r"a\x1b]0;owned\x07\r\x9b2J\u202eb\udcff"


def test_all_that_a_command_prints_is_safe() -> None:
    """The streams are guarded, not each call of `print`; rich still writes colours and bars."""
    code = f"""
import sys
from rich.console import Console
from lamb_tpu import terminal
from lamb_tpu.errors import UserError

def main():
    print({ODD!r})
    print({ODD!r}, "next", sep="\\n", file=sys.stderr)
    sys.stdout.writelines([{ODD!r}, "\\n"])
    Console(file=sys.stdout, force_terminal=True).print("[red]bar", style="bold")
    print("\x1b[?25h", end="")
    terminal.protect()
    print("\x1b")
    return 3

terminal.run_and_exit(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert done.returncode == 3, done.stderr
    assert done.stderr.decode() == f"{SAFE}\nnext\n"
    lines = done.stdout.decode().splitlines()
    assert lines[:2] == [SAFE, SAFE]
    assert lines[2].startswith("\x1b[") and "bar" in lines[2]
    assert lines[3:] == ["\x1b[?25h\\x1b"]


def test_cells_and_lines_are_safe() -> None:
    assert fit(f"one {ODD}\ntwo") == f"one {SAFE}\ntwo"
    assert terminal.columns([(f"x\n{ODD}", "y")]) == f"  x\\n{SAFE}  y"


@pytest.mark.parametrize(
    "command",
    [
        ["lamb_tpu.predict", "--checkpoint=x", "--text=a \udcff [MASK]"],
        ["lamb_tpu.data.prepare_text", "--input=\udcff", "--output=x"],
        ["lamb_tpu.launch", "slurm", "--workdir=\udcff"],
    ],
)
def test_arguments_that_are_not_utf8_are_rejected(command: list[str]) -> None:
    done = tiny.command(*command, fresh=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert re.fullmatch(r"error: the argument .*--.*\\udcff.* is not UTF-8; .*\n", done.stderr)


@pytest.mark.parametrize(
    "text, message",
    [
        ("3.5", "'3.5' is not a whole number"),
        ("1e3", "'1e3' is not a whole number"),
        ("0", "0 is less than 1"),
        (str(10**12), "1000000000000 is more than 1,000, the largest"),
        ("9" * 5_000, "'999.* is not a whole number"),
    ],
)
def test_counts_of_options(text: str, message: str) -> None:
    parser = terminal.Parser()
    parser.add_argument("--number", type=terminal.count(1, 1_000))
    with pytest.raises(UserError, match=f"^argument --number: {message}"):
        parser.parse_all([f"--number={text}"])


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", "many"])
def test_numbers_of_options(text: str) -> None:
    parser = terminal.Parser()
    parser.add_argument("--seconds", type=terminal.number(0, 1e8))
    with pytest.raises(UserError, match="^argument --seconds: .* is not a number"):
        parser.parse_all([f"--seconds={text}"])


def test_words_that_are_no_text() -> None:
    parser = terminal.Parser()
    parser.add_argument("--word")
    with pytest.raises(UserError, match=r"the argument '--word=\\udcff' is not UTF-8; use"):
        parser.parse_all(["--word=\udcff"])
    with pytest.raises(UserError, match="--word is empty; give a value, or omit the flag"):
        parser.parse_all(["--word= "])
    with pytest.raises(UserError, match="--word must not be --; give a value, or omit the flag"):
        parser.parse_all(["--word=--"])


def test_an_option_has_its_metavar_after_the_flag() -> None:
    parser = terminal.Parser()
    parser.option("--output=FILE.png", "where", default="a.png")
    parser.option("--run", "run it", action="store_true")
    assert "--output FILE.png  where" in parser.format_help()
    actual = parser.parse_all(["--output=b.png", "--run"])
    assert (actual.output, actual.run) == ("b.png", True)
