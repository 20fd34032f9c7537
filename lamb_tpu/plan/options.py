"""The options of `lamb_tpu.plan` that say what is planned, checked before anything compiles."""

import dataclasses
import math
import re

from ml_collections import ConfigDict

from lamb_tpu import cli
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class Request:
    """Kind of answer that the options ask for, with its slices and batches.

    Attributes:
      kind: 'plan', 'batch', 'fastest', 'advice' or 'curves'.
      topologies: names of the slices; one but for 'curves'.
      batches: the batches of 'advice'.
      measured: seconds of measured runs by slice, of 'curves'.
    """

    kind: str
    topologies: tuple[str, ...]
    batches: tuple[int, ...] = ()
    measured: dict[str, float] = dataclasses.field(default_factory=dict)


def check(
    config: ConfigDict,
    topology: str | None = None,
    find: str | None = None,
    batches: str | None = None,
    topologies: str | None = None,
    workdir: str | None = None,
    price: float | None = None,
    measured: str | None = None,
    html: str | None = None,
) -> Request:
    """Returns what the options ask for; each argument is the option of its name.

    Raises:
      UserError: an option is missing, has a wrong value, or excludes another one.
    """
    kinds = {"--find": find, "--batches": batches, "--topologies": topologies}
    given = [f"{name}={value}" for name, value in kinds.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other; give one of them")
    if topology and topologies:
        raise UserError(
            f"--topology is {topology!r} and --topologies is {topologies!r}; give one of them"
        )
    for name, value, owner, example in (
        ("--workdir", workdir, batches, "--batches=512,1024"),
        ("--price-per-device-hour", price, batches, "--batches=512,1024"),
        ("--measured", measured, topologies, "--topologies=v3-512,v3-1024"),
    ):
        if value is not None and not owner:
            option = example.partition("=")[0]
            raise UserError(
                f"{name} is {value!r}, which belongs to {option}; add one such as {example}, or "
                f"leave {name} out"
            )
    if html and (find or batches):
        raise UserError(f"--html is {html!r}, and {given[0]} writes no page; leave one of them out")
    if find or batches:
        _one_run(config, given[0])
    if price is not None and not 0 < price < math.inf:
        raise UserError(f"--price-per-device-hour is {price}; it must be a number above 0")
    if topologies:
        names = tuple(dict.fromkeys(topologies.split(",")))
        for name in names:
            _check_topology(name)
        return Request("curves", names, measured=_measured(measured, names))
    if not topology:
        raise UserError("--topology is missing; see --help")
    topology_lib.topology(topology)
    kind = "advice" if batches else find or "plan"
    return Request(kind, (topology,), _batches(batches) if batches else ())


def check_batches_of(workdir: str | None, changes: bool) -> None:
    """Refuses --batches-of where no batch changes.

    Raises:
      UserError: it is given, and `changes` is False.
    """
    if workdir is not None and not changes:
        raise UserError(
            f"--batches-of is {workdir!r}, and the config has one batch size; give a "
            "config.batch_rule, or leave it out"
        )


def check_gbps(gbps: float | None) -> None:
    """Refuses a --network-gbps that is no rate.

    Raises:
      UserError: it is given, and is not above 0, or infinite.
    """
    if gbps is not None and not 0 < gbps < math.inf:
        raise UserError(
            f"--network-gbps is {gbps:g}; it must be a number above 0, the 10^9 bits a second of a "
            "host's link, such as 10"
        )


def _one_run(config: ConfigDict, option: str) -> None:
    if config.phases:
        raise UserError(
            f"{option} is for one run, and config.phases has {', '.join(sorted(config.phases))}; "
            "give one of them, often by the config's argument phase=1"
        )


def _batches(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    for size in sizes:
        if not re.fullmatch(r"0*[1-9][\d_]*", size):
            raise UserError(
                f"--batches is {text!r}, and {size!r} is no batch; give whole numbers of at least "
                "1 with commas between, such as 512,1024"
            )
    return tuple(dict.fromkeys(map(int, sizes)))


def _check_topology(name: str) -> None:
    try:
        topology_lib.topology(name)
    except UserError as error:
        raise UserError(str(error).replace("--topology is", "--topologies has", 1)) from None


def _measured(text: str | None, names: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in text.split(",") if text else ():
        name, _, time = item.partition("=")
        if name not in names:
            raise UserError(
                f"--measured has {name!r}, which --topologies has not; it has {', '.join(names)}"
            )
        seconds = cli.seconds(f"--measured {name}", re.sub("min$", "m", time))
        assert seconds is not None
        found[name] = seconds
    return found
