"""The page of the first hour has every command, and unexpected output of a command is an error."""

import pathlib

import pytest

from experiments import first_hour


def test_page_has_every_command_at_80_columns() -> None:
    page = first_hour.PAGE.read_text()
    for title, commands in first_hour.WALK.items():
        assert f"\n## {title}\n" in page
        for command, _ in commands:
            assert f"\n```\n$ {command}\n" in page, "run python -m experiments.first_hour --write"
    blocks = page.split("```")[1::2]
    assert len(blocks) == sum(map(len, first_hour.WALK.values()))
    for block in blocks:
        assert "Traceback" not in block and str(first_hour.ROOT) not in block
        # A path is never wrapped, so that it can be copied.
        wide = [
            line
            for line in block.splitlines()
            if len(line) > 80 and not line.startswith(("$", "error: "))
        ]
        assert [line for line in wide if " " in line.strip()] == []


def test_commands_that_fail_the_walk(tmp_path: pathlib.Path) -> None:
    assert first_hour._run("echo 12 examples/s; exit 2", 2, tmp_path) == [
        "N examples/s",
        "(status 2)",
    ]
    lines = first_hour._run("seq 1 40", 0, tmp_path)
    assert lines[17:20] == ["18", "... (15 more lines)", "34"] and len(lines) == 26
    for command in ("exit 1", "echo Traceback", "printf '%081d' 0"):
        with pytest.raises(SystemExit, match="ended with"):
            first_hour._run(command, 0, tmp_path)
