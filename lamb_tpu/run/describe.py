"""Text about a run for the terminal: its resolved settings, and damaged images that were read."""

import jax

from lamb_tpu import terminal
from lamb_tpu.cost import topology
from lamb_tpu.errors import printable
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.parallel.components import RESIDUAL
from lamb_tpu.run import exchanges, statistics
from lamb_tpu.run.build import Run


def describe(run: Run) -> str:
    """Returns a run's resolved settings, in lines of at most 80 columns.

    If the run's folder has the table of parameters as a file, the table is left out here when it is
    too wide or would push the settings off a screen of 24 rows.
    """
    spec, state, shardings = run.spec, run.abstract_state, run.shardings
    devices = run.mesh.devices.flat
    size = spec.batch_size // spec.accumulation_steps
    accumulation, evaluation = "", ""
    if run.recipe.path is not None:
        accumulation = f"accumulation: each batch is split into microbatches of {size:,} examples"
    elif spec.accumulation_steps > 1:
        accumulation = f"accumulation: {spec.accumulation_steps} microbatches of {size:,}"
    if run.eval_batch_size > spec.eval.batch_size:
        evaluation = (
            f"evaluation: config.eval.batch_size is {spec.eval.batch_size:,}; batches of "
            f"{run.eval_batch_size:,} are used, which split evenly over the devices"
        )
    shape = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
    lines = [
        f"mesh: {shape} over {len(devices)} {devices[0].device_kind} device(s) "
        f"in {len({device.process_index for device in devices})} process(es), "
        f"collectives by {spec.parallel.backend}",
        rules_lib.describe(
            state.params,
            shardings.params,
            spec.parallel.rules,
            {
                "optimizer state": (state.opt_state, shardings.opt_state),
                "averages": (state.ema, shardings.ema),
                "carry": (state.parts.get("carry"), shardings.parts.get("carry")),
                "exchange residual": (state.parts.get(RESIDUAL), shardings.parts.get(RESIDUAL)),
            },
        ),
        f"data: {spec.data.name}, {spec.data.train_split} {len(run.train_set):,} and "
        f"{spec.data.eval_split} {len(run.eval_set):,} examples",
        # Both sets may have the same notes. File names in the notes may contain newlines.
        *map(printable, dict.fromkeys((*run.train_set.notes, *run.eval_set.notes))),
        run.recipe.describe(),
        f"model: {spec.model.name}, optimizer: {spec.optimizer.name}",
        run.leaves.line(),
        _describe_flops(run),
        run.batch_norm,
        exchanges.describe(spec, run.exchange),
        "" if run.start is None else run.start.describe(),
        accumulation,
        statistics.describe(spec, run.mesh),
        evaluation,
    ]
    settings = terminal.fit("\n".join(filter(None, lines)))
    if run.folder is not None:
        settings = f"workdir: {run.folder.path}\n{settings}"
    # Wrapped rows would make the table unreadable. Its last line is a sentence, so wrap that.
    *rows, totals = run.table.split("\n")
    text = "\n".join([settings, *rows, terminal.fit(totals)])
    fits = text.count("\n") < terminal.ROWS and max(map(len, rows)) <= terminal.COLUMNS
    if fits or run.folder is None:
        return text
    name = run.folder.parameters.name
    return f"{settings}\n{terminal.fit(f'parameters: the table is in {name}; {totals}')}"


def describe_read(run: Run, training: bool = True) -> str:
    """Returns a line for each image set with unusual or damaged images; '' if there are none.

    Each process counts only the images that it has read.
    """
    read = [run.train_set, run.eval_set] if training else [run.eval_set]
    lines = [source.tally.describe() for source in read if source.tally is not None]
    lines = [line for line in lines if line]
    if lines and jax.process_count() > 1:
        lines.append(
            f"these are the images that process {jax.process_index()} of "
            f"{jax.process_count()} has read; the other processes have read the rest"
        )
    return "\n".join(lines)


def counts_read(run: Run) -> dict[str, int]:
    """Returns the counts that `describe_read` formats, such as `train_bad`."""
    read = {"train": run.train_set.tally, "eval": run.eval_set.tally}
    return {
        f"{name}_{kind}": count
        for name, tally in read.items()
        if tally is not None
        for kind, count in tally.counts().items()
    }


def _describe_flops(run: Run) -> str:
    kind = run.mesh.devices.flat[0].device_kind
    needed = f"{run.model_flops:.4g}" if run.model_flops else "an unknown number of"
    peak = topology.peak_flops(kind)
    at_most = f"does at most {peak:.4g} a second" if peak else "has no known peak"
    # With a changing batch size, the FLOPs are proportional to the number of examples in an update.
    of = "" if run.recipe.path is None else f" of {run.spec.batch_size:,} examples"
    return f"arithmetic: {needed} model FLOPs an update{of}; a {kind} device {at_most}"
