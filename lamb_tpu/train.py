"""Trains a model from a recipe, or resumes the run in the workdir.

  python -m lamb_tpu.train --config=configs/digits.py --workdir=DIR

The workdir receives checkpoints, metrics.jsonl, TensorBoard files, the resolved config, the table
of parameter metadata and the versions of the libraries. Flags override any key of the config, and
any argument of its optimizer, model, task and data set: --config.duration='500 steps',
--config.optimizer.b2=0.98.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    cli.define_run_flags(
        workdir="Folder for checkpoints, metrics and the resolved config; may be gs://BUCKET/FOLDER. "
        "If it already holds a run of the same config, that run is resumed."
    )
    cli.define_process_flags()
    flags.DEFINE_integer(
        "profile",
        None,
        "Number of updates to profile with JAX, after the first update, into WORKDIR/profile. Open "
        "the profile with XProf or https://ui.perfetto.dev.",
        lower_bound=1,
    )
    cli.answer_help()

import os
import pathlib
import statistics
from collections.abc import Sequence

import jax

from lamb_tpu import custom, terminal
from lamb_tpu.cluster import cpu_devices, distributed
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.config import FREE_KEYS
from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.run import identity, phases, together
from lamb_tpu.spec import Config, Spec, parse
from lamb_tpu.store import programs
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.training import train_run
from lamb_tpu.watch.guards import Diverged
from lamb_tpu.watch.progress import format_values


@custom.calling("training")
@terminal.lasting()
def train(
    config: Config,
    workdir: str | os.PathLike[str],
    label: str = "train",
    quiet: bool = False,
    metric: str | None = None,
    profile: int = 0,
) -> dict[str, float]:
    """Runs or resumes the recipe `config`, with its phases if any, in the folder `workdir`.

    With `config.seeds`, trains several runs side by side in subfolders of `workdir`.

    The run ends after its duration or, with `config.target`, at the first evaluation that reaches
    the target. On SIGTERM and Ctrl-C, the run saves a checkpoint of the last completed update. Before
    the first update, the run saves nothing, because the seed reproduces the initial state.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      workdir: receives all files of the run.
      label: text before the progress bar.
      quiet: whether to show only the progress bar, for a sweep of many runs.
      metric: a metric that the evaluation of the last phase must have; None: no requirement.
      profile: number of updates to profile in the phase that runs first; 0: none.

    Returns:
      The metrics of the last evaluation; with `config.seeds`, their means over the runs.

    Raises:
      UserError: the config, the data or the workdir is wrong (raised before anything compiles); a
        file of the run can no longer be written; or the run diverged (`guards.Diverged`).
      Preempted: SIGTERM arrived, and everything is saved.
      Interrupted: Ctrl-C arrived, and everything is saved.
    """
    identity.check_start(config, workdir)
    spec = parse(config)
    if spec.seeds:
        return _train_seeds(spec, workdir, label, quiet, metric, profile)
    if not spec.phases:
        return together.alone(train_run(spec, workdir, label, quiet, metric, profile))
    folder, is_first = Workdir(workdir), jax.process_index() == 0
    with distributed.together():
        folder.check(spec)
    metrics: dict[str, float] = {}
    # The session of a phase locks only its subfolder, so lock the parent folder here.
    with folder.hold(is_first):
        due = phases.due(spec, workdir)
        if is_first:
            folder.write_config(spec)
        complete = sorted(spec.phases)[: -len(due)]
        if complete and is_first and not quiet:
            print(f"{', '.join(complete)}: complete, skipped", flush=True)
        for phase in due:
            if is_first and not quiet:
                print(f"{phase.name} (phases: {', '.join(sorted(spec.phases))})", flush=True)
            needed = metric if phase is due[-1] else None
            metrics = together.alone(
                train_run(
                    phase.config, phase.folder, f"{label} {phase.name}", quiet, needed, profile
                )
            )
            profile = 0
    return metrics


def _train_seeds(
    spec: Spec,
    workdir: str | os.PathLike[str],
    label: str,
    quiet: bool,
    metric: str | None,
    profile: int,
) -> dict[str, float]:
    folder, is_first = Workdir(workdir), jax.process_index() == 0
    with distributed.together():
        configs = together.split(spec)
        folder.check(spec, (*FREE_KEYS, "seeds"))
        if folder.has_checkpoint():
            problem = "has the checkpoints of a run with a single seed"
            raise UserError(f"--workdir {workdir}", ABSENT, problem, "give another folder")
    # Each run locks only its subfolder, so lock the parent folder here.
    with folder.hold(is_first):
        if is_first:
            folder.write_config(spec)
        results = train_together(
            configs,
            [folder.path / f"seed_{one.seed}" for one in configs],
            label,
            quiet,
            metric,
            profile,
        )
    failed = {
        one.seed: each
        for one, each in zip(configs, results, strict=True)
        if isinstance(each, Diverged)
    }
    if failed:
        (seed, error), *more = failed.items()
        others = f"; more failed seeds: {', '.join(str(each) for each, _ in more)}" if more else ""
        key, value, problem, remedy = error.args
        raise Diverged(f"the run of seed {seed}: {key}", value, problem, f"{remedy}{others}")
    metrics = [each for each in results if not isinstance(each, Diverged)]
    means = {name: statistics.fmean(each[name] for each in metrics) for name in metrics[0]}
    if is_first and not quiet:
        print(f"means over {len(metrics)} seeds: {format_values(means)}", flush=True)
    return means


@custom.calling("training")
@terminal.lasting()
def train_together(
    configs: Sequence[Config],
    workdirs: Sequence[str | os.PathLike[str]],
    label: str = "train",
    quiet: bool = False,
    metric: str | None = None,
    profile: int = 0,
) -> list[dict[str, float] | Diverged]:
    """Runs or resumes several recipes that differ only in their seeds, side by side.

    One program makes the updates of all runs. Each run writes the same files as if trained alone, and
    may be resumed alone. If all runs are resumed together, their results stay the same, bit for bit.
    `train` describes the arguments and errors; `profile` applies to the first of `configs`.

    Returns:
      For each run, the metrics of its last evaluation, or the error if the run diverged.
    """
    cache = programs.kept_in(pathlib.Path(workdirs[0]).parent, every=True)
    with cache, Preemption(begins=False) as preemption:
        group = together.Group(preemption, len(configs))
        loops = [
            train_run(config, workdir, label, quiet, metric, 0 if index else profile, group)
            for index, (config, workdir) in enumerate(zip(configs, workdirs, strict=True))
        ]
        return together.run(loops, Diverged)


def main() -> None:
    """Entry point of the command line."""
    # Make both calls before anything asks JAX for a device.
    cpu_devices.make_from_flags()
    distributed.initialize_from_flags()
    train(flags.FLAGS.config, flags.FLAGS.workdir, profile=flags.FLAGS.profile or 0)


if __name__ == "__main__":
    cli.run_main(main, required=("config", "workdir"))
