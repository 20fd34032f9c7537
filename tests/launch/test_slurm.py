"""The script for sbatch, checked by shells and run with a fake srun."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from lamb_tpu.launch import slurm
from lamb_tpu.reproduce.results import Results
from tests.launch import shell
from tests.raising import rejected
from tests.reproduce.papers import write
from tests.reproduce.test_arrays import plain
from tests.tiny import ROOT

TRAIN = ["--config=digits", "--workdir=runs/x", '--a=it\'s "$(touch pwned)"']
# Runs two tasks on this machine, as srun does on two nodes.
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
    "options",
    [
        {},
        {"gpus_per_node": 0, "cpus_per_task": None, "time": None, "partition": None},
        {"array": 8, "nodes": 1, "module": "lamb_tpu.sweep"},
    ],
)
def test_shells_read_it(options: dict[str, Any]) -> None:
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


ARRAY = {
    "array": 3,
    "nodes": 1,
    "module": "lamb_tpu.reproduce",
    "train": ["run", "lamb/mnist", "--records=my records", '--a=it\'s "$(touch pwned)"'],
}


def test_an_array_has_one_process_for_each_index() -> None:
    lines = script(**ARRAY).splitlines()
    assert {
        "#SBATCH --array=0-2",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --output=bert-%A_%a.log",
    } <= set(lines)


@pytest.mark.parametrize("status, requeued", [(0, False), (3, False), (75, True), (143, True)])
@pytest.mark.parametrize(
    "options, job, module, words",
    [
        ({}, "77", "lamb_tpu.train", TRAIN),
        # The job is named by the array's id and its index, because SLURM_JOB_ID may be the array's id.
        (ARRAY, "70_2", "lamb_tpu.reproduce", [*ARRAY["train"], "--index=2/3"]),
    ],
)
def test_preempted_job_is_queued_again(
    tmp_path: pathlib.Path,
    options: dict[str, Any],
    job: str,
    module: str,
    words: list[str],
    status: int,
    requeued: bool,
) -> None:
    srun = f'#!/bin/bash\nprintf "%s\\0" "$@" >"{tmp_path}/argv"\nexit {status}\n'
    done = run(script(**options), tmp_path, srun, SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == status, done.stderr
    called = tmp_path / "scontrol"
    assert called.exists() == requeued and (
        not requeued or called.read_text() == f"requeue {job}\n"
    )
    assert (tmp_path / "argv").read_text().split("\0")[:-1] == [
        *f"--kill-on-bad-exit=0 --cpus-per-task=12 .venv/bin/python -u -m {module}".split(),
        *words,
    ]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.long
def test_jobs_of_an_array_make_one_table(tmp_path: pathlib.Path) -> None:
    """Runs the script with bash for each index, and adopts the records."""
    table = write(tmp_path)
    common = [f"--papers={tmp_path}", f"--runs={tmp_path / 'runs'}"]
    records = tmp_path / "my records"
    text = script(
        ["run", "small", f"--records={records}", *common],
        gpus_per_node=0,
        cpus_per_task=None,
        nodes=1,
        array=3,
        module="lamb_tpu.reproduce",
        python=sys.executable,
    )
    srun = '#!/bin/bash\nshift\nexec "$@"\n'
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run(
            text,
            folder,
            srun,
            PYTHONPATH=str(ROOT),
            SLURM_ARRAY_JOB_ID="70",
            SLURM_ARRAY_TASK_ID=str(number),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the records of index {number} are complete" in done.stdout
    for command in (
        ["adopt", str(records)],
        ["run", "small", f"--records={tmp_path / 'alone'}", f"--runs={tmp_path / 'alone'}"],
    ):
        subprocess.run(
            [sys.executable, "-m", "lamb_tpu.reproduce", *command, f"--papers={tmp_path}"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    assert len(list(Results(table))) == 4
    assert plain(Results(table)) == plain(Results(table, tmp_path / "alone"))


@pytest.mark.long
def test_tasks_of_a_step_form_one_run(tmp_path: pathlib.Path) -> None:
    train = ["--config=digits:smoke", "--config.duration=2 steps", f"--workdir={tmp_path / 'run'}"]
    text = script(train, gpus_per_node=0, cpus_per_task=None, python=sys.executable)
    # JAX derives its port from the job's id.
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
    "options, key, problem",
    [
        ({"train": ["--config=digits"]}, "--workdir", "is missing in the arguments after --"),
        ({"time": "1 day"}, "--time", "is not a time limit of sbatch"),
        ({"name": "my job"}, "--name", "is invalid for sbatch"),
        ({"partition": "a\nb"}, "--partition", "is invalid for sbatch"),
        ({**ARRAY, "nodes": 2}, "--nodes", "excludes --array"),
        ({**ARRAY, "train": ["run", "lamb"]}, "--records", "is missing in the arguments after --"),
    ],
)
def test_errors(options: dict[str, Any], key: str, problem: str) -> None:
    with rejected(key, problem=problem):
        script(**options)
