"""The options of `lamb_tpu.plan` that say what is planned, checked before anything compiles."""

from typing import NamedTuple

from ml_collections import ConfigDict

from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError


class Request(NamedTuple):
    """What is to be planned.

    Attributes:
      kind: 'plan', 'batch' or 'fastest'.
      topologies: names of the slices; one but for 'topologies'.
    """

    kind: str
    topologies: tuple[str, ...]


def check(
    config: ConfigDict,
    topology: str | None = None,
    find: str | None = None,
    html: str | None = None,
) -> Request:
    """Returns what the options ask for; each argument is the option of its name.

    Raises:
      UserError: an option is missing, has a wrong value, or excludes another one.
    """
    if not topology:
        raise UserError("--topology is missing; see --help")
    if find:
        option = f"--find={find}"
        if html:
            raise UserError(
                f"--html is {html!r}, and {option} writes no page; leave one of them out"
            )
        _one_run(config, option)
    topology_lib.topology(topology)
    return Request(find or "plan", (topology,))


def _one_run(config: ConfigDict, option: str) -> None:
    if config.phases:
        raise UserError(
            f"{option} is for one run, and config.phases has {', '.join(sorted(config.phases))}; "
            "give one of them, often by the config's argument phase=1"
        )
