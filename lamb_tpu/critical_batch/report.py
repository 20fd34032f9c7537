"""The critical batch size over training, as a table and a figure."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lamb_tpu import style, terminal
from lamb_tpu.batching.critical import Excess
from lamb_tpu.critical_batch.measuring import Outcome


def table(outcome: Outcome) -> str:
    """Returns two tables: the critical batch size at each position, and the excess of each batch size."""
    run, study, rows = outcome.run, outcome.study, outcome.rows
    batch = run.spec.batch_size
    seeds = f", {len(study.seeds)} seeds" if len(study.seeds) > 1 else ""
    description = terminal.fit(
        f"{study.metric} on {study.split} after branches of {study.at[-1] * batch:,} examples"
        f"{seeds}, relative to that at batch {batch:,}; learning rate: {study.scaling}"
    )
    head = ["update", "of run", "critical batch", "crossing", "noise scale"]
    cells = [
        [
            f"{row.step:,}",
            f"{100 * row.step / run.recipe.total_steps:.3g} %",
            f"{row.critical.batch:,}{'' if row.critical.beyond else ' or more'}",
            f"{row.critical.crossing:,.0f}" if row.critical.beyond else "",
            "" if row.noise_scale is None else f"{row.noise_scale:,.0f}",
        ]
        for row in rows
    ]
    if not outcome.noise:
        head, cells = head[:-1], [cells[:-1] for cells in cells]
    excesses = [
        ["update", *(f"at {factor * batch:,}" for factor in study.factors[1:])],
        *([f"{row.step:,}", *map(_percent, row.excesses[1:])] for row in rows),
    ]
    return "\n\n".join(
        [
            terminal.columns([head, *cells], right=range(len(head))),
            f"{description}\n{terminal.columns(excesses, right=range(len(excesses[0])))}",
        ]
    )


def _percent(excess: Excess) -> str:
    if not math.isfinite(excess.mean):
        return "diverged"
    error = "" if math.isnan(excess.error) else f" ± {100 * excess.error:.1f}"
    return f"{100 * excess.mean:+.1f}{error} %"


def warnings(outcome: Outcome) -> list[str]:
    """Returns a sentence for each position at which the noise is larger than the tolerance."""
    return [
        f"at update {row.step:,} excesses have standard errors of up to {100 * most:.2g} %, more "
        "than --tolerance; more --seeds or a longer --span would lower them"
        for row in outcome.rows
        # Errors are NaN for one seed and for diverged branches; `NaN > 0` is False.
        if (most := max((each.error for each in row.excesses if each.error > 0), default=0.0))
        > outcome.tolerance
    ]


def draw(outcome: Outcome) -> Figure:
    """Plots the critical batch size over training, and the excess of each batch size by position."""
    split = style.chunks(range(len(outcome.rows)))
    above, *below = [
        ["batch"] * 4,
        *([f"update {outcome.rows[at].step:,}" for at in panel] for panel in split),
    ]
    figure, (over_training, *panels) = style.stacked([3.6] * (1 + len(split)), [above, *below])
    _over_training(over_training.subplots(), outcome)
    style.legend_below(over_training)
    shared: Axes | None = None
    for panel, rows in zip(panels, split, strict=True):
        axes = panel.subplots()
        shared = shared or axes
        if axes is not shared:
            axes.sharey(shared)
        _by_batch(axes, outcome, rows)
        style.legend_below(panel)
    return figure


def _over_training(axes: Axes, outcome: Outcome) -> None:
    run, rows = outcome.run, outcome.rows
    points = [(run.recipe.epoch(row.step), row.critical.crossing) for row in rows]
    color = style.COLORS[0]
    axes.plot(*zip(*points), marker="o", color=color, label="critical batch")
    least = [point for point, row in zip(points, rows) if not row.critical.beyond]
    if least:
        axes.plot(
            *zip(*least),
            marker="^",
            markersize=10,
            linestyle="none",
            color=color,
            label="or more: every batch was within the tolerance",
        )
    # An axis cannot show infinite or negative noise scales.
    noise = [(run.recipe.epoch(step), x) for step, x in outcome.noise if 0 < x < math.inf]
    if noise:
        axes.plot(
            *zip(*noise), color=style.COLORS[2], linestyle="-.", linewidth=1.2, label="noise scale"
        )
    axes.axhline(
        run.spec.batch_size,
        color=style.NEUTRAL,
        linestyle="--",
        linewidth=1,
        label="batch of the run",
    )
    axes.set_yscale("log", base=2)
    title = f"{run.spec.model.name} on {run.spec.data.name}"
    style.dress(axes, title, "epochs", "batch (examples)")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlim(left=0)


def _by_batch(axes: Axes, outcome: Outcome, rows: Sequence[int]) -> None:
    study, batch = outcome.study, outcome.run.spec.batch_size
    batches = [factor * batch for factor in study.factors]
    for number, row in enumerate(outcome.rows[at] for at in rows):
        # A diverged branch has no point; a single seed has no error.
        values = [100 * x.mean if math.isfinite(x.mean) else math.nan for x in row.excesses]
        errors = [0.0 if math.isnan(x.error) else 100 * x.error for x in row.excesses]
        axes.errorbar(
            batches,
            values,
            errors if any(errors) else None,
            capsize=2,
            label=f"update {row.step:,}",
            **style.numbered(number),
        )
    axes.axhline(
        100 * outcome.tolerance, color=style.NEUTRAL, linestyle="--", linewidth=1, label="tolerance"
    )
    title = f"branches of {study.at[-1] * batch:,} examples"
    style.dress(axes, title, "batch (examples)", f"excess of {study.metric} (%)", "lower")
    style.batch_axis(axes, batches)
