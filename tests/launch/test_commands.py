"""The command line of the launcher: kinds, help, and one-line errors."""

import pathlib
from typing import NamedTuple

import pytest
import yaml

from lamb_tpu.errors import UserError
from lamb_tpu.launch import __main__ as launch
from tests import tiny
from tests.launch import shell
from tests.launch.fakes import Cloud

TRAIN = ["--", "--config=digits", "--workdir=gs://bucket/run"]
VM = ["tpu-vm", "--topology=v4-8", "--name=pod", "--zone=us-central2-b"]
QUEUED = ["queued-resource", *VM[1:]]
COMPUTE = ["compute", "--topology=v6e-4", "--name=pod", "--zone=us-east5-a"]
JOBSET = ["jobset", "--topology=v4-8", "--name=pod", "--image=image:1"]


class Case(NamedTuple):
    arguments: list[str]
    message: str


CASES = {
    "no kind": Case([], "the following arguments are required: KIND; see --help"),
    "unknown kind": Case(["tpu"], "invalid choice: 'tpu' (choose from"),
    "no dashes": Case(VM, "the arguments of lamb_tpu.train are missing; put them after --"),
    "no name": Case([*VM[:2], "--zone=z", *TRAIN], "the following arguments are required: --name"),
    "no zone": Case([*VM[:3], *TRAIN], "the following arguments are required: --zone"),
    "empty zone": Case([*VM[:3], "--zone=", *TRAIN], "--zone is empty; give a value, or omit"),
    "local workdir": Case(
        [*QUEUED, "--slices=2", "--", "--workdir=runs/x"],
        "--workdir='runs/x' is a local folder, and the 2 hosts must share it",
    ),
    "step": Case([*VM, "--from-step=99", *TRAIN], "--from-step=99 is out of range; use 1 to "),
    "no image": Case([*JOBSET[:3], *TRAIN], "the following arguments are required: --image"),
    "pod's workdir": Case([*JOBSET, "--", "--workdir=runs/x"], "'runs/x' is deleted with its pod"),
    "two capacities": Case(
        [*COMPUTE, "--spot", "--reservation=a", *TRAIN], "--spot excludes --reservation; give"
    ),
    "old generation": Case(
        ["compute", "--topology=v4-8", *COMPUTE[2:], *TRAIN],
        "Compute Engine has no TPU v4; use the kind jobset, tpu-vm or queued-resource",
    ),
    "output": Case(
        [*JOBSET, "--output=/dev/null/x", *TRAIN],
        "--output /dev/null/x cannot be written (Not a directory); give another",
    ),
    "array": Case(["slurm", "--array=0", *TRAIN], "argument --array: 0 is less than 1"),
    "array of train": Case(
        [*JOBSET, "--array=8", *TRAIN], "--array=8 would train the same run in every job"
    ),
    "module": Case(["slurm", "--module=os", *TRAIN], "invalid choice: 'os' (choose from"),
    "account": Case(
        [*JOBSET, "--service-account=A b", *TRAIN],
        "--service-account='A b' is not a valid name; use a-z, 0-9 and hyphens",
    ),
    "image": Case(
        [*JOBSET[:-1], "--image=-x", *TRAIN],
        "--image='-x' is not an image name; use the form REGISTRY/NAME:TAG",
    ),
    "restarts": Case([*JOBSET, "--max-restarts=x", *TRAIN], "'x' is not a whole number"),
    "bucket of no folder": Case([*VM, "--", "--workdir=gs://b/.."], "--workdir gs://b/.. has '..'"),
    "bucket of no name": Case(
        [*VM, "--", "--workdir=gs://../x"],
        "--workdir gs://../x has the invalid bucket name '..'; use a name of letters",
    ),
    "data": Case([*VM, "--data=gs://b/x/../y", *TRAIN], "--data gs://b/x/../y has '..'"),
    "processes": Case(
        ["local", "--processes=1000000000000", *TRAIN],
        "argument --processes: 1000000000000 is more than 1,024, the largest",
    ),
    "devices": Case(
        ["local", "--devices-per-process=1000000000000", *TRAIN],
        "argument --devices-per-process: 1000000000000 is more than 1,024",
    ),
    "product": Case(
        ["local", "--processes=64", "--devices-per-process=64", *TRAIN],
        "--processes=64 with --devices-per-process=64 makes 4,096 simulated devices",
    ),
    "grace": Case(["local", "--grace-seconds=nan", *TRAIN], "--grace-seconds: nan is not a number"),
    "no grace": Case(["local", "--grace-seconds=-1", *TRAIN], "-1.0 is not a number from 0 to 315"),
    "no arguments": Case(["local"], "the arguments of lamb_tpu.train are missing; put them after"),
    "no process": Case(["local", "--processes=0", *TRAIN], "argument --processes: 0 is less than"),
    "no device": Case(["local", "--devices-per-process=0", *TRAIN], "s-per-process: 0 is less"),
    "word": Case(["local", "--processes=two", *TRAIN], "'two' is not a whole number"),
    "no module": Case(
        ["local", "--module=lamb_tpu.trane", *TRAIN], "'lamb_tpu.trane' does not exist; give"
    ),
    "not after dashes": Case(["local", "--config=c.py"], "unrecognized arguments: --config=c.py"),
    "no folder": Case(
        ["local", "--", "--workdir=/dev/null/x"], "--workdir /dev/null/x cannot be written"
    ),
    "many nodes": Case(
        ["slurm", "--nodes=1000000000000", *TRAIN],
        "argument --nodes: 1000000000000 is more than 100,000, the largest",
    ),
    "not UTF-8": Case(
        ["slurm", "--", "--workdir=runs/\udcff"],
        r"the argument '--workdir=runs/\udcff' is not UTF-8",
    ),
    "no python": Case(["slurm", "--python= ", *TRAIN], "--python is empty; give a value"),
}


@pytest.mark.parametrize("name", CASES)
def test_errors(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError) as raised:
        launch.main(CASES[name].arguments)
    output = str(raised.value)
    assert CASES[name].message in output and "\n" not in output
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["no dashes", "unknown kind"])
def test_errors_end_the_command(name: str) -> None:
    done = tiny.command("lamb_tpu.launch", *CASES[name].arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and CASES[name].message in line


def test_help(capsys: pytest.CaptureFixture) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            launch.main([*arguments, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        return text

    overview = shown()
    for kind in ("local", "compute", "tpu-vm", "queued-resource", "cluster", "jobset", "slurm"):
        assert f"\n    {kind}" in overview and f"lamb_tpu.launch {kind} " in overview
        assert ("-- TRAIN_ARGUMENTS" in shown(kind)) == (kind != "cluster")
    for part in ("--processes", "--devices-per-process", "Ctrl-C", "DIR/logs", "must divide"):
        assert part in shown("local")
    for part in ("one at a time", "--from-step", "Nothing is deleted without --delete"):
        assert part in shown("queued-resource") and part in shown("compute")


def test_steps_are_printed_but_not_run(cloud: Cloud, capsys: pytest.CaptureFixture) -> None:
    for options in (VM, [*QUEUED, "--slices=2", "--spot"], [*VM, "--image=image:1"], COMPUTE):
        assert launch.main([*options, *TRAIN]) == 0
        text = capsys.readouterr().out
        shell.parsed(text)
        assert text.startswith("# 1. check the config on this machine\n")
        assert "\n\n# 2. " in text and " delete pod " in text.rpartition("\n# ")[2]
        assert launch.main([*options, "--from-step=4", *TRAIN]) == 0
        assert capsys.readouterr().out == text[text.index("# 4. ") :]
    assert not cloud.calls()


def test_printed_script_passes_shellcheck(capsys: pytest.CaptureFixture) -> None:
    launch.main([*QUEUED, "--slices=2", "--project=a b", *TRAIN, '--a=it\'s "$(x)"'])
    shell.checked(capsys.readouterr().out)


def test_steps_are_run_on_request(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    request = [*VM, "--image=image:1", "--run", "--from-step=2"]
    monkeypatch.setenv("FAILS", "2")
    assert launch.main([*request, *TRAIN]) == 1
    again = " ".join([*VM, "--image=image:1", "--run", "--from-step=3", *TRAIN])
    assert (
        f"continue from there with: python -m lamb_tpu.launch {again}\n" in capfd.readouterr().err
    )
    monkeypatch.delenv("FAILS")
    assert launch.main([*request, "--from-step=3", "--delete", *TRAIN]) == 0
    assert cloud.calls()[-1][3:5] == ["delete", "pod"]


def test_files_are_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    manifest, script = tmp_path / "run.yaml", tmp_path / "run.sh"
    slices = ["--topology=v4-16", "--slices=2"]
    assert launch.main([*JOBSET, *slices, f"--output={manifest}", *TRAIN]) == 0
    assert launch.main(["slurm", f"--output={script}", *TRAIN]) == 0
    assert capsys.readouterr().out == (
        f"wrote {manifest}; start it with: kubectl create -f {manifest}\n"
        f"wrote {script}; submit it with: sbatch {script}\n"
    )
    assert yaml.safe_load(manifest.read_text())["kind"] == "JobSet"
    shell.parsed(script.read_text())
    assert launch.main([*JOBSET, *slices, *TRAIN]) == 0
    assert capsys.readouterr().out == manifest.read_text()
