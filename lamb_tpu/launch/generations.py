"""TPU generations that Google rents out: machine types, images, and names in each interface.

A TPU is available as an instance of Compute Engine (v5p, v6e, tpu7x), as a node of Google Kubernetes
Engine (all except v2), or as a TPU VM of the older Cloud TPU API, which receives only fixes and has
no generation after v6e.

Sources, as of 2026-11-26: docs.cloud.google.com/compute/docs/tpus/tpu-machines (the generations of
Compute Engine), docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels of nodes),
docs.cloud.google.com/tpu/docs/runtimes (software versions of TPU VMs). The machine types and image
families come from tables and logs of public projects that create such machines.
"""

import dataclasses
import math
from collections.abc import Mapping

from lamb_tpu.cost import slices
from lamb_tpu.errors import UserError, listed

IMAGE_PROJECT = "ubuntu-os-accelerator-images"


@dataclasses.dataclass(frozen=True)
class Generation:
    """Names of one TPU generation."""

    # Number of chips of a host -> machine type of Compute Engine and GKE, if known.
    machine_types: Mapping[int, str]
    # Image family of Compute Engine; None if Compute Engine does not offer this generation.
    image_family: str | None = None
    disk_type: str | None = None  # boot disk type; None for Compute Engine's default
    # Value of the label cloud.google.com/gke-tpu-accelerator; None if GKE does not offer this generation.
    gke: str | None = None
    # Prefix of --accelerator-type in the Cloud TPU API; None if that API lacks this generation.
    api_name: str | None = None
    api_version: str | None = None  # software version for JAX on the TPU VMs of that API
    flat: bool = False  # whether Google's name of a shape has two sides, such as 4x8, and not three
    # Machine type for slices of several hosts; None if it is the same as for a single host.
    slice_machine_type: str | None = None
    # Whether a node pool of several hosts needs a workload policy with its shape.
    has_policy: bool = False

    def machine_type(self, chips_per_host: int, hosts: int = 1) -> str:
        """Returns the machine type of the hosts of a slice."""
        if hosts > 1 and self.slice_machine_type is not None:
            return self.slice_machine_type
        return self.machine_types[chips_per_host]


_CHIPS = 4  # chips per host in a slice of several hosts
_IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
GENERATIONS: Mapping[str, Generation] = {
    "v2": Generation({}, api_name="v2", api_version="tpu-ubuntu2204-base", flat=True),
    "v3": Generation(
        {4: "ct3-hightpu-4t"},
        gke="tpu-v3-slice",
        api_name="v3",
        api_version="tpu-ubuntu2204-base",
        flat=True,
        slice_machine_type="ct3p-hightpu-4t",
    ),
    "v4": Generation(
        {4: "ct4p-hightpu-4t"},
        gke="tpu-v4-podslice",
        api_name="v4",
        api_version="tpu-ubuntu2204-base",
    ),
    "v5e": Generation(
        {1: "ct5lp-hightpu-1t", 4: "ct5lp-hightpu-4t", 8: "ct5lp-hightpu-8t"},
        gke="tpu-v5-lite-podslice",
        api_name="v5litepod",
        api_version="v2-alpha-tpuv5-lite",
        flat=True,
    ),
    "v5p": Generation(
        {4: "ct5p-hightpu-4t"},
        image_family=_IMAGE,
        gke="tpu-v5p-slice",
        api_name="v5p",
        api_version="v2-alpha-tpuv5",
    ),
    "v6e": Generation(
        {1: "ct6e-standard-1t", 4: "ct6e-standard-4t", 8: "ct6e-standard-8t"},
        image_family=_IMAGE,
        gke="tpu-v6e-slice",
        api_name="v6e",
        api_version="v2-alpha-tpuv6e",
        flat=True,
    ),
    "tpu7x": Generation(
        {4: "tpu7x-standard-4t"},
        image_family="ubuntu-accel-2404-amd64-tpu-tpu7x",
        disk_type="hyperdisk-balanced",
        gke="tpu7x",
        has_policy=True,
    ),
}
# Launch kind -> field that a generation needs for this kind, and the service that rents it out.
_NEEDS = {
    "compute": ("image_family", "Compute Engine"),
    "jobset": ("gke", "GKE"),
    "tpu-vm": ("api_name", "the Cloud TPU API"),
    "queued-resource": ("api_name", "the Cloud TPU API"),
}


def table() -> str:
    """Returns the generations as a Markdown table for README.md."""
    rows = [
        "| generation | machine types | chips per host | hosts per slice "
        "| Compute Engine | GKE accelerator | Cloud TPU API: type, software |",
        "|" + " --- |" * 7,
    ]
    for version, generation in GENERATIONS.items():
        # All hosts in a slice of several hosts have four chips.
        hosts = max(map(math.prod, slices.shapes(version).values())) // _CHIPS
        ways = [
            generation.image_family and "image " + generation.image_family,
            generation.gke,
            generation.api_version and f"{generation.api_name}, {generation.api_version}",
        ]
        names = [*generation.machine_types.values()]
        if generation.slice_machine_type is not None:
            names.append(generation.slice_machine_type)
        chips = ", ".join(map(str, generation.machine_types or [_CHIPS]))
        types = ", ".join(names) or "-"
        cells = [version, types, chips, f"1 to {hosts:,}", *(way or "-" for way in ways)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def interfaces(version: str) -> list[str]:
    """Returns the launch kinds that can rent a generation, preferred kinds first.

    >>> interfaces("tpu7x")
    ['compute', 'jobset']
    """
    generation = GENERATIONS[version]
    return [kind for kind, (field, _) in _NEEDS.items() if getattr(generation, field) is not None]


def check_kind(kind: str, topology_name: str, version: str) -> None:
    """Checks that a launch kind can rent a generation.

    Raises:
      UserError: the kind cannot; the error names the kinds that can.
    """
    possible = interfaces(version)
    if kind not in possible:
        raise UserError(
            "--topology",
            topology_name,
            f"is not available: {_NEEDS[kind][1]} has no TPU {version}",
            f"use the kind {listed(possible)}",
        )
