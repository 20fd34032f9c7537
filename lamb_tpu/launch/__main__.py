"""Starts a run on this machine, on TPUs of Google Cloud, or under SLURM.

`python -m lamb_tpu.launch local --processes=4 -- --config=digits --workdir=DIR` starts four
processes on this machine. The other kinds write a file, or print commands and, with --run, run them.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from lamb_tpu import cli, terminal
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.launch import arguments as train_arguments
from lamb_tpu.launch import options as options_lib

if TYPE_CHECKING:
    from lamb_tpu.launch import pod as pod_lib
    from lamb_tpu.launch import steps as steps_lib


def main(arguments: list[str]) -> int:
    """Entry point of the command line; returns the exit status."""
    terminal.check_words(arguments)
    words, train = _split(arguments)
    options = options_lib.parse((__doc__ or "").partition("\n")[0], words)
    if options.kind == "cluster":
        return _make_cluster(options, arguments, train)
    if train is None:
        module = getattr(options, "module", "lamb_tpu.train")
        raise UserError(
            f"the arguments of {module}", problem="are missing", remedy="put them after --"
        )
    if options.kind == "local":
        from lamb_tpu.launch import local

        local.check_memory(options.processes, options.devices_per_process)
        return local.run_local(
            options.module,
            train,
            options.processes,
            options.devices_per_process,
            options.grace_seconds,
        )
    if options.kind in ("jobset", "slurm"):
        train_arguments.check_array(train, options.module, options.array)
        return (_jobset if options.kind == "jobset" else _slurm)(options, train)
    return _machines(options, arguments, train)


def _slurm(options: argparse.Namespace, train: list[str]) -> int:
    from lamb_tpu.launch import slurm

    fields = vars(options).keys() - {"kind", "output"}
    text = slurm.script(train=train, **{name: getattr(options, name) for name in fields})
    return _write(text, options.output, "submit it with: sbatch")


def _pod(options: argparse.Namespace, train: list[str]) -> "pod_lib.Pod":
    # Imported here, because `pod` imports JAX, which would delay --help.
    from lamb_tpu.launch.pod import make_pod

    names = ("slices", "spot", "image", "shared_workdir", "module")
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return make_pod(options.kind, options.topology, options.name, train, **given)


def _jobset(options: argparse.Namespace, train: list[str]) -> int:
    pod = _pod(options, train)
    from lamb_tpu.launch import cluster, jobset

    cluster.check_image(options.image)
    if options.service_account is not None:
        cluster.check_account(options.service_account)
    if options.tool is not None:
        return _write(_with_tool(options, pod), options.output, "start it with: sh")
    text = jobset.manifest(
        pod, options.max_restarts, options.service_account, options.array, options.module
    )
    return _write(text, options.output, "start it with: kubectl create -f")


def _machines(options: argparse.Namespace, given: list[str], train: list[str]) -> int:
    pod = _pod(options, train)
    from lamb_tpu.launch import compute, tpu_vm

    common = options.create_flag, options.data
    if options.kind == "compute":
        capacity = compute.Capacity(options.spot, options.flex_start, options.reservation)
        steps = compute.steps(pod, options.zone, options.project, capacity, *common)
    else:
        where = options.kind, options.zone, options.project, options.version
        steps = tpu_vm.steps(pod, *where, *common)
    return _show_or_run(options, pod, steps, given, "copied")


def _make_cluster(options: argparse.Namespace, given: list[str], train: list[str] | None) -> int:
    if train is not None:
        raise UserError(
            "the arguments after --",
            problem="have no effect, because the kind cluster starts no run",
            remedy="start runs with the kind jobset",
        )
    # `make_pod` needs a workdir; this placeholder has no effect, because a cluster serves many runs.
    pod = _pod(options, ["--workdir=gs://bucket/runs"])
    from lamb_tpu.launch import cluster, compute

    capacity = compute.Capacity(options.spot, options.flex_start, options.reservation)
    steps = cluster.steps(
        pod, options.zone, options.project, options.bucket, capacity, options.service_account
    )
    return _show_or_run(options, pod, steps, given, "in the image")


def _show_or_run(
    options: argparse.Namespace,
    pod: "pod_lib.Pod",
    steps: "list[steps_lib.Step]",
    given: list[str],
    missing: str,
) -> int:
    from lamb_tpu.launch import local_steps
    from lamb_tpu.launch import steps as steps_lib

    if pod.image is None and local_steps.uncommitted():
        print(f"note: uncommitted changes are not {missing}", file=sys.stderr)
    if not options.run:
        print(steps_lib.script(steps, options.from_step))
        return 0
    again = ["python", "-m", "lamb_tpu.launch", *given]
    return steps_lib.run(steps, options.from_step, options.delete, again)


def _with_tool(options: argparse.Namespace, pod: "pod_lib.Pod") -> str:
    from lamb_tpu.launch import toolkits

    if options.array is not None:
        raise UserError(
            "--array", options.array, f"excludes --tool={options.tool}", "leave --tool out"
        )
    for name in ("cluster", "zone", "project"):
        if getattr(options, name) is None:
            problem = f"is missing, and --tool={options.tool} needs it"
            raise UserError(f"--{name}", ..., problem, f"add --{name} before --")
    where = options.cluster, options.zone, options.project
    more = options.max_restarts, options.service_account
    return toolkits.command(options.tool, pod, *where, *more) + "\n"


def _write(text: str, output: str | None, hint: str) -> int:
    if output is None:
        print(text, end="")
        return 0
    path = buckets.local(output, "--output")
    writing.replace(path, text, "--output")
    print(f"wrote {path}; {hint} {path}")
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Returns the words before and after --; None if there is no --."""
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    cli.run_command(main)
