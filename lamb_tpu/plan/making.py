"""A plan, made by compiling the training step of a config for a slice."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.cost import hlo, network, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.hosts import HostNetwork, hosts
from lamb_tpu.cost.network import Network
from lamb_tpu.cost.timeline import Timeline
from lamb_tpu.errors import UserError
from lamb_tpu.plan import guard
from lamb_tpu.plan import stages as stages_lib
from lamb_tpu.plan.cache import Cache, Compiled, key_of
from lamb_tpu.plan.report import Memory, Plan, Traffic
from lamb_tpu.plan.totals import work_of
from lamb_tpu.run import recipe
from lamb_tpu.run.build import Run, prepare

T = TypeVar("T")


def make_plan(
    config: ConfigDict,
    name: str,
    waiting: Callable[[str], Any] = contextlib.nullcontext,
    examples: int | None = None,
    cache: Cache | None = None,
    gbps: float | None = None,
) -> Plan:
    """Compiles the training step of a config for a slice.

    A run whose exchange or optimizer has several stages has a step for each. The plan is then of
    the step of most updates, and its totals are of all.

    After this call JAX runs on the CPU alone.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      name: name of the slice, such as 'v3-2048'.
      waiting: makes a context from a text that says what is being waited for; the context is
        entered while waiting.
      examples: number of training examples, see `data.load_shapes`.
      cache: where compiled programs are kept; None keeps none.
      gbps: rate of the only link of each host, in 10^9 bits a second; None: the slice's own
        network.

    Raises:
      UserError: the config has a mistake, the name is unknown, or the TPU compiler is missing or
        fails.
    """
    cache = cache or Cache(None)
    # Before `prepare`: this keeps JAX on the CPU, which must be settled before JAX uses a device.
    devices = topology_lib.devices(topology_lib.topology(name))
    run = prepare(config, None, devices, load=loader(config, examples))
    if run.recipe.path is not None:
        raise UserError(
            f"config.batch_rule.name is {config.batch_rule.name!r}, and this plan is of one batch "
            "size; leave config.batch_rule empty, or plan the run with --topology alone"
        )
    stages = stages_lib.stages_of(run)
    plans = dict[stages_lib.Stage, Plan]()
    for stage, (first, _) in stages.items():
        plans[stage] = _of_step(run, first, name, devices, waiting, cache, gbps)
        if not plans[stage].fits:
            return plans[stage]
    most = plans[max(stages, key=lambda stage: stages[stage][1])]
    if len(stages) == 1:
        return most
    told = stages_lib.names(list(stages))
    return dataclasses.replace(
        most,
        compile_seconds=sum(plan.compile_seconds for plan in plans.values()),
        is_cached=all(plan.is_cached for plan in plans.values()),
        stages=tuple(
            stages_lib.row(each, stages[stage][1], plans[stage].times)
            for each, stage in zip(told, stages, strict=True)
        ),
    )


def _of_step(
    run: Run,
    update: int,
    name: str,
    devices: Sequence[jax.Device],
    waiting: Callable[[str], Any],
    cache: Cache,
    gbps: float | None,
) -> Plan:
    """Compiles the step of the stage of an update; see `make_plan`."""
    slice_, config = topology_lib.topology(name), run.config
    calibration = CALIBRATED.for_generation(slice_.version)
    lowered = run.make_train_step(update).lower(run.abstract_state, run.abstract_batch())
    places = network.places(run.mesh.devices.flat)
    key = key_of(lowered.as_text(), places, slice_.compiler_options())
    kept = cache.load(key)
    if key in guard.crashed:
        raise UserError(f"the TPU compiler crashes on this step for {name}")
    if kept is None:
        with (
            guard.compiling(key),
            waiting(
                f"compiling the training step for {len(devices):,} devices; large models take minutes"
            ),
        ):
            compiled = _compile(lowered, name)
        cache.store(key, compiled, config, slice_.name)
    else:
        compiled = kept
    fits, known = compiled.memory is not None, cache.batches(config, slice_.name)
    plan = Plan(
        topology=slice_,
        mesh=dict(run.mesh.shape),
        hosts=len({device.process_index for device in devices}),
        batch_size=config.batch_size,
        backend=config.parallel.backend,
        compile_seconds=compiled.seconds,
        is_cached=kept is not None,
        fits=fits,
        needed=_needed(compiled.message),
        message=compiled.message,
        leaves=run.leaves.line(),
        calibration=calibration,
        other_batch=_other_batch(config.batch_size, fits, known),
        work=work_of(run),
        recipe=run.recipe,
    )
    if compiled.memory is None:
        return plan
    memory, notes = Memory(**compiled.memory), list[str]()
    # The text of HLO is no stable format. A plan that lacks one number, with a note why, is still
    # of use.
    text = compiled.program
    cost = _read(hlo.program_cost, text, notes)
    fabric = (
        Network(slice_, places)
        if gbps is None
        else HostNetwork(slice_, places, hosts(run.mesh.devices.flat), gbps)
    )
    plan = dataclasses.replace(plan, network=fabric, program=text)
    times = _read(lambda _: plan.timelines(calibration.each), text, notes)
    return dataclasses.replace(
        plan,
        needed=memory.peak,
        memory=memory,
        flops=_read(hlo.program_flops, text, notes),
        model_flops=run.model_flops and run.model_flops / len(devices),
        cycles=cost and cost.cycles,
        times=times,
        collectives=None if times is None else _traffic(times[1], fabric),
        # Several readers can fail for one reason, which is told once.
        notes=tuple(dict.fromkeys(notes)),
    )


def release() -> None:
    """Gives memory of compiled steps back to the system.

    A process that plans many steps calls it after each: the C library keeps what the TPU compiler
    frees, which for a dozen steps of BERT-Large was 24 GB.
    """
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def loader(config: ConfigDict, examples: int | None) -> Callable[..., data.Source]:
    """Returns a function like `data.load` that needs no files; `examples` as in `make_plan`."""
    return functools.partial(
        data.load_shapes, examples=examples, counted_by=recipe.in_epochs(config)
    )


def _compile(lowered: jax.stages.Lowered, name: str) -> Compiled:
    """Compiles a step; one that does not fit has the compiler's out-of-memory message.

    Raises:
      UserError: the compiler fails for another reason.
    """
    start = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # A step that does not fit is a result of planning, not a failure.
        if "RESOURCE_EXHAUSTED" in str(error):
            return Compiled(round(time.monotonic() - start, 1), str(error), None, "")
        raise UserError(
            f"the TPU compiler fails on this step for {name} ({' '.join(str(error).split())[:300]})"
            "; change the mesh, config.parallel.backend or the model's options, or install another "
            "libtpu"
        ) from error
    seconds = round(time.monotonic() - start, 1)
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    assert sizes is not None and text is not None  # the TPU compiler returns both
    memory = Memory(
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes,
        sizes.peak_memory_in_bytes,
    )
    return Compiled(seconds, "", dataclasses.asdict(memory), text)


def _traffic(schedule: Timeline, fabric: Network) -> tuple[Traffic, ...]:
    """Returns the sums over the collectives of a schedule, largest traffic first."""
    rows = traffic.table(event.collective for event in schedule.events)
    found = []
    for row in rows:
        events = [
            event
            for event in schedule.events
            if (event.collective.kind, event.collective.group_size, event.collective.dtype)
            == row[:3]
        ]
        first = events[0].collective
        route = fabric.route(first.groups, first.kind == "collective-permute")
        found.append(
            Traffic(
                row,
                sum(event.seconds for event in events),
                sum(event.exposed for event in events),
                route,
                events[0].algorithm,
            )
        )
    return tuple(found)


def _other_batch(batch: int, fits: bool, known: dict[int, bool]) -> int | None:
    """Returns the nearest known batch that fits: a larger one, or a smaller one if ours does not.

    >>> known = {64: True, 128: True, 256: True, 512: False}
    >>> _other_batch(128, True, known), _other_batch(256, True, known)
    (256, None)
    >>> _other_batch(512, False, known)
    256
    """
    fitting: Sequence[int] = sorted(size for size in known if known[size])
    if fits:
        return next((size for size in fitting if size > batch), None)
    return next((size for size in reversed(fitting) if size < batch), None)


def _needed(message: str) -> float | None:
    """Returns the bytes that a program needs, from the compiler's out-of-memory message.

    >>> _needed("the total memory required for HLO temporaries (24.00G) exceeds available HBM")
    25769803776.0
    >>> _needed("Used 16.50G of 15.48G hbm. Exceeded hbm capacity by 1.02G.")
    17716740096.0
    """
    found = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT]?)", message)
    return float(found[1]) * 2 ** (10 * " KMGT".index(found[2] or " ")) if found else None


def _read(reader: Callable[[str], T], text: str, notes: list[str]) -> T | None:
    """Returns what `reader` reads from HLO; if it fails, returns None and adds a note."""
    try:
        return reader(text)
    except ValueError as error:
        notes.append(str(error))
        return None
