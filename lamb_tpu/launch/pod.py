"""TPU slices that a run asks for, checked before anything is created."""

import dataclasses
import math
import re
from collections.abc import Sequence

from lamb_tpu.cost.topology import Topology, topology
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch import arguments

# cloud.google.com/compute/docs/naming-resources
_NAME = r"[a-z](?:[-a-z0-9]*[a-z0-9])?"
_LONGEST_NAME = 63
# cloud.google.com/tpu/docs/tpu7x: no TPU VM has these chips.
_GKE_ONLY = "tpu7x"


@dataclasses.dataclass(frozen=True)
class Pod:
    """One or more equal TPU slices, and the run on them.

    Attributes:
      topology: one slice.
      name: of the machines, by Google's rule for names.
      train: arguments of `lamb_tpu.train`.
      workdir: the run's folder, as --workdir among `train` has it.
      slices: number of slices.
      spot: whether the machines may be taken away at any time, at a lower price.
      image: container image that has lamb_tpu; None: the code of this checkout is copied.
    """

    topology: Topology
    name: str
    train: tuple[str, ...]
    workdir: str
    slices: int = 1
    spot: bool = False
    image: str | None = None

    @property
    def chips_per_host(self) -> int:
        """Chips that one host of a slice has."""
        return math.prod(self.topology.compiler_options()["chips_per_host_bounds"])

    @property
    def hosts(self) -> int:
        """Hosts of one slice; each runs one process."""
        return math.prod(self.topology.shape) // self.chips_per_host


def make_pod(
    kind: str,
    topology_name: str,
    name: str,
    train: Sequence[str],
    slices: int = 1,
    spot: bool = False,
    image: str | None = None,
    shared_workdir: bool = False,
) -> Pod:
    """Returns the slices of a run after checks.

    Args:
      kind: 'tpu-vm', 'queued-resource' or 'jobset'.
      topology_name: name of one slice, such as 'v5p-256'.
      name: of the machines.
      train: arguments of `lamb_tpu.train`, with --workdir.
      slices: number of slices.
      spot: whether to use spot capacity.
      image: container image with lamb_tpu, if there is one.
      shared_workdir: whether --workdir lies on a file system that all hosts mount.

    Raises:
      UserError: the name, the slice or the number of slices is impossible, or the workdir is a
        local folder of hosts that have to share it.
    """
    if kind != "jobset" and topology_name.startswith(_GKE_ONLY):
        raise UserError(
            f"--topology is {topology_name!r}; {_GKE_ONLY} is offered by GKE only: use the kind "
            "jobset"
        )
    slice_ = topology(topology_name)
    if slices < 1:
        raise UserError(f"--slices is {slices}; it must be at least 1")
    if kind == "tpu-vm" and slices > 1:
        raise UserError(
            f"--slices is {slices}; a TPU VM is one slice: use the kind queued-resource or jobset"
        )
    if len(name) > _LONGEST_NAME or not re.fullmatch(_NAME, name):
        raise UserError(
            f"--name is {name!r}; it must have 1 to {_LONGEST_NAME} lower-case letters, digits and "
            "hyphens, begin with a letter and not end with a hyphen"
        )
    workdir = arguments.needed_workdir(train)
    pod = Pod(slice_, name, tuple(train), workdir, slices, spot, image)
    hosts = pod.hosts * slices
    if kind == "jobset" and not workdir.startswith(buckets.PREFIX):
        raise UserError(
            f"--workdir is {workdir!r}, which is lost with its pod; give a folder in a bucket, as "
            "--workdir=gs://BUCKET/FOLDER"
        )
    if hosts > 1 and not workdir.startswith(buckets.PREFIX) and not shared_workdir:
        raise UserError(
            f"--workdir is {workdir!r}, a local folder, and the {hosts} hosts must share it; give "
            "a folder in a bucket, as --workdir=gs://BUCKET/FOLDER, or --shared-workdir if all "
            "hosts mount its file system"
        )
    if workdir.startswith("~"):
        raise UserError(
            f"--workdir is {workdir!r}; on another machine ~ is not your home folder: give an "
            "absolute path, or one that is relative to the code"
        )
    return pod
