"""The TPU slices of a run, checked before anything is created."""

import dataclasses
import math
import re
from collections.abc import Sequence

from lamb_tpu.cost.topology import Topology, topology
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch import arguments, generations

# cloud.google.com/compute/docs/naming-resources
_NAME = r"[a-z](?:[-a-z0-9]*[a-z0-9])?"
_LONGEST_NAME = 63


@dataclasses.dataclass(frozen=True)
class Pod:
    """One or more equal TPU slices, and the run on them."""

    topology: Topology
    name: str  # name of the machines
    train: tuple[str, ...]  # arguments of `lamb_tpu.train`, or of another module
    workdir: str  # folder that outlives the machines, see `arguments.needed_folder`
    slices: int = 1  # number of slices
    spot: bool = False  # whether the machines are cheaper and may be preempted at any time
    # Container image that contains lamb_tpu; None to copy the code of this checkout.
    image: str | None = None

    @property
    def chips_per_host(self) -> int:
        """Number of chips of one host."""
        return math.prod(self.topology.compiler_options()["chips_per_host_bounds"])

    @property
    def hosts(self) -> int:
        """Number of hosts of one slice; each runs one process."""
        return math.prod(self.topology.shape) // self.chips_per_host

    @property
    def shape(self) -> str:
        """Shape of a slice in chips in Google's notation, such as '4x8' or '2x2x4'."""
        flat = generations.GENERATIONS[self.topology.version].flat
        return "x".join(map(str, self.topology.shape[:2] if flat else self.topology.shape))

    @property
    def description(self) -> str:
        """The machines in words, such as 'a slice v4-32, 4 hosts of 4 chip(s) each'."""
        slices = f"{self.slices} slices" if self.slices > 1 else "a slice"
        hosts = f"{self.hosts} hosts" if self.hosts > 1 else "1 host"
        return f"{slices} {self.topology.name}, {hosts} of {self.chips_per_host} chip(s) each"


def make_pod(
    kind: str,
    topology_name: str,
    name: str,
    train: Sequence[str],
    slices: int = 1,
    spot: bool = False,
    image: str | None = None,
    shared_workdir: bool = False,
    module: str = arguments.TRAIN,
) -> Pod:
    """Checks and returns the slices of a run.

    Args:
      kind: 'compute', 'tpu-vm', 'queued-resource', 'jobset' or 'cluster'.
      topology_name: name of one slice, such as 'v5p-256'.
      name, slices, spot, image: see `Pod`.
      train: arguments of `module`, with --workdir (or --records).
      shared_workdir: whether --workdir is on a file system that all hosts mount.
      module: the module that runs, a key of `arguments.FOLDERS`.

    Raises:
      UserError: the name, the slice or the number of slices is invalid, or several hosts would have
        to share a local workdir.
    """
    slice_ = topology(topology_name)
    # The slices of a cluster are rented like those of a JobSet.
    rented = "jobset" if kind == "cluster" else kind
    generations.check_kind(rented, topology_name, slice_.version)
    if len(name) > _LONGEST_NAME or not re.fullmatch(_NAME, name):
        raise UserError(
            "--name",
            name,
            "is not a name that Google Cloud accepts",
            f"use 1 to {_LONGEST_NAME} lower-case letters, digits and hyphens, begin with a letter "
            "and do not end with a hyphen",
        )
    workdir = arguments.needed_folder(train, module)
    pod = Pod(slice_, name, tuple(train), workdir, slices=slices, spot=spot, image=image)
    if kind == "jobset":
        _check_jobset(pod, module)
    hosts = pod.hosts * slices
    if hosts > 1 and not workdir.startswith(buckets.PREFIX) and not shared_workdir:
        raise UserError(
            "--workdir",
            workdir,
            f"is a local folder, and the {hosts} hosts must share it",
            "give a folder in a bucket, as --workdir=gs://BUCKET/FOLDER, or --shared-workdir if "
            "all hosts mount its file system",
        )
    if workdir.startswith("~"):
        raise UserError(
            "--workdir",
            workdir,
            "begins with ~, which is not your home folder on another machine",
            "give an absolute path, or a path relative to the code",
        )
    return pod


def _check_jobset(pod: Pod, module: str) -> None:
    topology_name = pod.topology.name
    if not pod.workdir.startswith(buckets.PREFIX):
        name = arguments.FOLDERS[module]
        raise UserError(
            f"--{name}", pod.workdir, "is deleted with its pod", f"use --{name}=gs://BUCKET/FOLDER"
        )
    if module != arguments.TRAIN and pod.hosts > 1:
        raise UserError(
            "--topology",
            topology_name,
            f"has {pod.hosts} hosts, and each job of an array runs on one host",
            "give a slice of one host, such as v6e-8",
        )
    connects = pod.hosts > 1 and pod.topology.version != "v3"
    if module == arguments.TRAIN and pod.slices > 1 and not connects:
        raise UserError(
            "--slices",
            pod.slices,
            f"cannot be connected: GKE connects only slices of several hosts of TPU v4 or later, and "
            f"{topology_name} is not such a slice",
            "use one slice",
        )
