"""A run as a script for SLURM's sbatch, with one process per GPU or, without GPUs, per node.

JAX initializes its processes from the variables that srun sets. The local index of a process selects
its GPU, so every process must see all GPUs of the node.

Many small runs form an array of jobs, each of which is one process with all GPUs of its node.
"""

import os
import re
from collections.abc import Sequence

from lamb_tpu.errors import UserError
from lamb_tpu.launch import arguments
from lamb_tpu.launch.steps import join

# From sbatch's manual: minutes, minutes:seconds, hours:minutes:seconds, each also after 'days-'.
_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
# Words without special characters: `#SBATCH` lines do not support quotes.
_WORD = r"[\w.@+,-]+"


def script(
    name: str,
    train: Sequence[str],
    nodes: int,
    gpus_per_node: int,
    cpus_per_task: int | None,
    time: str | None,
    partition: str | None,
    signal_seconds: int,
    python: str,
    array: int | None = None,
    module: str = arguments.TRAIN,
) -> str:
    """Returns the text of a script for sbatch.

    Args:
      name: name of the job.
      train: arguments of the module, with --workdir (or --records) on a shared file system.
      nodes: number of nodes; 1 for an array.
      gpus_per_node: GPUs per node, each with one process; 0: one process per node, on its CPU.
      cpus_per_task: CPU cores of a process; None: the cluster's default.
      time: time limit each time the job starts, in sbatch's format; None: the cluster's default.
      partition: SLURM's partition; None: the cluster's default.
      signal_seconds: SLURM asks the run to save this many seconds before the time limit.
      python: path of Python on the cluster, relative to the folder in which sbatch is called.
      array: number of jobs; None: one run on all nodes.
      module: module that the processes run.

    Raises:
      UserError: --workdir (or --records) is missing, or a value is invalid in a script for sbatch.
    """
    arguments.needed_folder(train, module)
    _check(name, nodes, time, partition, array)
    tasks = max(1, gpus_per_node) if array is None else 1
    directives = [
        f"job-name={name}",
        *([f"array=0-{array - 1}"] if array is not None else []),
        f"nodes={nodes}",
        f"ntasks-per-node={tasks}",
        *([f"gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        *([f"cpus-per-task={cpus_per_task}"] if cpus_per_task else []),
        *([f"time={time}"] if time else []),
        *([f"partition={partition}"] if partition else []),
        f"output={name}-{'%j' if array is None else '%A_%a'}.log",
        "open-mode=append",
        "requeue",
        f"signal=TERM@{signal_seconds}",
    ]
    # srun does not inherit --cpus-per-task from sbatch. With --kill-on-bad-exit=0, srun does not kill
    # the processes that are still saving after a preemption.
    srun = ["srun", "--kill-on-bad-exit=0"]
    if cpus_per_task:
        srun.append(f"--cpus-per-task={cpus_per_task}")
    command = join(*srun, python, "-u", "-m", module, *train)
    job = "$SLURM_JOB_ID"
    if array is not None:
        command += f' \\\n    --index="$SLURM_ARRAY_TASK_ID/{array}"'
        # One job of the array has the array's id as SLURM_JOB_ID, so name the job by its index.
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    lines = "".join(f"#SBATCH --{directive}\n" for directive in directives)
    return f"""\
#!/bin/bash
{lines}
# SLURM sends SIGTERM to the processes before the time limit; they save and exit with status 75.
# The job is then queued again, and the same command resumes the run.
{command}
status=$?
case $status in
    {os.EX_TEMPFAIL} | 143) # 143: SIGTERM came before the program had installed its handler
        echo "preempted (status $status): queued again"
        scontrol requeue "{job}"
        ;;
esac
exit $status
"""


def _check(
    name: str, nodes: int, time: str | None, partition: str | None, array: int | None
) -> None:
    if array is not None and nodes > 1:
        raise UserError(
            "--nodes",
            nodes,
            "excludes --array: each job of an array runs on one node",
            "leave --nodes out",
        )
    for key, value in (("--name", name), ("--partition", partition)):
        if value is not None and not re.fullmatch(_WORD, value):
            raise UserError(
                key, value, "is invalid for sbatch", "use letters, digits and . @ + , _ -"
            )
    if time is not None and not re.fullmatch(_TIME, time):
        raise UserError("--time", time, "is not a time limit of sbatch", "use a form like 24:00:00")
