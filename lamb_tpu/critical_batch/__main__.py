"""Measures the critical batch over a run: the largest that loses nothing at equal examples.

  python -m lamb_tpu.critical_batch --workdir=RUN --at='10, 30, 60 percent'
  python -m lamb_tpu.critical_batch --workdir=RUN --at='5 epochs, 20 epochs' \\
      --factors=1,2,4,8,16 --span='1 epochs' --seeds=3 --scaling=sqrt

From the checkpoint nearest to each place of --at, short branches go on at several batches: the
run's times --factors. All branches from a place read the same examples in the same order, those
that the run read there, and are equally long: --span, rounded up so that every factor has whole
updates. They start from the whole state: weights, moments, BatchNorm's and the weights' averages. A
factor also multiplies config.accumulation_steps, so memory and BatchNorm's groups stay as they are.

The learning rate of a branch is the run's schedule, at the examples seen, times one factor by
--scaling; there is no new warm-up.

The loss is that of the whole --split, without dropout or augmentation, the mean of measurements
after 5, 6, 7 and 8 eighths of the branch, rounded up to updates that all factors have. A batch is
within the tolerance if its loss is at most --tolerance, a part, above that of the run's batch; both
are means over --seeds. The critical batch is the largest up to which all are within. Between it and
the next, the crossing of the tolerance is interpolated. If the smallest factor above 1 is beyond,
the run's own batch may be above the critical one too, which branches cannot tell.

A small tolerance needs seeds: 1 percent of a loss can be less than the noise of one branch. With
several seeds the table has the standard error of each excess.

The run must have ended, or been stopped, and its checkpoints be there: a run keeps some for good
with --config.checkpoint.keep_every='10 percent'. RUN receives critical_batch.jsonl, a line for each
branch, so that a command that was broken off, or that has other places, trains only what is
missing; and critical_batch.svg, the critical batch over training, beside the noise scale if the run
has recorded it.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_run_flags(
        workdir="Folder of the run, or of one phase of several. --config is needed only to change "
        "where the data lies or the mesh, and must be the run's own with all its overrides."
    )
    cli.define_process_flags()
    cli.define_trust_flag()
    flags.DEFINE_string(
        "at",
        None,
        "Places in the run: durations with commas between them, of which one without "
        "a unit has that of the next, as in '10, 30, 60 percent' or '500 steps, 2 epochs'.",
    )
    flags.DEFINE_string("factors", "1,2,4,8", "Batches in batches of the run, ascending from 1.")
    flags.DEFINE_string("span", "2 percent", "Length of a branch, a duration of the run.")
    flags.DEFINE_enum(
        "scaling",
        None,
        ["identity", "sqrt", "linear"],
        "How the learning rate follows the batch: "
        "not, by the square root, or linearly; default the run's own config.schedule.scaling.",
    )
    flags.DEFINE_float("tolerance", 0.01, "Largest excess of the loss, as a part of it.")
    flags.DEFINE_integer("seeds", 1, "Orders of the examples, of which the first is the run's.")
    flags.DEFINE_string(
        "split",
        None,
        "Split whose loss is measured, such as 'test[:1000]' or 'train[:1000]'; "
        "default the run's evaluation split.",
    )
    flags.DEFINE_string(
        "metric", None, "Loss of the evaluation to compare; default its first that is a loss."
    )
    cli.answer_help()

import sys

from lamb_tpu import style, terminal
from lamb_tpu.cluster import cpu_devices, distributed
from lamb_tpu.critical_batch import report
from lamb_tpu.critical_batch.choices import Request
from lamb_tpu.critical_batch.measuring import measure

PICTURE = "critical_batch.svg"


def main() -> None:
    """Entry point of the command line."""
    # Both calls must come before anything asks JAX for a device.
    cpu_devices.make_from_flags()
    distributed.initialize_from_flags()
    values = flags.FLAGS
    request = Request(
        values.at,
        values.factors,
        values.span,
        values.scaling,
        values.tolerance,
        values.seeds,
        values.split,
        values.metric,
    )
    outcome = measure(values.config, values.workdir, request, values.trust_workdir)
    print(report.table(outcome))
    for text in report.warnings(outcome):
        print(terminal.fit(f"warning: {text}"), file=sys.stderr)
    folder = outcome.run.folder
    assert folder is not None  # the run has one
    folder.write_file(PICTURE, style.svg(report.picture(outcome)))
    print(folder.path / PICTURE)


if __name__ == "__main__":
    cli.run_main(main, required=("workdir", "at"))
