"""The command line of `lamb_tpu launch`: the kinds of launch, and the options of each kind."""

import argparse
from typing import Any, NamedTuple

from lamb_tpu import limits, terminal
from lamb_tpu.launch import arguments

_EXAMPLES = """\
examples:
  python -m lamb_tpu.launch local --processes=2 --devices-per-process=2 -- \\
      --config=digits --workdir=runs/digits
  python -m lamb_tpu.launch compute --topology=v6e-4 --name=digits \\
      --zone=us-east5-a -- --config=digits --workdir=runs/digits
  python -m lamb_tpu.launch compute --topology=v5p-256 --name=bert \\
      --zone=us-east5-a --project=PROJECT --flex-start=7d --run -- \\
      --config=bert_pretrain --workdir=gs://BUCKET/bert
  python -m lamb_tpu.launch tpu-vm --topology=v4-8 --name=digits \\
      --zone=us-central2-b -- --config=digits --workdir=runs/digits
  python -m lamb_tpu.launch queued-resource --topology=v3-32 --name=digits \\
      --zone=europe-west4-a -- --config=digits --workdir=gs://BUCKET/digits
  python -m lamb_tpu.launch cluster --topology=v6e-256 --slices=2 --name=tpus \\
      --zone=us-east5-a --project=PROJECT --bucket=gs://BUCKET --run
  python -m lamb_tpu.launch jobset --topology=v6e-256 --slices=2 --name=bert \\
      --image=IMAGE --service-account=lamb-tpu --output=bert.yaml -- \\
      --config=bert_pretrain --workdir=gs://BUCKET/bert
  python -m lamb_tpu.launch slurm --nodes=4 --gpus-per-node=8 --time=24:00:00 \\
      --output=bert.sh -- --config=bert_pretrain --workdir=runs/bert
  python -m lamb_tpu.launch slurm --array=8 --module=lamb_tpu.reproduce \\
      --gpus-per-node=1 --output=mnist.sh -- run lamb/mnist --records=records

The arguments after -- go to python -m lamb_tpu.train, or to the --module, in
every process. A preempted run ends with status 75; the same command resumes
it. KIND --help lists the options of a kind.
"""
_LOCAL = """\
All processes run on this machine, on simulated CPU devices, and communicate
over loopback. They execute the same code as a run on many hosts. The number
of devices must divide the batch.

Process 0 writes to this terminal. The others write to DIR/logs/process-1.log
and so on, where DIR is the --workdir or a temporary folder. If a process fails,
the launcher ends the others, shows the last lines of the failed process's log,
and exits with the same status. Ctrl-C and SIGTERM go to all processes, which
then have --grace-seconds to save and end; a second Ctrl-C kills them.
"""
_STEPS = """\
Prints the steps as shell commands: create the machines, copy the code (the last
commit of this checkout) or pull an image, install, run, follow, fetch, delete.
With --run it shows and runs the steps one at a time, and stops at the first
that fails. Nothing is deleted without --delete. gcloud must be installed and
logged in.
"""
_CLUSTER = """\
Prints the steps as shell commands: build and push the image of the last commit,
create the account of the nodes, the cluster, the JobSet controller, the pods'
access to the bucket, and the node pools. With --run it shows and runs the steps
one at a time, and stops at the first that fails. gcloud, kubectl and docker
must be installed. Nothing is deleted without --delete. Start runs on the
cluster with the kind jobset, --image=IMAGE and --service-account=NAME.
"""
_IMAGE = "container image that contains lamb_tpu"
_ACCOUNT = "Kubernetes service account of the pods"

_TYPES = {
    "local": ("start several processes on this machine", _LOCAL),
    "compute": ("run on TPU instances of Compute Engine: v5p, v6e, tpu7x", _STEPS),
    "tpu-vm": ("run on a TPU VM of the older Cloud TPU API: v2 to v6e", _STEPS),
    "queued-resource": ("run on TPU VMs from the older API's queue: v2 to v6e", _STEPS),
    "cluster": ("create a GKE cluster with TPUs, and the image that runs there", _CLUSTER),
    "jobset": ("write the YAML of a JobSet for TPUs on GKE", ""),
    "slurm": ("write a script for SLURM's sbatch, for GPUs or CPUs", ""),
}
_VMS = "tpu-vm queued-resource"
_MACHINES = f"compute {_VMS}"
_GCLOUD = f"{_MACHINES} cluster"


class _Option(NamedTuple):
    types: str  # kinds of launch, separated by spaces
    flag: str
    text: str
    settings: dict[str, Any]  # keyword arguments for argparse


def _value(types: str, flag: str, text: str, **settings: Any) -> _Option:
    if settings.get("default"):
        text = f"{text} (default: %(default)s)".strip()
    return _Option(types, flag, text, settings)


def _number(
    types: str, flag: str, text: str, low: int, high: int, default: int | None = None
) -> _Option:
    return _value(types, flag, text, type=terminal.count(low, high), default=default)


def _switch(types: str, flag: str, text: str) -> _Option:
    return _Option(types, flag, text, {"action": "store_true"})


_NODES, _DEVICES, _COUNT = limits.MAX_NODES, limits.MAX_CPU_DEVICES, limits.MAX_COUNT
# --help lists the options in this order.
_OPTIONS = (
    _number("local", "--processes=N", "processes to start", 1, limits.MAX_PROCESSES, 2),
    _number(
        "local", "--devices-per-process=N", "simulated CPU devices per process", 1, _DEVICES, 1
    ),
    _value(
        "local",
        "--grace-seconds=S",
        "seconds for the processes to save and end after Ctrl-C or SIGTERM, before they are killed",
        type=terminal.number(0, limits.MAX_SECONDS),
        default=30.0,
    ),
    _value(
        "local", "--module", "module that each process runs with python -m", default=arguments.TRAIN
    ),
    _value(
        f"{_GCLOUD} jobset",
        "--topology=NAME",
        "a slice, such as v5p-256 (in cores, or in chips for v5e and v6e)",
        required=True,
    ),
    _number("queued-resource cluster", "--slices=N", "number of slices", 1, _NODES, 1),
    _number(
        "jobset", "--slices=N", "slices of the run, or simultaneous jobs of an array", 1, _NODES, 1
    ),
    _switch(f"{_GCLOUD} jobset", "--spot", "cheaper machines that may be preempted at any time"),
    _value(_MACHINES, "--image=IMAGE", f"{_IMAGE}, instead of a copy of the code"),
    _value("cluster", "--image=IMAGE", f"{_IMAGE}, instead of building one"),
    _value("jobset", "--image=IMAGE", _IMAGE, required=True),
    _value(
        "compute cluster",
        "--flex-start=TIME",
        "wait in Google's queue for machines with a lifetime of TIME, such as 7d or 12h30m",
    ),
    _value("compute cluster", "--reservation=NAME", "use a reservation"),
    _value(
        "cluster", "--bucket=gs://...", "bucket that the pods may use for workdirs", required=True
    ),
    _value("cluster", "--service-account=NAME", _ACCOUNT, default="lamb-tpu"),
    _value("jobset", "--service-account=NAME", f"{_ACCOUNT}, created by the kind cluster"),
    _value(
        "jobset",
        "--tool",
        "print the command of Cluster Toolkit or XPK instead of YAML, for a cluster created by "
        "that tool; needs --cluster, --zone and --project",
        choices=["gcluster", "xpk"],
    ),
    _value("jobset", "--cluster=NAME", "with --tool: name of the cluster"),
    _value("jobset", "--zone", "with --tool: Google's zone"),
    _value("jobset", "--project", "with --tool: Google's project"),
    _number(
        "jobset slurm", "--array=N", "N jobs that share the runs of --module", 1, limits.MAX_RUNS
    ),
    _value(
        "jobset slurm",
        "--module",
        "module that the processes run",
        choices=list(arguments.FOLDERS),
        default=arguments.TRAIN,
    ),
    _value(_VMS, "--version=NAME", "software version of the machines (default: set by topology)"),
    _value(_GCLOUD, "--zone", "Google's zone", required=True),
    _value(_MACHINES, "--project", "Google's project (default: gcloud's)"),
    _value("cluster", "--project", "Google's project", required=True),
    _switch(_GCLOUD, "--run", "run the steps"),
    _number(_GCLOUD, "--from-step=N", "skip the steps before step N", 0, _COUNT, 1),
    _switch(_GCLOUD, "--delete", "with --run: delete the machines after the last step"),
    _value(
        _MACHINES,
        "--create-flag=FLAG",
        "further flag for gcloud's create command, such as --reserved; may be repeated",
        action="append",
        default=[],
    ),
    _value(_MACHINES, "--data=gs://...", "folder to copy to every host for --config.data.dir=data"),
    _switch(_MACHINES, "--shared-workdir", "all hosts mount the file system that has --workdir"),
    _number(
        "jobset",
        "--max-restarts=N",
        "largest number of restarts after failures; preemptions do not count",
        0,
        _COUNT,
        3,
    ),
    _number("slurm", "--nodes=N", "number of nodes", 1, _NODES, 1),
    _number(
        "slurm",
        "--gpus-per-node=N",
        "GPUs per node, each with one process; in an array, a job has one process with all GPUs. "
        "0: one process per node, on its CPU (default: 0)",
        0,
        limits.MAX_PROCESSES,
        0,
    ),
    _number(
        "slurm",
        "--cpus-per-task=N",
        "CPU cores of each process, for decoding data (default: set by the cluster, often 1)",
        1,
        _NODES,
    ),
    _value("slurm", "--time=TIME", "time limit of one start, such as 24:00:00"),
    _value("slurm", "--partition=NAME", "SLURM partition (default: set by the cluster)"),
    _number(
        "slurm",
        "--signal-seconds=S",
        "ask the run to save S seconds before the time limit",
        1,
        86_400,
        180,
    ),
    _value("slurm", "--python=FILE", "path of Python on the cluster", default=".venv/bin/python"),
    _value(_MACHINES, "--name", "name of the machines", required=True),
    _value("cluster", "--name", "name of the cluster", required=True),
    _value("jobset", "--name", "name of the job", required=True),
    _value("slurm", "--name", "name of the job", default="lamb_tpu"),
    _value("jobset slurm", "--output=FILE", "file to write (default: standard output)"),
)


def parse(description: str, words: list[str]) -> argparse.Namespace:
    """Parses the words before --; `description` is the first line of --help."""
    parser = terminal.Parser(
        prog="python -m lamb_tpu.launch", epilog=_EXAMPLES, description=description
    )
    types = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (text, more) in _TYPES.items():
        kind = types.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.\n\n{more}",
            usage="%(prog)s [options]" + " -- TRAIN_ARGUMENTS" * (name != "cluster"),
        )
        for option in _OPTIONS:
            if name in option.types.split():
                kind.option(option.flag, option.text, **option.settings)
    return parser.parse_all(words)
