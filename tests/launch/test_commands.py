"""The command line of the launcher: kinds, help, and mistakes in one sentence each."""

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
JOBSET = ["jobset", "--topology=v4-8", "--name=pod", "--image=image:1"]


class Case(NamedTuple):
    arguments: list[str]
    message: str


CASES = {
    "no kind": Case([], "the following arguments are required: KIND; see --help"),
    "unknown kind": Case(["tpu"], "invalid choice: 'tpu' (choose from"),
    "old spelling": Case(
        ["--local", "--processes=2", "--", "x"],
        "--local is now a kind: python -m lamb_tpu.launch local --processes=2",
    ),
    "no dashes": Case(VM, "the arguments of lamb_tpu.train are missing: put them after --"),
    "no name": Case([*VM[:2], "--zone=z", *TRAIN], "the following arguments are required: --name"),
    "no zone": Case([*VM[:3], *TRAIN], "the following arguments are required: --zone"),
    "empty zone": Case([*VM[:3], "--zone=", *TRAIN], "--zone is empty; give a value, or leave"),
    "name": Case([*VM, "--name=My pod", *TRAIN], "--name is 'My pod'; it must have 1 to 63"),
    "topology": Case([*VM, "--topology=v4-9", *TRAIN], "no slice of v4 has 9 cores; the nearest"),
    "tpu7x": Case([*VM, "--topology=tpu7x-128", *TRAIN], "use the kind jobset"),
    "slices of a VM": Case([*VM, "--slices=2", *TRAIN], "unrecognized arguments: --slices=2"),
    "local workdir": Case(
        [*QUEUED, "--slices=2", "--", "--workdir=runs/x"],
        "--workdir is 'runs/x', a local folder, and the 2 hosts must share it",
    ),
    "no workdir": Case([*VM, "--", "--config=digits"], "--workdir is missing among the arguments"),
    "step": Case([*VM, "--from-step=99", *TRAIN], "--from-step is 99; the steps have the numbers"),
    "no image": Case([*JOBSET[:3], *TRAIN], "the following arguments are required: --image"),
    "pod's workdir": Case([*JOBSET, "--", "--workdir=runs/x"], "which is lost with its pod"),
    "output": Case(
        [*JOBSET, "--output=/dev/null/x", *TRAIN],
        "--output /dev/null/x cannot be written (Not a directory); give another file",
    ),
    "nodes": Case(["slurm", "--nodes=0", *TRAIN], "argument --nodes: 0 is not at least 1"),
    "restarts": Case([*JOBSET, "--max-restarts=x", *TRAIN], "'x' is no whole number"),
    "time": Case(["slurm", "--time=soon", *TRAIN], "--time is 'soon'; sbatch takes it as"),
}


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_told_in_a_sentence(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError) as raised:
        launch.main(CASES[name].arguments)
    told = str(raised.value)
    assert CASES[name].message in told and "\n" not in told
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["old spelling", "unknown kind"])
def test_mistake_ends_the_command(name: str) -> None:
    done = tiny.command("lamb_tpu.launch", *CASES[name].arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and CASES[name].message in line


def test_help_teaches(capsys: pytest.CaptureFixture) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            launch.main([*arguments, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        return text

    overview = shown()
    for kind in ("local", "tpu-vm", "queued-resource", "jobset", "slurm"):
        assert f"\n    {kind}" in overview and f"lamb_tpu.launch {kind} " in overview
        assert "-- TRAIN_ARGUMENTS" in shown(kind)
    for part in ("--processes", "--devices-per-process", "Ctrl-C", "DIR/logs", "must divide"):
        assert part in shown("local")
    for part in ("one at a time", "--from-step", "Nothing is deleted without --delete"):
        assert part in shown("queued-resource")


def test_steps_are_printed_and_nothing_is_called(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    cloud = Cloud(tmp_path / "cloud")
    monkeypatch.setenv("PATH", cloud.environment["PATH"])
    monkeypatch.setenv("CLOUD", cloud.environment["CLOUD"])
    for options in (VM, [*QUEUED, "--slices=2", "--spot"], [*VM, "--image=image:1"]):
        assert launch.main([*options, *TRAIN]) == 0
        text = capsys.readouterr().out
        shell.parsed(text)
        assert text.startswith("# 1. check the config on this machine\n")
        assert "\n\n# 2. " in text and " delete pod " in text.rpartition("\n# ")[2]
        assert launch.main([*options, "--from-step=4", *TRAIN]) == 0
        assert capsys.readouterr().out == text[text.index("# 4. ") :]
    assert not cloud.calls()


def test_printed_script_pleases_shellcheck(capsys: pytest.CaptureFixture) -> None:
    launch.main([*QUEUED, "--slices=2", "--project=a b", *TRAIN, '--a=it\'s "$(x)"'])
    shell.checked(capsys.readouterr().out)


def test_steps_are_run_on_request(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    cloud = Cloud(tmp_path / "cloud")
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    request = [*VM, "--image=image:1", "--run", "--from-step=2"]
    monkeypatch.setenv("FAILS", "2")
    assert launch.main([*request, *TRAIN]) == 1
    again = " ".join([*VM, "--image=image:1", "--run", "--from-step=3", *TRAIN])
    assert f"go on from there with: python -m lamb_tpu.launch {again}\n" in capfd.readouterr().err
    monkeypatch.delenv("FAILS")
    assert launch.main([*request, "--from-step=3", "--delete", *TRAIN]) == 0
    assert cloud.calls()[-1][3:5] == ["delete", "pod"]


def test_files_are_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    manifest, script = tmp_path / "run.yaml", tmp_path / "run.sh"
    assert launch.main([*JOBSET, "--slices=2", f"--output={manifest}", *TRAIN]) == 0
    assert launch.main(["slurm", f"--output={script}", *TRAIN]) == 0
    assert capsys.readouterr().out == (
        f"{manifest} is written; start it with: kubectl create -f {manifest}\n"
        f"{script} is written; submit it with: sbatch {script}\n"
    )
    assert yaml.safe_load(manifest.read_text())["kind"] == "JobSet"
    shell.parsed(script.read_text())
    assert launch.main([*JOBSET, "--slices=2", *TRAIN]) == 0
    assert capsys.readouterr().out == manifest.read_text()
