"""Every value of a record is checked when it is read; damaged records are omitted and reported."""

import json
import pathlib
import re
from typing import Any

import pytest

from lamb_tpu.reproduce import jobs, loading, records
from tests.raising import rejected
from tests.reproduce.papers import record

FLAT = [{"batch_size": 128, "seed": 0}]
DIGEST = jobs.config_hash(FLAT)


KNOWN = {DIGEST: FLAT}
_OTHER = "0" * 12


def files(folder: pathlib.Path, lines: list[str], configs: Any = KNOWN) -> records.Files:
    path = folder / "table.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    path.with_suffix(".configs.json").write_text(json.dumps(configs))
    return records.read(path, path.with_suffix(".configs.json"))


def line(seed: int = 0, **changes: Any) -> str:
    return json.dumps(record("lamb", seed, 0.9, config=DIGEST) | changes)


def test_committed_records_are_sound() -> None:
    count = 0
    for path in loading.folder().rglob("*.jsonl"):
        read = records.read(path, path.with_suffix(".configs.json"))
        assert read.damage == []
        count += len(read.records)
    assert count > 1400


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("cell", None, "cell=None is not valid; use the type str"),
        ("cell", "a\nb", "cell='a\\\\nb' is not valid"),
        ("seed", -1, "seed=-1 is not valid; use at least 0"),
        ("seed", 1.5, "seed=1.5 is not valid; use the type int"),
        ("seed", 10**30, "seed=10000.* is not valid; use at most"),
        ("factor", 0, "factor=0 is not valid; use above 0"),
        ("values", [], "values=.. is not valid; use the type"),
        ("values", {"accuracy": "high"}, "values.accuracy='high' is not valid; use the type float"),
        ("values", {"accuracy": None}, "values.accuracy=None is not valid; use the type float"),
        ("values", {"accuracy": float("nan")}, "values.accuracy=nan is not valid; use at least"),
        ("updates", True, "updates=True is not valid; use the type int"),
        pytest.param(
            "updates",
            10**3999,
            r"updates=a number of .* is not valid; use at most 1e\+15",
            id="digits",
        ),
        pytest.param("seconds", 10**400, "seconds=1000", id="seconds"),
        ("seconds", float("inf"), "seconds=inf is not valid; use at most"),
        ("seconds", -1.0, "seconds=-1.0 is not valid; use at least 0"),
        ("batch", "128", "batch='128' is not valid; use the type int"),
        ("batch", 0, "batch=0 is not valid; use at least 1"),
        ("config", "x", "config='x' is not valid"),
        (
            "config",
            "0" * 12,
            "config='000000000000' is not the hash of valid configs in table.configs.json",
        ),
        ("devices", [], "devices=.. is not valid; use the type int"),
        ("jax", 5, "jax=5 is not valid; use the type str"),
        ("evaluations", {}, "evaluations={} is not valid; use a list"),
        ("evaluations", [[1, 2], [3]], r"evaluations\[2\]=\[3\] is not valid"),
        ("losses", [[1, "x"]], r"losses\[1\]\[2\]='x' is not valid; use the type float"),
        ("losses", [[1, float("nan")]], r"losses\[1\]\[2\]=nan is not valid; use at least"),
        ("ratios", [], "ratios=.. is not valid; use a section of keys"),
        ("ratios", {"a": 5}, "ratios.a=5 is not valid; use a list"),
        ("ratios", {"a": [[1, 1.0]], "b": []}, "ratios must have the same updates, in"),
        ("ratios", {"a": [[2, 1.0], [1, 1.0]]}, "ratios must have .* in ascending order"),
        ("examples", -1, "examples=-1 is not valid; use at least 0"),
        ("learning_rate", "0.1", "learning_rate='0.1' is not valid; use the type float"),
        ("cell", "\ud800", "cell='.*ud800' is not valid"),
        ("values", {"accuracy": "\ud800"}, "accuracy has a lone surrogate|must be of type float"),
        ("values", {"\ud800": 1.0}, "values=.* is not valid"),
        ("processor", 3, "processor=3 is not valid; use the type str"),
    ],
)
def test_damage(tmp_path: pathlib.Path, key: str, value: Any, message: str) -> None:
    read = files(tmp_path, [line(1), line(**{key: value}), line(2)])
    assert [actual["seed"] for _, actual in read.records] == [1, 2]
    (damage,) = read.damage
    path = tmp_path / "table.jsonl"
    assert damage.startswith(f"line 2 of {path}: ") and len(damage) < 300 + len(str(path))
    assert re.search(message, damage)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("5", "is not a JSON object"),
        pytest.param("9" * 5000, "is not JSON", id="digits"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
        ("{}", "cell is missing"),
        (line(1), "has the cell, scale, seed and factor of line 1"),
    ],
)
def test_lines(tmp_path: pathlib.Path, text: str, message: str) -> None:
    read = files(tmp_path, [line(1), text, "", line(2)])
    assert [number for number, _ in read.records] == [1, 4]
    (damage,) = read.damage
    assert message in damage and damage.startswith(f"line 2 of {tmp_path / 'table.jsonl'}")


def test_a_file_without_its_last_newline_has_its_last_record(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.jsonl"
    files(tmp_path, [])
    path.write_text(line())
    assert len(records.read(path, path.with_suffix(".configs.json")).records) == 1


@pytest.mark.parametrize(
    "configs, message",
    [
        ([], "configs.json is ..; it must map hashes to configs"),
        (None, "configs.json is None"),
        (
            {_OTHER: FLAT},
            f"the hash '{_OTHER}' have been changed: they now have the hash '{DIGEST}'",
        ),
        ({"x" * 5000: FLAT}, rf"the hash 'xx.{{,99}}\.\.\. have been changed: .* '{DIGEST}'"),
        ({_OTHER: []}, "0{12}=.. is not valid; use at least 1 items"),
        ({_OTHER: 5}, "0{12}=5 is not valid; use a list"),
        ({_OTHER: [5]}, r"0{12}\[1\]=5 is not valid; use a section of keys"),
        ({_OTHER: [{"seed": "a"}]}, r"0{12}\[1\].seed='a' is not valid; use the type int"),
        ({_OTHER: [{"model": {}}]}, r"0{12}\[1\].model={} is not valid; use the type"),
    ],
)
def test_configs(tmp_path: pathlib.Path, configs: Any, message: str) -> None:
    is_object = isinstance(configs, dict)
    read = files(tmp_path, [line()], KNOWN | configs if is_object else configs)
    assert re.search(message, read.damage[0])
    # A record whose config is missing is omitted too.
    assert len(read.records) == is_object


def carried(*runs: Any, table: Any = "a") -> list[dict[str, Any]]:
    return [{"table": table, "form": "", "runs": runs}]


def run(configs: Any = FLAT, **changes: Any) -> dict[str, Any]:
    return {"record": json.loads(line(**changes)), "configs": configs}


@pytest.mark.parametrize(
    "content, key, problem",
    [
        ([], "", "has no records"),
        (carried(), "", "has no records"),
        ({}, "", "is neither a workdir nor a file of `run --carry` (its content: content={}"),
        (carried(run(5)), "", "its content: [1].runs[1].configs=5 is not valid; use a list"),
        (carried(table=[]), "", "[1].table=[] is not valid; use the type str"),
        (
            carried(run([{}])),
            f": the configs stored under the hash '{DIGEST}'",
            "have been changed",
        ),
        (carried(run(seconds=-1)), ": seconds", "is not valid"),
    ],
)
def test_carried(tmp_path: pathlib.Path, content: Any, key: str, problem: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with rejected(f"record 1 of a in {path}{key}" if key else path, ..., problem):
        records.read_carried(path)


def test_a_record_that_could_not_be_read_is_not_written() -> None:
    with rejected("the record of lamb, seed 0: updates", None, "is not valid"):
        records.dump(record("lamb", 0, 0.9, updates=None))
