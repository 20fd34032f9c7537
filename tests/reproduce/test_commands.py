"""The printed commands give the configs of their table; the script checks that its variables are set."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from lamb_tpu import cli, overrides
from lamb_tpu.reproduce import commands, jobs
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.tables import Scale, Table
from tests import first_update
from tests.raising import rejected
from tests.reproduce.papers import TABLE, write

ALL = load_all(folder())
ROOT = pathlib.Path(__file__).resolve().parents[2]


def parsed(words: list[str]) -> tuple[ConfigDict, dict[str, str]]:
    """Returns the config of a command of `lamb_tpu.train`, and its other flags."""
    changes, rest = overrides.take(cli._with_path(["train", *words]))
    values, argv = flags.FlagValues(), list(rest)
    config_flags.DEFINE_config_file("config", sys_argv=argv, flag_values=values, lock_config=True)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_integer("cpu_devices", 1, "", flag_values=values)
    values([word.replace("--cpu-devices", "--cpu_devices") for word in argv])
    overrides.apply(values["config"].value, changes)
    return values["config"].value, {"workdir": values.workdir, "cpu_devices": values.cpu_devices}


def printed(lines: list[str]) -> list[list[str]]:
    """Returns the arguments of each printed command of `lamb_tpu.train`."""
    actual = [shlex.split(line) for line in lines if not line.startswith(("#", ":"))]
    assert all(words[:3] == ["python", "-m", "lamb_tpu.train"] for words in actual)
    return [words[3:] for words in actual]


def bash(script: str, folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a folder, with a fake `python` that prints the arguments of each command."""
    fake = folder / "python"
    fake.write_text('#!/bin/sh\necho "$3" "$4" "$5"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = ["bash", "-c", script]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("key", ALL)
def test_every_table_has_a_smoke_scale_without_data(key: str) -> None:
    table = ALL[key]
    if all(cell.unknown == "settings not published" for cell in table.cells.values()):
        return  # no cell can be run
    smoke = table.scales["smoke"]
    cells = [cell for cell in table.cells.values() if not cell.unknown]
    assert commands.needs(table, smoke, cells, "DATA") == {}
    # The smoke scale describes how it differs, and has as many stages as the paper's scale.
    assert "to try out" in " ".join(smoke.about.split())
    assert {len(scale.stages) for scale in table.scales.values()} == {len(smoke.stages)}


@pytest.mark.parametrize("key", ALL)
def test_every_printed_command_has_the_config_of_its_cell(key: str) -> None:
    table = ALL[key]
    for scale in table.scales.values():
        cells = [cell for cell in table.cells.values() if not cell.unknown]
        left = printed(commands.here(table, scale, cells, "/data sets"))
        for cell in cells:
            # The data folder changes no result, so it is not in the hash.
            stages = jobs.stages(Job(table, scale, cell, 0))
            mine = [parsed(left.pop(0)) for _ in stages]
            configs = [config for config, _ in mine]
            assert _hash(configs) == _hash([stage.config() for stage in stages])
            assert {flag["cpu_devices"] for _, flag in mine} == {scale.cpu_devices}
            workdirs = [flag["workdir"] for _, flag in mine]
            assert [config.init_from for config in configs] == [None, *workdirs[:-1]]
            _check_data(table, scale, configs)
        assert not left


def _hash(configs: list[ConfigDict]) -> str:
    return jobs.config_hash(jobs.flat_configs(configs))


def _check_data(table: Table, scale: Scale, configs: list[ConfigDict]) -> None:
    for name, config in zip(scale.data[-len(configs) :], configs):
        actual = [config.data.dir, config.data.prepared_dir]
        assert actual.count(None) == 2 - bool(name), table.key
        assert not name or f"/data sets/{name}" in actual


def test_without_data_the_script_says_what_to_set(tmp_path: pathlib.Path) -> None:
    table = ALL["lamb/table1"]
    script = "\n".join(commands.here(table, table.scales["paper"], [table.cells["lamb-32k"]], None))
    for line in (
        "#   text: text in train and validation, prepared with BERT's vocabulary of 30,522 tokens",
        "#   squad: train-v1.1.json and dev-v1.1.json from ",
    ):
        assert line in script
    assert re.search(
        r"#     python -m lamb_tpu.prepare_text .* --output=\"\$\{DATA\}\"/text/train\n", script
    )
    done = bash(script, tmp_path)
    assert done.returncode and not done.stdout
    assert "DATA: set DATA to the folder of the data sets" in done.stderr
    done = bash(script, tmp_path, DATA="/data sets")
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "--config=bert_pretrain:size=large,batch=32768 --config.seed=0 "
        "--config.data.dir=/data sets/text",
        "--config=bert_squad:size=large --config.seed=0 --config.data.dir=/data sets/squad",
    ]


def test_with_data_the_folders_are_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squad").mkdir()
    commands.show([ALL["lamb/table1"]], None, "lamb-32k", str(tmp_path))
    out = capsys.readouterr().out
    assert f"--output={tmp_path}/text/train" in out and "squad: train-v1.1.json" in out
    assert "SQuAD-explorer (there)\n" in out and "${DATA" not in out
    # Data sets that can be downloaded need no folder.
    commands.show([ALL["lamb/mnist"]], None, "lamb")
    out = capsys.readouterr().out
    assert "# downloaded, unless --data=DIR contains\n#   mnist: " in out and "data.dir" not in out
    # Files in the folder of another data set are listed too.
    commands.show([ALL["bert/end_to_end"]], None, "random")
    out = capsys.readouterr().out
    assert "#   text_8192: the file train/vocab.txt\n" in out
    assert '--config.data.options.vocab="${DATA}"/text_8192/train/vocab.txt' in out


def test_text_of_a_table_starts_no_command(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = (
        'hardware = "a CPU\\ntouch hacked"\n'
        'data = ["x\\ntouch $(touch hacked) `touch hacked` ${DATA}"]\n'
    )
    text = TABLE.replace("examples = 1_437\n", hostile)
    text = text.replace('"log.every" = "2 steps"', '"data.name" = "squad"')
    commands.show([write(tmp_path, text)], None, "lamb")
    script = capsys.readouterr().out
    done = bash(script, tmp_path, DATA="$(touch hacked)")
    assert done.returncode == 0 and not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "data, topology, expected",
    [
        ("gs://bucket/data", None, ("--data", "gs://bucket/data", "is remote")),
        ("/data", "v3-32", ("--data", "/data", "is a folder on this machine", "with --topology")),
        ("gs://bucket", "v3-32", ("--data gs://bucket", ..., "names no folder in a bucket")),
        (None, "v3-33", ("--topology", "v3-33")),
    ],
)
def test_errors(
    capsys: pytest.CaptureFixture[str],
    data: str | None,
    topology: str | None,
    expected: tuple[Any, ...],
) -> None:
    with rejected(*expected):
        commands.show([ALL["lamb/table1"]], None, "lamb-32k", data, topology)
    assert capsys.readouterr().out == ""


@pytest.mark.long
@pytest.mark.parametrize("key", ALL)
def test_the_first_command_of_every_table_trains(key: str, tmp_path: pathlib.Path) -> None:
    table = ALL[key]
    cells = [cell for cell in table.cells.values() if not cell.unknown]
    words = printed(commands.here(table, table.scales["smoke"], cells[:1], None))[0]
    # The environment of a user's shell: one device.
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.first_update", *words, f"--workdir={tmp_path / 'run'}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert f"{first_update.DONE}: 1" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_a_chain_of_stages_runs_at_the_smoke_scale(tmp_path: pathlib.Path) -> None:
    table = ALL["lamb/table1"]
    lines = commands.here(table, table.scales["smoke"], [table.cells["lamb-32k"]], None)
    for words in printed(lines):
        words = [word.replace("runs/", f"{tmp_path}/") for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "lamb_tpu.train", *words, "--config.model.num_layers=1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "f1 " in done.stdout
