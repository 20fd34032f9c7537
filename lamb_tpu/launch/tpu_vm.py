"""Steps of a run on TPU VMs, created at once or from the queue.

The commands are those of gcloud 528. A TPU VM is one slice; a queued resource can be several, to
which `queued-resources ssh` and `scp` send a command together.
"""

import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch import remote
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import Step, join

# cloud.google.com/tpu/docs/runtimes, for JAX.
_VERSIONS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
_API_NAMES = {"v5e": "v5litepod"}
_POLL_SECONDS = 30
_GROUPS = {"tpu-vm": "tpu-vm", "queued-resource": "queued-resources"}


def steps(
    pod: Pod,
    kind: str,
    zone: str,
    project: str | None = None,
    version: str | None = None,
    create_flags: Sequence[str] = (),
    data: str | None = None,
) -> list[Step]:
    """Returns the steps of a run: create, copy, install, run, follow, fetch, delete.

    Args:
      pod: the slices and the run.
      kind: 'tpu-vm' or 'queued-resource'.
      zone: Google's zone.
      project: Google's project; None: gcloud's own setting.
      version: software version of the machines; None: the one for JAX on this generation.
      create_flags: further flags of gcloud's create command, such as '--network=NAME'.
      data: folder of a bucket, to be copied into the folder `data` beside the code; None: nothing.

    Raises:
      UserError: `data` is no folder of a bucket, the generation's software version is not known,
        or there is neither an image nor a git checkout to copy.
    """
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    group = ["gcloud", "compute", "tpus", _GROUPS[kind]]
    everyone, first = ["--worker=all"], ["--worker=0"]
    if kind == "queued-resource":
        everyone, first = ["--node=all", *everyone], ["--node=0", *first]

    def ssh(workers: Sequence[str], command: str) -> str:
        return join(*group, "ssh", pod.name, *where, *workers, f"--command={command}")

    found = [_check(pod)]
    archive = f"{pod.name}.tar.gz"
    if pod.image is None:
        found.append(Step("pack the committed code", _pack(archive), billed=False))
    found.append(
        Step(
            f"create {_described(pod)}",
            join(*_create(pod, kind, group, where, version), *create_flags),
        )
    )
    if kind == "queued-resource":
        found.append(Step("wait until the slices are there", _wait(group, pod.name, where)))
    if pod.image is None:
        copy = join(*group, "scp", archive, f"{pod.name}:", *where, *everyone)
        found += [
            Step("copy the code to all hosts", f"{copy} &&\nrm {shlex.quote(archive)}"),
            Step("install it on all hosts", ssh(everyone, remote.install(archive))),
        ]
    else:
        found.append(Step("fetch the image on all hosts", ssh(everyone, remote.pull(pod.image))))
    if data is not None:
        if not data.startswith(buckets.PREFIX):
            raise UserError(f"--data is {data!r}; it must be a folder in a bucket, gs://...")
        found.append(Step("copy the data to all hosts", ssh(everyone, remote.fetch_data(data))))
    run = remote.start(remote.train(pod.train, pod.image, pod.workdir))
    return [
        *found,
        Step("start the run on all hosts; after a preemption it starts again", ssh(everyone, run)),
        Step("show the output of the first host until the run ends", ssh(first, remote.follow())),
        Step("fetch the workdir", _fetch(pod, ssh(first, remote.pack(pod.workdir)))),
        Step("delete the machines", _delete(group, kind, pod.name, where), deletes=True),
    ]


def _described(pod: Pod) -> str:
    slices = f"{pod.slices} slices" if pod.slices > 1 else "a slice"
    hosts = f"{pod.hosts} hosts" if pod.hosts > 1 else "1 host"
    return f"{slices} {pod.topology.name}, {hosts} of {pod.chips_per_host} chip(s) each"


def _check(pod: Pod) -> Step:
    """A step that finds mistakes in the train arguments before machines cost money."""
    python = sys.executable
    if pathlib.Path(python).is_relative_to(pathlib.Path.cwd()):
        python = os.path.relpath(python)
    command = join(python, "-m", "lamb_tpu.train", *pod.train, "--print_config")
    return Step(
        "check the config on this machine", f"{command} >{shlex.quote(os.devnull)}", billed=False
    )


def _pack(archive: str) -> str:
    root = pathlib.Path(__file__).parents[2]
    if not (root / ".git").exists():
        raise UserError(
            f"--image is missing, and {root} is no git checkout whose code could be copied; give "
            "an image that has lamb_tpu, or start from a checkout"
        )
    at = [] if root == pathlib.Path.cwd() else ["-C", str(root)]
    output = str(pathlib.Path(archive).absolute()) if at else archive
    return join("git", *at, "archive", "--format=tar.gz", f"--output={output}", "HEAD")


def uncommitted() -> bool:
    """Returns whether the checkout has changes that `git archive` leaves out."""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
    )
    return bool(done.stdout)


def _create(
    pod: Pod, kind: str, group: Sequence[str], where: Sequence[str], version: str | None
) -> list[str]:
    generation, size = pod.topology.version, pod.topology.name.rpartition("-")[2]
    version = version or _VERSIONS.get(generation)
    if version is None:
        raise UserError(
            f"--version is missing; the software version of {generation} is not known here"
        )
    spot = ["--spot"] if pod.spot else []
    accelerator = f"--accelerator-type={_API_NAMES.get(generation, generation)}-{size}"
    if kind == "tpu-vm":
        return [*group, "create", pod.name, *where, accelerator, f"--version={version}", *spot]
    nodes = [f"--node-id={pod.name}"]
    if pod.slices > 1:
        nodes = [f"--node-count={pod.slices}", f"--node-prefix={pod.name}"]
    return [
        *group,
        "create",
        pod.name,
        *where,
        *nodes,
        accelerator,
        f"--runtime-version={version}",
        *spot,
    ]


def _wait(group: Sequence[str], name: str, where: Sequence[str]) -> str:
    """A loop over the states of google.cloud.tpu.v2's QueuedResourceState."""
    describe = join(*group, "describe", name, *where, "--format=value(state.state)")
    return (
        f"(while state=$({describe}); do\n"
        '    echo "$state"\n'
        '    case "$state" in ACTIVE) exit 0 ;; FAILED | SUSPEND* | DELETING) exit 1 ;; esac\n'
        f"    sleep {_POLL_SECONDS}\n"
        "done; exit 1)"
    )


def _fetch(pod: Pod, pack: str) -> str:
    """The workdir's last folder, put into `runs` of the current folder."""
    target = "runs/" + (pathlib.PurePosixPath(pod.workdir).name or pod.name)
    folder = f"mkdir -p {shlex.quote(target)} &&\n"
    if pod.workdir.startswith(buckets.PREFIX):
        return folder + join("gcloud", "storage", "rsync", pod.workdir, target, "--recursive")
    return f"{folder}{pack} |\n    {join('tar', '-xz', '-C', target)}"


def _delete(group: Sequence[str], kind: str, name: str, where: Sequence[str]) -> str:
    # A queued resource keeps its slices, unless it is forced to delete them too.
    force = ["--force"] if kind == "queued-resource" else []
    return join(*group, "delete", name, *where, *force, "--quiet")
