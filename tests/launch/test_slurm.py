"""The script for sbatch: read by shells, and run with a fake srun."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.launch import slurm
from tests.launch import shell
from tests.tiny import ROOT

TRAIN = ["--config=digits", "--workdir=runs/x", '--a=it\'s "$(touch pwned)"']
# Two tasks of a job of two nodes, which are this machine.
SRUN = """\
#!/bin/bash
shift 1
export SLURM_JOB_ID=$PORT SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_LOCALID=0
SLURM_PROCID=1 "$@" >/dev/null &
SLURM_PROCID=0 "$@"
status=$?
wait $! || status=$?
exit $status
"""


def script(train: list[str] = TRAIN, **options: Any) -> str:
    values = {
        "name": "bert",
        "nodes": 2,
        "gpus_per_node": 8,
        "cpus_per_task": 12,
        "time": "24:00:00",
        "partition": "gpu",
        "signal_seconds": 180,
        "python": ".venv/bin/python",
    }
    return slurm.script(train=train, **(values | options))


def run(text: str, folder: pathlib.Path, srun: str, **environment: str):
    (folder / "bin").mkdir()
    for name, program in (
        ("srun", srun),
        ("scontrol", f'#!/bin/bash\necho "$@" >"{folder}/scontrol"\n'),
    ):
        (folder / "bin" / name).write_text(program)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "SLURM_JOB_ID": "77", **environment},
    )


@pytest.mark.parametrize(
    "options", [{}, {"gpus_per_node": 0, "cpus_per_task": None, "time": None, "partition": None}]
)
def test_shells_read_it(options: dict[str, Any]) -> None:
    shell.parsed(script(**options))
    shell.checked(script(**options))


def test_directives() -> None:
    lines = script().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=bert",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --time=24:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --output=bert-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@180",
    ]
    # sbatch reads directives up to the first command.
    assert all(line.startswith("#SBATCH") for line in lines[1:12])
    without = script(gpus_per_node=0, cpus_per_task=None, time=None, partition=None)
    assert "--ntasks-per-node=1\n" in without
    assert not any(name in without for name in ("gpus", "cpus", "time=", "partition"))


@pytest.mark.parametrize("status, requeued", [(0, False), (3, False), (75, True), (143, True)])
def test_preempted_job_is_queued_again(tmp_path: pathlib.Path, status: int, requeued: bool) -> None:
    srun = f'#!/bin/bash\nprintf "%s\\0" "$@" >"{tmp_path}/argv"\nexit {status}\n'
    done = run(script(), tmp_path, srun)
    assert done.returncode == status, done.stderr
    called = tmp_path / "scontrol"
    assert called.exists() == requeued and (not requeued or called.read_text() == "requeue 77\n")
    assert (tmp_path / "argv").read_text().split("\0")[:-1] == [
        "--kill-on-bad-exit=0",
        "--cpus-per-task=12",
        ".venv/bin/python",
        "-u",
        "-m",
        "lamb_tpu.train",
        *TRAIN,
    ]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.long
def test_tasks_of_a_step_are_one_run(tmp_path: pathlib.Path) -> None:
    train = ["--config=digits:smoke", "--config.duration=2 steps", f"--workdir={tmp_path / 'run'}"]
    text = script(train, gpus_per_node=0, cpus_per_task=None, python=sys.executable)
    # JAX takes its port from the job's number.
    port = str(os.getpid() % 4096)
    done = run(
        text,
        tmp_path,
        SRUN,
        PYTHONPATH=str(ROOT),
        PORT=port,
        JAX_PLATFORMS="cpu",
        NPROC="32",
        JAX_NUM_CPU_DEVICES="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "over 2 cpu device(s) in 2 process(es)" in done.stdout
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train": ["--config=digits"]}, "--workdir is missing among the arguments behind --"),
        ({"time": "1 day"}, "--time is '1 day'; sbatch takes it as 24:00:00, 90 or 2-12:00:00"),
        ({"name": "my job"}, "--name is 'my job'; sbatch takes letters, digits and the signs"),
        ({"partition": "a\nb"}, "--partition is 'a\\\\nb'; sbatch takes letters"),
    ],
)
def test_mistake(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        script(**options)
