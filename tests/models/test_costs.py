"""The stored table of networks; tests/models/test_listing.py counts the costs again."""

import doctest
import json

import pytest

from lamb_tpu import models
from lamb_tpu.models import costs
from lamb_tpu.models.__main__ import main


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "parameters", "multiply-adds", "input"]
    assert [line.split()[0] for line in lines[1:]] == list(models.MODULES)
    assert lines[1].endswith("  128 tokens")
    assert lines[2].split(maxsplit=3) == ["davidnet", "6,573,120", "379,261,952", "32 x 32 x 3"]
    assert main(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in listed] == list(models.MODULES)
    assert listed[1] == {
        "name": "davidnet",
        "parameters": 6_573_120,
        "multiply_adds": 379_261_952,
        "input_shape": [32, 32, 3],
    }
    assert main(["--jsn"]) == 2
    assert (
        "unrecognized arguments: --jsn; see --help; did you mean --json?" in capsys.readouterr().err
    )


def test_docstrings() -> None:
    assert doctest.testmod(costs) == (0, 1)
