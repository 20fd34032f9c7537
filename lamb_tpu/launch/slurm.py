"""A run as a script for SLURM's sbatch, one process a GPU or, without GPUs, a node.

JAX finds its place from the variables of a step of srun, and then takes for its device the one of
the number of the process on its node: every process must see all GPUs of the node.
"""

import os
import re
from collections.abc import Sequence

from lamb_tpu.errors import UserError
from lamb_tpu.launch import arguments
from lamb_tpu.launch.steps import join

# minutes, minutes:seconds, hours:minutes:seconds, and with days before a hyphen; sbatch's manual.
_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
# Words that a directive can hold unquoted: `#SBATCH` lines are no shell.
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
) -> str:
    """Returns the text of a script for sbatch.

    Args:
      name: of the job.
      train: arguments of `lamb_tpu.train`, with --workdir on a file system of all nodes.
      nodes: number of nodes.
      gpus_per_node: GPUs of a node, each with one process; 0: one process a node, on its CPU.
      cpus_per_task: cores of a process; None: the cluster's default.
      time: limit of one start, as sbatch takes it; None: the cluster's.
      partition: SLURM's partition; None: the cluster's default.
      signal_seconds: time before the limit at which the run is asked to save.
      python: path of Python on the cluster, from the folder in which the script is submitted.

    Raises:
      UserError: --workdir is missing, or a value cannot be written into the script.
    """
    arguments.needed_workdir(train)
    for key, value in (("--name", name), ("--partition", partition)):
        if value is not None and not re.fullmatch(_WORD, value):
            raise UserError(
                f"{key} is {value!r}; sbatch takes letters, digits and the signs . @ + , _ -"
            )
    if time is not None and not re.fullmatch(_TIME, time):
        raise UserError(f"--time is {time!r}; sbatch takes it as 24:00:00, 90 or 2-12:00:00")
    tasks = max(1, gpus_per_node)
    directives = [
        f"job-name={name}",
        f"nodes={nodes}",
        f"ntasks-per-node={tasks}",
        *([f"gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        *([f"cpus-per-task={cpus_per_task}"] if cpus_per_task else []),
        *([f"time={time}"] if time else []),
        *([f"partition={partition}"] if partition else []),
        f"output={name}-%j.log",
        "open-mode=append",
        "requeue",
        f"signal=TERM@{signal_seconds}",
    ]
    # srun does not take over the number of sbatch. Without --kill-on-bad-exit the processes of a
    # preempted run end by themselves, after their save.
    srun = ["srun", "--kill-on-bad-exit=0"]
    if cpus_per_task:
        srun.append(f"--cpus-per-task={cpus_per_task}")
    command = join(*srun, python, "-u", "-m", "lamb_tpu.train", *train)
    lines = "".join(f"#SBATCH --{directive}\n" for directive in directives)
    return f"""\
#!/bin/bash
{lines}
# SLURM sends SIGTERM to the processes before the time limit; they save and end with status 75.
# The job is then queued again, and the same command resumes the run.
{command}
status=$?
case $status in
    {os.EX_TEMPFAIL} | 143) # 143: SIGTERM came before the program could listen
        echo "preempted (status $status): queued again"
        scontrol requeue "$SLURM_JOB_ID"
        ;;
esac
exit $status
"""
