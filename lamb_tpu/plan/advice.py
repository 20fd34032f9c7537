"""Comparison of batch sizes by learning rate, warm-up, time and price: `--batches=512,1024`.

The recipe sets the learning rate and warm-up of each batch. The gradient noise scale is a batch
size: far below it, doubling the batch halves the number of updates; above it, a larger batch hardly
saves updates (arXiv:1812.06162).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lamb_tpu import terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.plan.totals import span_text
from lamb_tpu.plan.trials import LEFT_OUT, Answer, Trial, Trials, check_any, milliseconds, table
from lamb_tpu.plan.variants import Variants
from lamb_tpu.store.metrics import read_records


def advise(
    variants: Variants,
    batches: Sequence[int],
    topology: str,
    trials: Trials,
    price: float | None = None,
    workdir: str | None = None,
) -> Answer:
    """Returns a table with the learning rate, warm-up, updates, time and price of each batch.

    Args:
      variants: the recipe.
      batches: the batch sizes, one row each.
      topology: name of the slice.
      trials: makes the plans, one for each batch.
      price: price of a device for an hour, in any currency.
      workdir: folder of a run that measured the noise scale; each batch is compared with this scale.

    Raises:
      UserError: `workdir` has no records of a run, or every batch is rejected.
    """
    noise = None if workdir is None else noise_scale(workdir)
    devices = topology_lib.topology(topology).num_devices
    head = ["batch", "rate", "warm-up", "updates", "ms a step", "total", "device-h"]
    head += ["price"] * (price is not None)
    head += ["noise"] * (noise is not None)
    rows, values = [], []
    for batch in batches:
        trial = _trial(variants, batch, topology, trials)
        value = (
            trial.as_json()
            | {"batch_size": batch, "devices": devices}
            | _numbers(trial, devices, price)
        )
        if noise is not None:
            value["is_beyond_noise_scale"] = batch > noise
        values.append(value)
        cells = [f"{batch:,}", *_cells(trial, value)]
        if noise is not None and not trial.rejected:
            cells += [""] * (len(head) - 1 - len(cells)) + ["BEYOND" if batch > noise else "within"]
        rows.append((cells, trial))
    check_any([trial for _, trial in rows])
    notes = [] if workdir is None else [_describe_noise(workdir, noise, batches)]
    endless = [
        f"{value['batch_size']:,}"
        for value in values
        if value["updates"] and value["warmup_updates"] >= value["updates"]
    ]
    if endless:
        notes.append(
            f"THE WARM-UP IS AT LEAST AS LONG AS THE RUN at batch {', '.join(endless)}: the learning "
            "rate never reaches the value in the table"
        )
    text = "\n".join(
        [
            f"{topology}: {devices:,} devices",
            table(head, rows, right=tuple(range(8))),
            terminal.fit("\n".join([*notes, f"left out: {LEFT_OUT}"])),
        ]
    )
    return Answer(
        text, {"topology": topology, "devices": devices, "noise_scale": noise, "batches": values}
    )


def noise_scale(workdir: str) -> float | None:
    """Returns the last noise scale in a run's records, in examples; None if there is none.

    Raises:
      UserError: the folder has no records, or the last noise scale in them is not a finite number.
    """
    path = buckets.parse(workdir, "--workdir") / "metrics.jsonl"
    scales = [
        record["noise_scale"] for record in read_records(path, "train") if "noise_scale" in record
    ]
    if not scales:
        return None
    last = scales[-1]
    # The noise scale is infinite if the gradient is nearly 0.
    if isinstance(last, bool) or not isinstance(last, int | float) or not -1e18 < last < 1e18:
        raise UserError(
            f"--workdir {workdir}: the last noise_scale in {path.name}",
            last,
            "is not a finite number of examples",
            "leave --workdir out, or give another run",
        )
    return float(last)


def _trial(variants: Variants, batch: int, topology: str, trials: Trials) -> Trial:
    try:
        return trials.make(variants.at_batch(batch), topology, f"batch {batch:,}")
    except UserError as error:  # the recipe rejects the batch
        return Trial(None, error=error)


def _numbers(trial: Trial, devices: int, price: float | None) -> dict[str, Any]:
    recipe = trial.plan and trial.plan.recipe
    total = trial.totals
    hours = total and total.seconds[1] * devices / 3600
    return {
        "learning_rate": recipe and recipe.peak_learning_rate,
        "warmup_updates": recipe and recipe.warmup_steps,
        "updates": recipe and recipe.total_steps,
        "seconds": total and list(total.seconds),
        "device_hours": hours,
        "price": hours and price and hours * price,
    }


def _cells(trial: Trial, value: Mapping[str, Any]) -> list[str]:
    if trial.plan is None:
        return ["rejected"]
    rate, warmup, updates, hours, price = (
        value[key]
        for key in ("learning_rate", "warmup_updates", "updates", "device_hours", "price")
    )
    cells = [
        _text(rate, ".4g"),
        _text(warmup, ",.0f" if warmup and warmup >= 1000 else ".4g"),
        _text(updates, ","),
    ]
    if trial.fits and trial.totals:
        expected = trial.totals.seconds[1]
        cells += [milliseconds(trial.step_seconds), span_text(expected, expected)]
        cells += [_text(hours, ",.0f" if hours and hours >= 100 else ".3g")]
        if price is not None:
            cells.append(_text(price, ",.2f" if price >= 1 else ".2g"))
    else:
        cells += ["?" if trial.fits else "does not fit"]
    return cells


def _text(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def _describe_noise(workdir: str, noise: float | None, batches: Sequence[int]) -> str:
    if noise is None:
        return f"the run in {workdir} measured no noise scale"
    beyond = [f"{batch:,}" for batch in batches if batch > noise]
    line = f"the run in {workdir} measured a noise scale of {noise:,.4g} examples"
    return f"{line}; BEYOND IT: {', '.join(beyond)}" if beyond else f"{line}; no batch is beyond it"
