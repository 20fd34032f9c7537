"""Steps of a run on TPU VMs of the older Cloud TPU API, created directly or through its queue.

The commands are for gcloud 528. A TPU VM is one slice. A queued resource can consist of several
slices; `queued-resources ssh` and `scp` reach all hosts of all slices with one command.
"""

from collections.abc import Sequence

from lamb_tpu.launch import host_steps, remote
from lamb_tpu.launch.generations import GENERATIONS
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import Step, join

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
    """Returns the steps of a run, from the creation of the machines to their deletion.

    Args:
      pod: the slices and the run.
      kind: 'tpu-vm' or 'queued-resource'.
      zone: Google's zone.
      project: Google's project; None: gcloud's default project.
      version: software version of the machines; None: the version for JAX on this generation.
      create_flags: further flags for gcloud's create command, such as '--network=NAME'.
      data: see `host_steps.steps`.

    Raises:
      UserError: `data` is not a folder in a bucket, or there is neither an image nor a git checkout
        to copy.
    """
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    group = ["gcloud", "compute", "tpus", _GROUPS[kind]]
    everyone, first = ["--worker=all"], ["--worker=0"]
    if kind == "queued-resource":
        everyone, first = ["--node=all", *everyone], ["--node=0", *first]

    def ssh(workers: Sequence[str], command: str) -> str:
        return join(*group, "ssh", pod.name, *where, *workers, f"--command={command}")

    create = join(*_create(pod, kind, group, where, version), *create_flags)
    created = [Step(f"create {pod.description}", create)]
    if kind == "queued-resource":
        created.append(Step("wait until the slices exist", _wait(group, pod.name, where)))
    reach = host_steps.Reach(
        everyone=lambda command: ssh(everyone, command),
        first=lambda command: ssh(first, command),
        copy=lambda file: join(*group, "scp", file, f"{pod.name}:", *where, *everyone),
    )
    # --force also deletes the slices of a queued resource.
    force = ["--force"] if kind == "queued-resource" else []
    delete = join(*group, "delete", pod.name, *where, *force, "--quiet")
    return host_steps.steps(pod, created, reach, remote.TPU_VM, delete, data)


def _create(
    pod: Pod, kind: str, group: Sequence[str], where: Sequence[str], version: str | None
) -> list[str]:
    generation, size = GENERATIONS[pod.topology.version], pod.topology.name.rpartition("-")[2]
    version = version or generation.api_version
    spot = ["--spot"] if pod.spot else []
    accelerator = f"--accelerator-type={generation.api_name}-{size}"
    if kind == "tpu-vm":
        return [*group, "create", pod.name, *where, accelerator, f"--version={version}", *spot]
    nodes = [f"--node-id={pod.name}"]
    if pod.slices > 1:
        nodes = [f"--node-count={pod.slices}", f"--node-prefix={pod.name}"]
    flags = [*where, *nodes, accelerator, f"--runtime-version={version}", *spot]
    return [*group, "create", pod.name, *flags]


def _wait(group: Sequence[str], name: str, where: Sequence[str]) -> str:
    """Returns a loop that polls the QueuedResourceState (google.cloud.tpu.v2)."""
    describe = join(*group, "describe", name, *where, "--format=value(state.state)")
    return (
        f"(while state=$({describe}); do\n"
        '    echo "$state"\n'
        '    case "$state" in ACTIVE) exit 0 ;; FAILED | SUSPEND* | DELETING) exit 1 ;; esac\n'
        f"    sleep {_POLL_SECONDS}\n"
        "done; exit 1)"
    )
