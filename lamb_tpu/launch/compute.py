"""Steps of a run on TPUs of Compute Engine, for one slice.

A slice of one host is an instance. A slice of several hosts is a managed instance group in bulk
mode with a workload policy that contains the slice's shape: all hosts are created together, and
their chips are connected (docs.cloud.google.com/compute/docs/tpus/create-tpu-vm-instance and
create-tpu-mig-multi-host-slice; docs.cloud.google.com/sdk/gcloud/reference/compute/
resource-policies/create/workload-policy; as of 2026-11-26).

One step copies a file with the sorted names of the instances to all hosts of a group. The process
id of a host is the position of its name in this file; the first host is the coordinator.
"""

import dataclasses
import re
import shlex
from collections.abc import Sequence

from lamb_tpu.errors import UserError, listed
from lamb_tpu.launch import host_steps, remote
from lamb_tpu.launch.generations import GENERATIONS, IMAGE_PROJECT
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import Step, command, in_turn, join

_DISK = "200GB"
_POLL_SECONDS = 30
# Simultaneous connections; each is a Python process on this machine.
_CONNECTIONS = 16
_PORT = 8476
_GROUPS = "gcloud compute instance-groups managed"
_HOSTS = "hosts"  # file in the folder lamb_tpu of every host
_DURATION = r"(?:\d+[dhms])+"
# Images of Compute Engine lack docker, and some lack pip.
_UV = (
    "{ test -x ~/.local/bin/uv || curl --fail --silent --show-error --location "
    "https://astral.sh/uv/install.sh | sh -s -- --quiet; }"
)
_DOCKER = (
    "{ command -v docker >/dev/null ||\n"
    "    { sudo apt-get --quiet update && sudo apt-get --quiet install --yes docker.io; }; }"
)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Provisioning of the machines: on demand if no field is set. At most one field may be set."""

    spot: bool = False  # whether the machines may be preempted at any time
    # Lifetime of the machines, such as '7d' or '12h30m': the request waits in a queue, and Google
    # deletes the machines after that time.
    flex_start: str | None = None
    reservation: str | None = None  # name of a reservation

    def check(self) -> None:
        """Raises a UserError if two fields are set, or a value is invalid."""
        ways = {
            "--spot": self.spot,
            "--flex-start": self.flex_start is not None,
            "--reservation": self.reservation is not None,
        }
        chosen = [way for way, is_set in ways.items() if is_set]
        if len(chosen) > 1:
            raise UserError(
                chosen[0], problem=f"excludes {listed(chosen[1:], 'and')}", remedy="give only one"
            )
        if self.flex_start is not None and not re.fullmatch(_DURATION, self.flex_start):
            raise UserError(
                "--flex-start", self.flex_start, "is not a duration", "use a form like 12h30m"
            )
        if self.reservation == "":
            raise UserError("--reservation", "", "is empty", "give the name of a reservation")

    def flags(self) -> list[str]:
        """Returns gcloud's flags for an instance; see `check`."""
        self.check()
        ends = "--instance-termination-action=DELETE"
        if self.spot:
            return ["--provisioning-model=SPOT", ends]
        if self.flex_start is not None:
            return [
                "--provisioning-model=FLEX_START",
                f"--max-run-duration={self.flex_start}",
                ends,
            ]
        if self.reservation is not None:
            return [
                "--provisioning-model=RESERVATION_BOUND",
                ends,
                "--reservation-affinity=specific",
                f"--reservation={self.reservation}",
            ]
        return []


def steps(
    pod: Pod,
    zone: str,
    project: str | None = None,
    capacity: Capacity = Capacity(),
    create_flags: Sequence[str] = (),
    data: str | None = None,
) -> list[Step]:
    """Returns the steps of a run on one slice, from the slice's creation to its deletion.

    Args:
      pod: the slice and the run.
      zone: Google's zone, such as 'us-east5-a'.
      project: Google's project; None: gcloud's default project, for one host only.
      capacity: provisioning of the machines.
      create_flags: further flags for the command that creates an instance or its template, such as
        '--network=NAME'.
      data: see `host_steps.steps`.

    Raises:
      UserError: an argument is missing or invalid, or there is neither an image nor a git checkout
        to copy.
    """
    flags = [*_instance(pod), *capacity.flags(), *create_flags]
    machines = _single if pod.hosts == 1 else _group
    return host_steps.steps(pod, *machines(pod, zone, project, flags), data)


def _instance(pod: Pod) -> list[str]:
    generation = GENERATIONS[pod.topology.version]
    return [
        f"--machine-type={generation.machine_type(pod.chips_per_host)}",
        f"--image-project={IMAGE_PROJECT}",
        f"--image-family={generation.image_family}",
        f"--boot-disk-size={_DISK}",
        *([f"--boot-disk-type={generation.disk_type}"] if generation.disk_type else []),
        "--maintenance-policy=TERMINATE",
        "--scopes=cloud-platform",
    ]


# Steps that create the machines, commands that reach them, their type, and the command that deletes
# them.
_Machines = tuple[list[Step], host_steps.Reach, remote.Host, str]


def _single(pod: Pod, zone: str, project: str | None, flags: Sequence[str]) -> _Machines:
    where = _where(zone, project)

    def ssh(text: str) -> str:
        return command("gcloud compute ssh", pod.name, *where, f"--command={text}")

    create = command("gcloud compute instances create", pod.name, *where, *flags)
    created = [
        Step(f"create {pod.description}", create),
        Step("wait until the host answers", _until(ssh("true"))),
    ]
    reach = host_steps.Reach(
        everyone=ssh,
        first=ssh,
        copy=lambda file: command("gcloud compute scp", file, f"{pod.name}:", *where),
    )
    delete = command("gcloud compute instances delete", pod.name, *where, "--quiet")
    return created, reach, _host(1), delete


def _group(pod: Pod, zone: str, project: str | None, flags: Sequence[str]) -> _Machines:
    if project is None:
        problem = f"is missing, and a slice of {pod.hosts} hosts needs it"
        raise UserError("--project", ..., problem, "add --project=PROJECT")
    region, where = region_of(zone), _where(zone, project)
    regional = [f"--region={region}", f"--project={project}"]
    names = command(f"{_GROUPS} list-instances", pod.name, *where, "--format=value(NAME)")

    def everyone(text: str) -> str:
        # xargs appends the name of a host to the command.
        return f"{names} |\n    {_each('ssh', *where, f'--command={text}')}"

    def first(text: str) -> str:
        ssh = join(*where, f"--command={text}")
        return f'host=$({names} | sort | head -n 1) &&\ngcloud compute ssh "$host" \\\n    {ssh}'

    def copy(file: str, target: str = "") -> str:
        each = _each("scp", *where, file)
        return f"{names} | sed {shlex.quote(f's|$|:{target}|')} |\n    {each}"

    listed = f"{pod.name}.hosts"
    created = [
        *_created(pod, region, project, where, flags),
        Step("wait until the hosts answer", _until(everyone("true"))),
        Step(
            "copy the list of hosts to every host",
            in_turn(
                f"{names} | sort >{shlex.quote(listed)}",
                everyone(f"mkdir -p {remote.FOLDER}"),
                copy(listed, f"{remote.FOLDER}/{_HOSTS}"),
                f"rm {shlex.quote(listed)}",
            ),
        ),
    ]
    delete = in_turn(
        command(f"{_GROUPS} delete", pod.name, *where, "--quiet"),
        command("gcloud compute instance-templates delete", pod.name, *regional, "--quiet"),
        command("gcloud compute resource-policies delete", pod.name, *regional, "--quiet"),
    )
    reach = host_steps.Reach(everyone=everyone, first=first, copy=copy)
    return created, reach, _host(pod.hosts), delete


def policy(pod: Pod, region: str, project: str, *more: str) -> Step:
    """Returns the step that creates a slice's workload policy."""
    create = command(
        "gcloud compute resource-policies create workload-policy",
        pod.name,
        f"--region={region}",
        f"--project={project}",
        "--type=HIGH_THROUGHPUT",
        f"--accelerator-topology={pod.shape}",
        *more,
    )
    return Step("create the policy that connects the chips", create)


def _created(
    pod: Pod, region: str, project: str, where: Sequence[str], flags: Sequence[str]
) -> list[Step]:
    path = f"projects/{project}/regions/{region}"
    template = command(
        "gcloud compute instance-templates create",
        pod.name,
        f"--project={project}",
        f"--instance-template-region={region}",
        *flags,
    )
    group = command(
        f"{_GROUPS} create",
        pod.name,
        *where,
        f"--size={pod.hosts}",
        f"--template={path}/instanceTemplates/{pod.name}",
        f"--workload-policy={path}/resourcePolicies/{pod.name}",
        "--target-size-policy-mode=bulk",
        "--default-action-on-vm-failure=do-nothing",
    )
    wait = command(f"{_GROUPS} wait-until", pod.name, *where, "--stable")
    return [
        policy(pod, region, project, "--accelerator-topology-mode=AUTO_CONNECT"),
        Step("create the template of a host", template),
        Step(f"create {pod.description}", group),
        Step("wait until the hosts exist", wait),
    ]


def region_of(zone: str) -> str:
    """Returns the region of a zone.

    >>> region_of("us-east5-a")
    'us-east5'

    Raises:
      UserError: `zone` is not a zone.
    """
    region, _, letter = zone.rpartition("-")
    if not region or not letter:
        raise UserError("--zone", zone, "is not a zone", "give one such as us-east5-a")
    return region


def _where(zone: str, project: str | None) -> list[str]:
    return [f"--zone={zone}", *([f"--project={project}"] if project else [])]


def _each(*words: str) -> str:
    """Returns a command that runs gcloud once per line of its input, several at a time."""
    xargs = f"xargs --max-procs={_CONNECTIONS} --max-args=1 gcloud compute"
    return command(xargs, *words)


def _until(command: str) -> str:
    """Returns a loop that ends when a command succeeds; a new host takes minutes to answer."""
    return f"until {command}\ndo\n    sleep {_POLL_SECONDS}\ndone"


def _host(count: int) -> remote.Host:
    """Returns a host's install commands and the variables that `lamb_tpu.cluster.distributed` reads."""
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"$(head -n 1 {_HOSTS}):{_PORT}",
        "JAX_NUM_PROCESSES": f"$(wc -l <{_HOSTS})",
        "JAX_PROCESS_ID": f"$(awk -v \"host=$(hostname -s)\" '$0 == host {{ print NR - 1 }}' {_HOSTS})",
    }
    return remote.Host(_UV, "~/.local/bin/uv", _DOCKER, *([variables] if count > 1 else []))
