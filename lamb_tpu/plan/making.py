"""Makes a plan by compiling the training step of a config for a slice."""

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

from lamb_tpu import data
from lamb_tpu.cost import hlo, network, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.hosts import HostNetwork, hosts
from lamb_tpu.cost.network import Network
from lamb_tpu.cost.timeline import Timeline
from lamb_tpu.errors import UserError, reason
from lamb_tpu.plan import guard
from lamb_tpu.plan import stages as stages_lib
from lamb_tpu.plan.cache import Cache, Compiled, Memory, key_of
from lamb_tpu.plan.options import check_batch
from lamb_tpu.plan.report import Plan, Traffic
from lamb_tpu.plan.totals import work_of
from lamb_tpu.run import recipe
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.spec import Config, Spec, parse

T = TypeVar("T")


def make_plan(
    config: Config,
    name: str,
    waiting: Callable[[str], Any] = contextlib.nullcontext,
    examples: int | None = None,
    cache: Cache | None = None,
    gbps: float | None = None,
) -> Plan:
    """Compiles the training step of a config for a slice.

    If the exchange or optimizer has several stages, the step of each stage is compiled. The plan
    then describes the stage with the most updates; its totals cover all stages.

    After this call JAX runs only on the CPU.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      name: name of the slice, such as 'v3-2048'.
      waiting: maps a message to a context manager, which is active during a compilation.
      examples: number of training examples, see `data.load_shapes`.
      cache: cache of compiled programs.
      gbps: rate of a host's link in 10^9 bits per second, if each host has one link to all other
        hosts; None: the network of the slice.

    Raises:
      UserError: the config has an error, the name is unknown, or the TPU compiler is missing or
        fails.
    """
    cache = cache or Cache(None)
    config = parse(config)
    check_batch(config.batch_size)
    # Call this before `prepare`: it restricts JAX to the CPU, which only works before JAX first
    # uses a device.
    devices = topology_lib.devices(topology_lib.topology(name))
    run = prepare(config, None, devices, load=loader(config, examples))
    if run.recipe.path is not None:
        raise UserError(
            "config.batch_rule.name",
            config.batch_rule.name,
            "changes the batch, but this command plans one batch size",
            "leave config.batch_rule empty, or give --topology without --find and --batches",
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
    names = stages_lib.names(list(stages))
    return dataclasses.replace(
        most,
        compile_seconds=sum(plan.compile_seconds for plan in plans.values()),
        is_cached=all(plan.is_cached for plan in plans.values()),
        stages=tuple(
            stages_lib.row(each, stages[stage][1], plans[stage].times)
            for each, stage in zip(names, stages, strict=True)
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
    """Compiles the step for update number `update`, counted from 0; see `make_plan`."""
    slice_, config = topology_lib.topology(name), run.spec
    lowered = run.make_train_step(update).lower(run.abstract_state, run.abstract_batch())
    coordinates = network.places(run.mesh.devices.flat)
    key = key_of(lowered.as_text(), coordinates, slice_.compiler_options())
    cached = cache.load(key)
    if key in guard.crashed:
        remedy = "change the mesh, config.parallel.backend or the model's options"
        raise UserError(f"the training step for {name}", ..., "crashes the TPU compiler", remedy)
    compiled = cached
    if compiled is None:
        text = (
            f"compiling the training step for {len(devices):,} devices; large models take minutes"
        )
        with guard.compiling(key), waiting(text):
            compiled = _compile(lowered, name)
        cache.store(key, compiled, config, slice_.name)
    fits, known = compiled.memory is not None, cache.batches(config, slice_.name)
    plan = Plan(
        topology=slice_,
        mesh=dict(run.mesh.shape),
        hosts=len({device.process_index for device in devices}),
        batch_size=config.batch_size,
        backend=config.parallel.backend,
        compile_seconds=compiled.seconds,
        is_cached=cached is not None,
        fits=fits,
        needed=_needed(compiled.message),
        message=compiled.message,
        leaves=run.leaves.line(),
        calibration=CALIBRATED.for_generation(slice_.version),
        other_batch=_other_batch(config.batch_size, fits, known),
        model_flops=run.model_flops / len(devices) if run.model_flops and fits else None,
        work=work_of(run),
        recipe=run.recipe,
    )
    fabric = (
        Network(slice_, coordinates)
        if gbps is None
        else HostNetwork(slice_, coordinates, hosts(run.mesh.devices.flat), gbps)
    )
    return _measured(plan, compiled, fabric)


def _measured(plan: Plan, compiled: Compiled, fabric: Network) -> Plan:
    """Adds the numbers of the compiled program to a plan, if the program fits.

    The text format of HLO is not stable. If a number cannot be read, the plan has a note instead.
    """
    if compiled.memory is None:
        return plan
    memory, text, notes = compiled.memory, compiled.program, list[str]()
    cost = _read(hlo.program_cost, text, notes)
    plan = dataclasses.replace(plan, network=fabric, program=text)
    times = _read(lambda _: plan.timelines(plan.calibration.each), text, notes)
    return dataclasses.replace(
        plan,
        needed=memory.peak,
        memory=memory,
        flops=_read(hlo.program_flops, text, notes),
        cycles=cost and cost.cycles,
        times=times,
        collectives=None if times is None else _traffic(times[1], fabric),
        # Several readers can fail for the same reason; report it once.
        notes=tuple(dict.fromkeys(notes)),
    )


def release() -> None:
    """Returns the memory of compiled steps to the system; call it after each of many plans.

    The C library keeps memory that the TPU compiler frees: 24 GB after a dozen compiled steps of
    BERT-Large.
    """
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def loader(config: Spec, examples: int | None) -> Callable[..., data.Source]:
    """Returns a replacement for `data.load` that needs no files; for `examples` see `make_plan`."""
    return functools.partial(
        data.load_shapes, examples=examples, counted_by=recipe.in_epochs(config)
    )


def _compile(lowered: jax.stages.Lowered, name: str) -> Compiled:
    """Compiles a step; if it does not fit, the result has the compiler's out-of-memory message."""
    start = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # A step that does not fit is a valid plan, not an error.
        if "RESOURCE_EXHAUSTED" in str(error):
            return Compiled(round(time.monotonic() - start, 1), str(error), None, "")
        raise UserError(
            f"the training step for {name}",
            problem=f"fails in the TPU compiler ({reason(error)[:300]})",
            remedy="change the mesh, config.parallel.backend or the model's options, or install "
            "another libtpu",
        ) from error
    seconds = round(time.monotonic() - start, 1)
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    assert sizes is not None and text is not None  # the TPU compiler returns both
    memory = Memory(
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        program=sizes.generated_code_size_in_bytes,
        peak=sizes.peak_memory_in_bytes,
    )
    return Compiled(seconds, "", memory, text)


def _traffic(schedule: Timeline, fabric: Network) -> tuple[Traffic, ...]:
    """Returns the traffic of a schedule by type of collective; the type that sends most comes first."""
    rows = traffic.table(event.collective for event in schedule.events)
    sums = []
    for row in rows:
        events = [
            event
            for event in schedule.events
            if (event.collective.kind, event.collective.group_size, event.collective.dtype)
            == row[:3]
        ]
        first = events[0].collective
        route = fabric.route(first.groups, first.kind == "collective-permute")
        sums.append(
            Traffic(
                row=row,
                seconds=sum(event.seconds for event in events),
                exposed=sum(event.exposed for event in events),
                route=route,
                algorithm=events[0].algorithm,
            )
        )
    return tuple(sums)


def _other_batch(batch: int, fits: bool, known: dict[int, bool]) -> int | None:
    """Returns the next larger batch that is known to fit; if `batch` does not fit, the next smaller one.

    >>> known = {64: True, 128: True, 256: True, 512: False}
    >>> _other_batch(128, True, known), _other_batch(256, True, known)
    (256, None)
    >>> _other_batch(512, False, known)
    256
    """
    fitting = [size for size in known if known[size]]
    if fits:
        return min((size for size in fitting if size > batch), default=None)
    return max((size for size in fitting if size < batch), default=None)


def _needed(message: str) -> float | None:
    """Returns the bytes that a program needs, from the compiler's out-of-memory message.

    >>> _needed("the total memory required for HLO temporaries (24.00G) exceeds available HBM")
    25769803776.0
    >>> _needed("Used 16.50G of 15.48G hbm. Exceeded hbm capacity by 1.02G.")
    17716740096.0
    >>> _needed("HLO temporaries (1.50P) exceeds available HBM") == 1.5 * 2**50
    True
    """
    match = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGTPE]?)", message)
    return float(match[1]) * 2 ** (10 * " KMGTPE".index(match[2] or " ")) if match else None


def _read(reader: Callable[[str], T], text: str, notes: list[str]) -> T | None:
    """Applies `reader` to HLO text; if it fails, returns None and adds a note."""
    try:
        return reader(text)
    except ValueError as error:
        notes.append(str(error))
        return None
