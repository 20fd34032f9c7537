"""Starts a run on this machine, on TPU VMs, on GKE or under SLURM.

`python -m lamb_tpu.launch local --processes=4 -- --config=digits --workdir=DIR` starts four
processes here; the other kinds print their commands and files, and run them on request.
"""

import argparse
import pathlib
import re
import sys

from lamb_tpu import cli, terminal
from lamb_tpu.errors import UserError

_EXAMPLES = """\
examples:
  python -m lamb_tpu.launch local --processes=2 --devices-per-process=2 -- \\
      --config=digits --workdir=runs/digits
  python -m lamb_tpu.launch tpu-vm --topology=v4-8 --name=digits \\
      --zone=us-central2-b -- --config=digits --workdir=runs/digits
  python -m lamb_tpu.launch queued-resource --topology=v5p-256 --name=bert \\
      --zone=us-east5-a --run -- --config=bert_pretrain \\
      --workdir=gs://BUCKET/bert
  python -m lamb_tpu.launch jobset --topology=v6e-256 --slices=2 --name=bert \\
      --image=IMAGE --output=bert.yaml -- --config=bert_pretrain \\
      --workdir=gs://BUCKET/bert
  python -m lamb_tpu.launch slurm --nodes=4 --gpus-per-node=8 --time=24:00:00 \\
      --output=bert.sh -- --config=bert_pretrain --workdir=runs/bert

The arguments behind -- are those of python -m lamb_tpu.train, which every
process runs. A run that is preempted ends with status 75; the same command
resumes it. KIND --help lists the options of a kind.
"""
_LOCAL = """\
All processes run on this machine, on simulated CPU devices, and talk over
loopback. They execute the code of a run on many hosts. The batch must divide
over all devices.

Process 0 writes to this terminal, the others to DIR/logs/process-1.log and so
on, where DIR is the --workdir, or to a temporary folder. When one process
fails, the others are ended, its last lines are shown, and its exit status is
the launcher's. Ctrl-C and SIGTERM go to all processes, which then have
--grace-seconds to save and end; a second Ctrl-C ends them at once.
"""
_STEPS = """\
Prints the steps as shell commands: create, copy the code (the last commit of
this checkout) or an image, install, run, follow, fetch, delete. With --run it
runs them one at a time, each shown before, and stops at the first that fails.
gcloud must be installed and logged in. Nothing is deleted without --delete.
"""


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.launch",
        epilog=_EXAMPLES,
        description=terminal.fit_docstring(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def add(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        return kinds.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.\n\n{more}",
            usage="%(prog)s [options] -- TRAIN_ARGUMENTS",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    local = add("local", "start several processes on this machine", _LOCAL)
    local.add_argument(
        "--processes",
        type=_positive,
        default=2,
        metavar="N",
        help="processes to start (default: 2)",
    )
    local.add_argument(
        "--devices-per-process",
        type=_positive,
        default=1,
        metavar="N",
        help="simulated CPU devices of each process (default: 1)",
    )
    local.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="time after Ctrl-C or SIGTERM in which the processes can save and end "
        "before they are killed (default: 30)",
    )
    local.add_argument(
        "--module",
        default="lamb_tpu.train",
        help="module that each process runs by python -m (default: %(default)s)",
    )
    machines = add("tpu-vm", "run on a TPU VM that is created at once", _STEPS)
    queued = add("queued-resource", "run on TPU VMs from Google's queue", _STEPS)
    jobset = add("jobset", "write the YAML of a JobSet for TPUs on GKE")
    slurm = add("slurm", "write a script for SLURM's sbatch, for GPUs or CPUs")
    for kind in (machines, queued, jobset):
        kind.add_argument(
            "--topology",
            required=True,
            metavar="NAME",
            help="a slice, such as v5p-256 (cores for v2 to v5p, chips for v5e, v6e)",
        )
        if kind is not machines:
            kind.add_argument(
                "--slices",
                type=_positive,
                default=1,
                metavar="N",
                help="slices of the run (default: 1)",
            )
        kind.add_argument(
            "--spot",
            action="store_true",
            help="cheaper machines that may be taken away at any time",
        )
        kind.add_argument(
            "--image",
            required=kind is jobset,
            metavar="IMAGE",
            help="container image that has lamb_tpu"
            + ("" if kind is jobset else ", instead of a copy of the code"),
        )
    for kind in (machines, queued):
        kind.add_argument("--zone", required=True, help="Google's zone")
        kind.add_argument("--project", help="Google's project (default: gcloud's)")
        kind.add_argument(
            "--version",
            metavar="NAME",
            help="software version of the machines (default: by the topology)",
        )
        kind.add_argument(
            "--create-flag",
            action="append",
            default=[],
            metavar="FLAG",
            help="a further flag for gcloud's create, as --create-flag=--reserved; may be repeated",
        )
        kind.add_argument(
            "--data",
            metavar="gs://...",
            help="folder to copy to every host, for --config.data.dir=data",
        )
        kind.add_argument(
            "--shared-workdir",
            action="store_true",
            help="the local --workdir is on a file system that all hosts mount",
        )
        kind.add_argument("--run", action="store_true", help="run the steps")
        kind.add_argument(
            "--from-step",
            type=_count,
            default=1,
            metavar="N",
            help="leave out the steps before number N",
        )
        kind.add_argument(
            "--delete",
            action="store_true",
            help="with --run: delete the machines after the last step",
        )
    jobset.add_argument(
        "--max-restarts",
        type=_count,
        default=3,
        metavar="N",
        help="restarts after failures; those after preemptions do not count (default: 3)",
    )
    slurm.add_argument("--nodes", type=_positive, default=1, metavar="N", help="(default: 1)")
    slurm.add_argument(
        "--gpus-per-node",
        type=_count,
        default=0,
        metavar="N",
        help="GPUs of a node, each with a process of its own; 0: one process a "
        "node, on its CPU (default: 0)",
    )
    slurm.add_argument(
        "--cpus-per-task",
        type=_positive,
        metavar="N",
        help="cores of each process, which decode its data (default: the cluster's, often 1)",
    )
    slurm.add_argument("--time", metavar="TIME", help="limit of one start, as 24:00:00")
    slurm.add_argument("--partition", metavar="NAME", help="(default: the cluster's)")
    slurm.add_argument(
        "--signal-seconds",
        type=_positive,
        default=180,
        metavar="S",
        help="ask the run to save so long before the time limit (default: 180)",
    )
    slurm.add_argument(
        "--python",
        default=".venv/bin/python",
        metavar="FILE",
        help="Python on the cluster (default: %(default)s)",
    )
    for kind in (machines, queued, jobset, slurm):
        kind.add_argument(
            "--name",
            required=kind is not slurm,
            default="lamb_tpu",
            help="of the machines" if kind in (machines, queued) else "of the job",
        )
    for kind in (jobset, slurm):
        kind.add_argument(
            "--output", metavar="FILE", help="file to write (default: standard output)"
        )
    return parser.parse_all(arguments)


def _count(text: str, least: int = 0) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    return int(text)


def _positive(text: str) -> int:
    return _count(text, 1)


def _seconds(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{number} is not at least 0")
    return number


def main(arguments: list[str]) -> int:
    """Starts or prints what the command line asks for.

    Args:
      arguments: the command line behind the module's name.

    Returns:
      The exit status.

    Raises:
      UserError: an option or an argument is missing or wrong.
    """
    own, train = _split(arguments)
    if own and own[0].startswith("--local"):
        raise UserError(
            "--local is now a kind: python -m lamb_tpu.launch local --processes=2 -- ARGUMENTS"
        )
    options = _parse(own)
    if train is None:
        module = getattr(options, "module", "lamb_tpu.train")
        raise UserError(f"the arguments of {module} are missing: put them after --; see --help")
    if options.kind == "local":
        from lamb_tpu.launch import local

        return local.run_here(
            options.module,
            train,
            options.processes,
            options.devices_per_process,
            options.grace_seconds,
        )
    if options.kind == "slurm":
        from lamb_tpu.launch import slurm

        text = slurm.script(
            options.name,
            train,
            options.nodes,
            options.gpus_per_node,
            options.cpus_per_task,
            options.time,
            options.partition,
            options.signal_seconds,
            options.python,
        )
        return _write(text, options.output, "submit it with: sbatch")
    # Late: it imports JAX, which --help does without.
    from lamb_tpu.launch.pod import make_pod

    pod = make_pod(
        options.kind,
        options.topology,
        options.name,
        train,
        getattr(options, "slices", 1),
        options.spot,
        options.image,
        getattr(options, "shared_workdir", False),
    )
    if options.kind == "jobset":
        from lamb_tpu.launch import jobset

        text = jobset.manifest(pod, options.max_restarts)
        return _write(text, options.output, "start it with: kubectl create -f")
    from lamb_tpu.launch import steps, tpu_vm

    found = tpu_vm.steps(
        pod,
        options.kind,
        options.zone,
        options.project,
        options.version,
        options.create_flag,
        options.data,
    )
    if pod.image is None and tpu_vm.uncommitted():
        print("note: changes that are not committed are not copied", file=sys.stderr)
    if not options.run:
        print(steps.script(found, options.from_step))
        return 0
    again = ["python", "-m", "lamb_tpu.launch", *arguments]
    return steps.run(found, options.from_step, options.delete, again)


def _write(text: str, output: str | None, hint: str) -> int:
    if output is None:
        print(text, end="")
        return 0
    path = pathlib.Path(output).expanduser()
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}); give another file"
        ) from None
    print(f"{path} is written; {hint} {path}")
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Returns the options, and the arguments behind --."""
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # the flags of absl, of which there are none here
    cli.run_main(lambda: sys.exit(main(given)))
