"""Text that fits a terminal of 80 columns, and output that nobody takes."""

import ast
import doctest
import importlib
import pathlib
import subprocess
import sys

import pytest

from lamb_tpu import terminal
from lamb_tpu.errors import UserError
from lamb_tpu.terminal import fit, fit_docstring
from tests.shared import ROOT

COMMANDS = [  # whose help is their docstring
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
    assert fit(f"workdir: {path} and more").splitlines() == [
        "workdir:",
        f"    {path}",
        "    and more",
    ]


def test_docstring_is_refilled_paragraph_by_paragraph() -> None:
    long = "word " * 18
    text = "\n".join(
        [
            "A first line.",
            "",
            "  python -m a.command",
            "",
            f"{long}and so on",
            "to its end.",
            "",
            f"- item {long}",
            "  goes on",
            "- short item",
            "  stays",
            "--flag begins a line",
            "short",
        ]
    )
    lines = fit_docstring(text).splitlines()
    assert lines[:4] == text.splitlines()[:4] and max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    item = lines.index(next(line for line in lines if line.startswith("- item")))
    assert lines[item + 1].startswith("  ") and lines[-4:] == [
        "- short item",
        "  stays",
        "--flag begins a line",
        "short",
    ]


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


@pytest.mark.parametrize(
    "body, status, told",
    [
        ("print('x'); return 0", 2, "error: standard output cannot be written (No space left on d"),
        (
            "print('x', flush=True)",
            2,
            "error: standard output cannot be written (No space left on d",
        ),
        ("return 1", 1, ""),
        ("return 0", 0, ""),
        ("open('/nowhere/x')", 1, "Traceback"),
    ],
)
def test_full_output(body: str, status: int, told: str) -> None:
    code = f"from lamb_tpu import terminal\ndef main():\n    {body}\nterminal.run_and_exit(main)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == status and done.stderr.startswith(told), done.stderr
    assert bool(told) == bool(done.stderr) and "ignored" not in done.stderr


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


def test_docstrings() -> None:
    assert doctest.testmod(terminal).failed == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["show", "--name=", "x"], "--name is empty; give a value, or leave it out; see --help"),
        (["show", ""], "--path is empty; give a value"),
        (["show", "--nam=a", "x"], "unrecognized arguments: --nam=a; see --help"),
        (["hide"], "invalid choice: 'hide'"),
    ],
)
def test_mistakes_in_options_are_sentences(arguments: list[str], message: str) -> None:
    parser = terminal.Parser()
    kind = parser.add_subparsers(dest="kind").add_parser("show")
    kind.add_argument("--name")
    kind.add_argument("path")
    with pytest.raises(UserError, match=message):
        parser.parse_all(arguments)


@pytest.mark.parametrize("module", ["reproduce", "compare", "launch"])
def test_mistake_in_an_option_ends_a_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"lamb_tpu.{module}", "--no-such-flag=x"],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and line.startswith("error: "), line
