"""Measures the critical batch size, the largest that reaches about the same loss with the same examples.

  python -m lamb_tpu.critical_batch --workdir=RUN --at='10, 30, 60 percent'
  python -m lamb_tpu.critical_batch --workdir=RUN --at='5 epochs, 20 epochs' \\
      --factors=1,2,4,8,16 --span='1 epochs' --seeds=3 --scaling=sqrt

From the checkpoint nearest to each position of --at, short branches continue at several batch
sizes: the run's batch size times --factors. All branches have the same length: --span, rounded up
to a whole number of updates at every factor. With the same seed they read the same examples in the
same order; with the first seed, in the run's order. They start from the full training state:
weights, moments, BatchNorm statistics and weight averages. A factor also multiplies
config.accumulation_steps, so memory use and BatchNorm groups do not change.

The learning rate of a branch is the run's schedule at the examples seen, times a constant given by
--scaling; there is no new warm-up.

The loss is measured on the full --split, without dropout or augmentation. It is the mean of
measurements after 5, 6, 7 and 8 eighths of the branch, rounded up in the same way. A batch size is
within the tolerance if its loss exceeds the loss at the run's batch size by at most the fraction
--tolerance; both losses are means over --seeds. The critical batch size is the largest batch size
up to which all batch sizes of the study are within the tolerance. The batch size at which the loss
crosses the tolerance is interpolated between the critical and the next larger batch size. If the
smallest factor above 1 already exceeds the tolerance, the run's own batch size may also be above
the critical batch size, which branches cannot show.

A small tolerance needs several seeds: 1 percent of a loss can be less than the noise of one branch.
With several seeds the table has the standard error of each excess.

The run must have ended or been stopped, and must still have checkpoints. To keep checkpoints
permanently, train with --config.checkpoint.keep_every='10 percent'. The command writes two files
into RUN. critical_batch.jsonl has a line for each branch, so that a repeated command, or a command
with other positions, trains only the missing branches. critical_batch.svg shows the critical batch
size over training and, if the run has recorded it, the noise scale.
"""

from absl import flags

from lamb_tpu import cli, limits

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    cli.define_run_flags(
        workdir="Folder of the run, or of one of its phases. --config is needed only to change the "
        "data folder or the mesh, and must be the config of the run with all its overrides."
    )
    cli.define_process_flags()
    cli.define_trust_flag()
    flags.DEFINE_string(
        "at",
        None,
        "Positions in the run: comma-separated durations. A duration without a unit has the "
        "unit of the next one, as in '10, 30, 60 percent' or '500 steps, 2 epochs'.",
    )
    flags.DEFINE_string(
        "factors", "1,2,4,8", "Multiples of the run's batch size, ascending from 1."
    )
    flags.DEFINE_string("span", "2 percent", "Length of a branch, as a duration of the run.")
    flags.DEFINE_enum(
        "scaling",
        None,
        ["identity", "sqrt", "linear"],
        "How the learning rate scales with the batch size: "
        "not at all, by the square root, or linearly; default: the run's config.schedule.scaling.",
    )
    flags.DEFINE_float("tolerance", 0.01, "Largest excess of the loss, as a fraction.")
    flags.DEFINE_integer(
        "seeds", 1, "Number of orders of the examples; the first is the run's.", 1, limits.MAX_SEEDS
    )
    flags.DEFINE_string(
        "split",
        None,
        "Split whose loss is measured, such as 'test[:1000]' or 'train[:1000]'; "
        "default: the run's evaluation split.",
    )
    flags.DEFINE_string(
        "metric", None, "Loss to compare, among the evaluation's metrics; default: the first loss."
    )
    cli.answer_help()

import sys
from typing import Any

from lamb_tpu import style, terminal
from lamb_tpu.cluster import cpu_devices, distributed
from lamb_tpu.critical_batch import report
from lamb_tpu.critical_batch.choices import StudyRequest
from lamb_tpu.critical_batch.measuring import measure

FIGURE = "critical_batch.svg"


def main() -> None:
    """Entry point of the command line."""
    # Both calls must come before anything asks JAX for a device.
    cpu_devices.make_from_flags()
    distributed.initialize_from_flags()
    values = flags.FLAGS
    options: dict[str, Any] = {name: values[name].value for name in StudyRequest._fields}
    request = StudyRequest(**options)
    outcome = measure(values.config, values.workdir, request, values.trust_workdir)
    print(report.table(outcome))
    for text in report.warnings(outcome):
        print(terminal.fit(f"warning: {text}"), file=sys.stderr)
    folder = outcome.run.folder
    assert folder is not None  # the run has one
    folder.write_file(FIGURE, style.svg(report.draw(outcome)))
    print(folder.path / FIGURE)


if __name__ == "__main__":
    cli.run_main(main, required=("workdir", "at"))
