"""Fuzzing: classification of outcomes, generators of inputs, comparison of results, a small session."""

import importlib.util
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from experiments.attack import __main__ as attack
from experiments.attack import bases, forks, inputs, kills, page, reasons
from experiments.attack.outcome import (
    ACCEPTED,
    HANG,
    KILLED,
    LEFT,
    MEMORY,
    RAW,
    REJECTED,
    TRACEBACK,
    UNCLEAR,
    End,
    classify,
)
from tests import tiny

SENTENCE = "error: --seeds=-1 must be at least 1\n"
TRACE = "Traceback (most recent call last):\n  File 'x'\nValueError: x\n"


@pytest.mark.parametrize(
    "end, outcome",
    [
        (End(2, "", SENTENCE, 0.1), REJECTED),
        (End(2, "", f"a warning\n{SENTENCE}", 0.1), REJECTED),
        (End(75, "", "preempted; start the same command again\n", 0.1), REJECTED),
        (End(0, "all is well\n", "", 0.1), ACCEPTED),
        # A traceback counts, whatever the exit status.
        (End(0, TRACE, "", 0.1), TRACEBACK),
        (End(2, "", f"{SENTENCE}{TRACE}", 0.1), TRACEBACK),
        (End(0, "", "Exception ignored in: <stdout>\n", 0.1), TRACEBACK),
        (End(-9, "", "", 50.0, HANG), HANG),
        (End(-9, "", "", 3.0, MEMORY), MEMORY),
        (End(0, "", "", 3.0, LEFT), LEFT),
        (End(-9, "", TRACE, 50.0, HANG), TRACEBACK),
        (End(-signal.SIGSEGV, "", "", 0.1), KILLED),
        (End(2, "", "error: a\x1b[31mb is unknown\n", 0.1), RAW),
        (End(0, "a\rb\x07", "", 0.1), RAW),
        # No error message, an empty message, and two messages.
        (End(1, "", "", 0.1), UNCLEAR),
        (End(1, "", "KeyError: 'x'\n", 0.1), UNCLEAR),
        (End(2, "", "error: \n", 0.1), UNCLEAR),
        (End(2, "", SENTENCE * 2, 0.1), UNCLEAR),
    ],
)
def test_classes(end: End, outcome: str) -> None:
    assert classify(end) == outcome


def test_statuses_that_need_no_sentence() -> None:
    end = End(141, "", "", 0.1)
    assert classify(end) == UNCLEAR
    assert classify(end, {141}) == REJECTED
    assert classify(End(-signal.SIGTERM, "", "", 0.1), {-signal.SIGTERM}) == REJECTED
    assert classify(End(141, "", TRACE, 0.1), {141}) == TRACEBACK


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The prepared files that generators change, made without training runs."""
    folder = tmp_path_factory.mktemp("prepared")
    bases._text(folder)
    bases._papers(folder / "papers")
    record = {"cell": "lamb", "seed": 0, "values": {"accuracy": 0.9}, "losses": [[1, 2.0]]}
    for name, content in {
        "papers/small/digits.jsonl": json.dumps(record) + "\n",
        "papers/small/digits.configs.json": '{"0": [{"batch_size": 8}]}',
        "papers/carried.json": json.dumps([{"table": "small/digits", "runs": [record]}]),
        "run/config.json": '{"batch_size": 8, "model.name": "mlp"}',
        "run/metrics.jsonl": '{"step": 1, "kind": "train", "loss": 1.0}\n',
        "run/run.jsonl": '{"from_step": 0}\n',
        "run/parameters.txt": "path\n",
        "run/checkpoints/4/position/data.json": '{"seconds": 1.0}',
        "plans/k.json": '{"sha256": "0", "compiled": {}}',
        "plans/k.hlo.gz": "",
        "prepared/train/manifest.json": '{"shards": ["a"]}',
        "exported/config.json": '{"model_type": "bert"}',
        "sweep/table.toml": "title = 1\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (folder / "exported/model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(4)
    )
    return folder


def test_same_seed_same_inputs(prepared: pathlib.Path) -> None:
    first, again, longer, other = (
        [
            (given.area, given.change, given.location, given.command())
            for given in attack.draw(seed, number, prepared)
        ]
        for seed, number in ((0, 80), (0, 80), (0, 120), (1, 80))
    )
    assert first == again == longer[:80] != other


def test_every_area_is_drawn(prepared: pathlib.Path) -> None:
    actual = attack.draw(0, 400, prepared)
    assert len({given.area for given in actual}) == len(attack.AREAS) >= 10
    assert len({given.module for given in actual}) >= 15


def test_nothing_is_written_outside(prepared: pathlib.Path) -> None:
    """The arguments of inputs name no files outside the input's folder that exist."""
    for given in attack.draw(2, 600, prepared):
        for word in given.arguments:
            value = word.partition("=")[2] if word.startswith("--") else word
            assert not value.startswith(("/", "..", "~/")) or value.startswith("/proc/x"), word
        if given.module.startswith("lamb_tpu.reproduce"):
            # Without --papers, the command would write to the records and pages of the checkout.
            assert "--papers" in " ".join(given.arguments) or given.change == "flag missing"


def test_changed_json() -> None:
    document = {"a": [1, {"b": "c"}], "d": {"e": 0.5}}
    text = json.dumps(document)
    changes, locations = set(), set()
    for seed in range(300):
        changed, change, location = inputs.change_json(random.Random(seed), text)
        changes.add(change)
        locations.add(location)
        if change not in ("number", "fraction"):
            assert changed != text
    assert changes == {*inputs.JSON, "key missing", "key unknown"}
    assert locations == {"the document", "a", "0", "1", "d", "e"}


def test_special_files(tmp_path: pathlib.Path) -> None:
    given = inputs.Input(
        "images",
        "x",
        "x",
        "x",
        [],
        files={
            "a/pipe": inputs.PIPE,
            "device": inputs.DEVICE,
            "loop": inputs.LOOP,
            "there": lambda data: data[:2],
            "folder": inputs.FOLDER,
        },
    )
    (tmp_path / "there").write_bytes(b"abc")
    inputs.make(given, tmp_path, tmp_path)
    assert (tmp_path / "a/pipe").is_fifo() and (tmp_path / "folder").is_dir()
    assert os.readlink(tmp_path / "device") == "/dev/zero"
    assert (tmp_path / "there").read_bytes() == b"ab"
    with pytest.raises(OSError, match="symbolic links"):
        (tmp_path / "loop").read_bytes()


def test_page() -> None:
    def row(number: int, area: str, outcome: str) -> page.Row:
        given = inputs.Input(area, "SIGTERM", "x|y\x1b", "lamb_tpu.train", ["a\x1b"])
        return page.Row(number, given, outcome, End(0, "", "", 0.1))

    rows = [
        row(0, "processes", REJECTED),
        row(1, "processes", ACCEPTED),
        row(2, "plans", HANG),
        row(3, "unknown area", ACCEPTED),
    ]
    assert [each.is_fault() for each in rows] == [False, False, True, True]
    assert page.counts(rows)[-1][:4] == ["all", "4", "1", "2"]
    actual = [
        kills.Kill("digits", "SIGKILL", 1.25, -9, ""),
        kills.Kill("digits", "", 0, 0, "differs"),
    ]
    text = page.text(rows, actual, "make attack", 60.0)
    assert "\x1b" not in text and "not reviewed" in text and "x\\|y" in text
    assert "| digits | 1 | 0 | 0 | 1.2 | differs |" in text
    assert "4 inputs and 1 kills" in text


def test_reasons_name_known_areas(prepared: pathlib.Path) -> None:
    areas = {given.area for given in attack.draw(0, 400, prepared)}
    assert {each.area for each in reasons.REASONS} <= areas


def test_schedule_of_kills() -> None:
    planned = kills.schedule(0, 60)
    sent = [each for case in planned.values() for each in case]
    assert len(sent) == 60 and len(planned) == len(kills.CASES) >= 17
    for case in planned.values():  # every command gets every signal
        assert {number for number, _ in case} == {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}
    assert planned == kills.schedule(0, 60) != kills.schedule(1, 60)


def test_differences_that_kills_would_show(tmp_path: pathlib.Path, trained: pathlib.Path) -> None:
    """The comparison finds lost records, leftover files and lost or older checkpoints, but ignores times."""
    import shutil

    case = kills.CASES[0]
    for name in ("alone", "killed"):
        shutil.copytree(trained, tmp_path / name / "new")
    end, changed = End(0, "", "", 1.0), tmp_path / "killed" / "new"

    def differences() -> str:
        faults = kills._differences(case, tmp_path / "alone", end, tmp_path / "killed", end)
        return " ".join(kill.fault for kill in faults)

    metrics = changed / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(each | {"seconds": 1.0}) + "\n" for each in records))
    assert differences() == ""
    metrics.write_text("".join(json.dumps(each) + "\n" for each in records[:-1]))
    assert differences() == "differs: metrics.jsonl"
    metrics.write_text("".join(json.dumps(each) + "\n" for each in records))
    (changed / "config.json.new").touch()
    assert differences() == "differs: config.json.new"
    (changed / "config.json.new").unlink()
    newest = changed / "checkpoints" / "12"
    shutil.rmtree(newest)
    assert "differs: checkpoints/12" in differences()
    shutil.copytree(changed / "checkpoints" / "8", newest)
    assert "checkpoints/12" in differences()


def test_faults_at_a_kill(tmp_path: pathlib.Path) -> None:
    assert kills._fault(End(-9, "", "", 1.0), signal.SIGKILL, tmp_path) == ""
    assert kills._fault(End(1, "", "", 1.0), signal.SIGTERM, tmp_path) == "status 1"
    assert kills._fault(End(-9, "", "", 1.0), signal.SIGTERM, tmp_path) == "status -9"
    assert kills._fault(End(75, TRACE, "", 1.0), signal.SIGTERM, tmp_path) == "traceback"
    output = End(75, "", "preempted at update 7, saved; start it again\n", 1.0)
    assert "is not there" in kills._fault(output, signal.SIGTERM, tmp_path)
    saved = tmp_path / "new" / "checkpoints" / "7"
    saved.mkdir(parents=True)
    (saved / "sha256.json").touch()
    assert kills._fault(output, signal.SIGTERM, tmp_path) == ""


@pytest.mark.long
def test_a_slice() -> None:
    """Runs 60 inputs, and kills six commands once each."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.attack", "--inputs=60", "--kills=6"],
        cwd=tiny.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 inputs and 6 kills" in done.stdout


def test_what_the_forks_share_can_be_imported() -> None:
    assert [name for name in forks._IMPORTED if importlib.util.find_spec(name) is None] == []
