"""Text about a run for the terminal: its resolved settings, and odd pictures that were read."""

import jax

from lamb_tpu import terminal
from lamb_tpu.cost import topology
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.parallel.parts import RESIDUAL
from lamb_tpu.run import exchanges, statistics
from lamb_tpu.run.build import Run


def describe(run: Run) -> str:
    """Returns a run's resolved settings, in lines of at most 80 columns.

    In a run with a folder, the table of parameters is left to its file if it is too wide or would
    push the settings off a screen of 24 rows.
    """
    config, state, places = run.config, run.abstract_state, run.shardings
    devices = run.mesh.devices.flat
    shape = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
    lines = [
        f"mesh: {shape} over {len(devices)} {devices[0].device_kind} device(s) "
        f"in {len({device.process_index for device in devices})} process(es), "
        f"collectives by {config.parallel.backend}",
        rules_lib.describe(
            state.params,
            places.params,
            config.parallel.rules,
            {
                "optimizer state": (state.opt_state, places.opt_state),
                "averages": (state.ema, places.ema),
                "carry": (state.parts.get("carry"), places.parts.get("carry")),
                "kept by the exchange": (state.parts.get(RESIDUAL), places.parts.get(RESIDUAL)),
            },
        ),
        f"data: {config.data.name}, {config.data.train_split} {len(run.train_set):,} and "
        f"{config.data.eval_split} {len(run.eval_set):,} examples",
        *dict.fromkeys((*run.train_set.notes, *run.eval_set.notes)),  # a folder may serve both
        run.recipe.describe(),
        f"model: {config.model.name}, optimizer: {config.optimizer.name}",
        run.leaves.line(),
        _describe_flops(run),
    ]
    if run.batch_norm:
        lines.append(run.batch_norm)
    if told := exchanges.describe(config, run.exchange):
        lines.append(told)
    if run.start is not None:
        lines.append(run.start.describe())
    rows = config.batch_size // config.accumulation_steps
    if run.recipe.path is not None:
        lines.append(f"accumulation: as many microbatches of {rows:,} as a batch has")
    elif config.accumulation_steps > 1:
        lines.append(f"accumulation: {config.accumulation_steps} microbatches of {rows:,}")
    if told := statistics.describe(config, run.mesh):
        lines.append(told)
    if run.eval_batch_size > config.eval.batch_size:
        lines.append(
            f"evaluation: config.eval.batch_size is {config.eval.batch_size:,}; batches of "
            f"{run.eval_batch_size:,} are used, which the devices divide"
        )
    settings = terminal.fit("\n".join(lines))
    if run.folder is not None:
        settings = f"workdir: {run.folder.path}\n{settings}"
    # A table with broken rows cannot be read; its last line is a sentence, which may be wrapped.
    *rows, totals = run.table.split("\n")
    whole = "\n".join([settings, *rows, terminal.fit(totals)])
    fits = whole.count("\n") < terminal.ROWS and max(map(len, rows)) <= terminal.COLUMNS
    if fits or run.folder is None:
        return whole
    name = run.folder.parameters.name
    return f"{settings}\n{terminal.fit(f'parameters: the table is in {name}; {totals}')}"


def describe_read(run: Run, training: bool = True) -> str:
    """Returns a line for each set of pictures with odd or damaged ones; '' where there are none.

    Args:
      run: the run of this process; each process counts the pictures that it has read itself.
      training: whether the training set was read too.
    """
    read = [run.train_set, run.eval_set] if training else [run.eval_set]
    lines = [source.tally.describe() for source in read if source.tally is not None]
    lines = [line for line in lines if line]
    if lines and jax.process_count() > 1:
        lines.append(
            f"these are the pictures that process {jax.process_index()} of "
            f"{jax.process_count()} has read; the others have read others"
        )
    return "\n".join(lines)


def counts_read(run: Run) -> dict[str, int]:
    """Returns the counts behind `describe_read`, such as `train_bad`."""
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
    # An update of a batch that changes has in proportion to its examples.
    of = "" if run.recipe.path is None else f" of {run.config.batch_size:,} examples"
    return f"arithmetic: {needed} model FLOPs an update{of}; a {kind} device {at_most}"
