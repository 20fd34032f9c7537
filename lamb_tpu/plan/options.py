"""Checks of the options of `lamb_tpu.plan`, before anything is compiled."""

import dataclasses
import re

from lamb_tpu import cli
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError, listed, out_of_range, shown
from lamb_tpu.spec import Spec

# Largest batch, in examples. The indices of a batch are a constant of the step, which the compiler copies.
MAX_BATCH = 2**24
MAX_ROWS = 100  # values of --batches or --topologies; each may take minutes to compile
MAX_PRICE = 1e9
GBPS = 1e-3, 1e5  # from a modem to a hundred times the fastest link


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The type of answer that the command's options ask for, and the slices and batches to plan."""

    kind: str  # 'plan', 'batch', 'fastest', 'advice' or 'curves'
    topologies: tuple[str, ...]  # names of the slices; several only for 'curves'
    batches: tuple[int, ...] = ()  # the batches, for 'advice'
    # Seconds of measured runs by slice, for 'curves'.
    measured: dict[str, float] = dataclasses.field(default_factory=dict)


def check(
    config: Spec,
    topology: str | None = None,
    find: str | None = None,
    batches: str | None = None,
    topologies: str | None = None,
    workdir: str | None = None,
    price: float | None = None,
    measured: str | None = None,
    html: str | None = None,
) -> PlanRequest:
    """Checks the command's options, and returns what they ask for.

    Raises:
      UserError: an option is missing, has a wrong value, or excludes another given option.
    """
    types = {"--find": find, "--batches": batches, "--topologies": topologies}
    given = [(name, value) for name, value in types.items() if value]
    if topology and topologies:
        given = [("--topology", topology), ("--topologies", topologies)]
    if len(given) > 1:
        (first, chosen), (second, other) = given[:2]
        raise UserError(first, chosen, f"excludes {second}={shown(other)}", "give one of the two")
    for name, value, owner, example in (
        ("--workdir", workdir, batches, "--batches=512,1024"),
        ("--price-per-device-hour", price, batches, "--batches=512,1024"),
        ("--measured", measured, topologies, "--topologies=v3-512,v3-1024"),
    ):
        if value is not None and not owner:
            option = example.partition("=")[0]
            raise UserError(name, value, f"needs {option}", f"add {example}, or leave {name} out")
    if find or batches:
        search, chosen = given[0]
        if html:
            raise UserError(
                "--html", html, f"excludes {search}, which writes no page", "give one of the two"
            )
        if config.phases:
            raise UserError(
                search,
                chosen,
                f"plans a single run, but config.phases has {listed(sorted(config.phases), 'and')}",
                "choose one phase, for example with the argument phase=1 if the config has it",
            )
    if price is not None and not 0 < price <= MAX_PRICE:
        valid = f"a number above 0 and at most {MAX_PRICE:,.0f}"
        raise out_of_range("--price-per-device-hour", price, valid)
    if topologies:
        names = tuple(dict.fromkeys(topologies.split(",")))
        _check_rows("--topologies", len(names))
        for name in names:
            _check_topology(name)
        return PlanRequest("curves", names, measured=_measured(measured, names))
    if not topology:
        raise UserError("--topology", problem="is missing", remedy="see --help")
    topology_lib.topology(topology)
    kind = "advice" if batches else find or "plan"
    return PlanRequest(kind, (topology,), _batches(batches) if batches else ())


def check_batch(batch_size: int) -> None:
    """Rejects a config.batch_size for which the compiler would need gigabytes of memory."""
    if batch_size > MAX_BATCH:
        raise out_of_range("config.batch_size", batch_size, f"at most {MAX_BATCH:,} in a plan")


def check_batches_of(workdir: str | None, changes: bool) -> None:
    """Rejects --batches-of for a config whose batch size does not change."""
    if workdir is not None and not changes:
        raise UserError(
            "--batches-of", workdir, "needs config.batch_rule", "set it, or leave --batches-of out"
        )


def check_gbps(gbps: float | None) -> None:
    """Rejects a --network-gbps outside `GBPS`."""
    low, high = GBPS
    if gbps is not None and not low <= gbps <= high:
        valid = f"{low:g} to {high:,.0f} (10^9 bits per second on a host's link), such as 10"
        raise out_of_range("--network-gbps", gbps, valid)


def _batches(text: str) -> tuple[int, ...]:
    sizes = list(dict.fromkeys(text.split(",")))
    _check_rows("--batches", len(sizes))
    for size in sizes:
        if not re.fullmatch(r"0*[1-9][0-9]*(_[0-9]+)*", size):
            raise UserError(
                "--batches",
                text,
                f"has {shown(size)}, which is not a batch size",
                "give whole numbers of at least 1 with commas between, such as 512,1024",
            )
        # Check the length first: int() fails for thousands of digits.
        if len(size) > 40 or int(size) > MAX_BATCH:
            raise UserError(
                "--batches", text, "has a batch out of range", f"use at most {MAX_BATCH:,}"
            )
    return tuple(dict.fromkeys(map(int, sizes)))


def _check_rows(option: str, count: int) -> None:
    if count > MAX_ROWS:
        raise UserError(
            option,
            problem=f"has {count:,} values, each of which is compiled",
            remedy=f"give at most {MAX_ROWS}",
        )


def _check_topology(name: str) -> None:
    try:
        topology_lib.topology(name)
    except UserError as error:
        raise UserError("--topologies", *error.args[1:]) from None


def _measured(text: str | None, names: tuple[str, ...]) -> dict[str, float]:
    times: dict[str, float] = {}
    for item in text.split(",") if text else ():
        name, _, time = item.partition("=")
        if name not in names:
            raise UserError(
                "--measured",
                text,
                f"has {name!r}, which is not in --topologies",
                f"use {listed(names)}",
            )
        seconds = cli.seconds(f"--measured {name}", re.sub("min$", "m", time))
        assert seconds is not None
        times[name] = seconds
    return times
