"""Searches for the best values of config keys. A repeated command resumes the search.

  python -m lamb_tpu.sweep --config=configs/digits.py --workdir=DIR \\
      --search='optimizer.learning_rate=log(1e-4,1e-1)' --trials=16
  python -m lamb_tpu.sweep --config=configs/digits.py --workdir=DIR \\
      --search=optimizer.weight_decay=0,0.01,0.1 --search=batch_size=32,128
  python -m lamb_tpu.sweep --config=configs/digits.py --workdir=DIR \\
      --search='optimizer.b2=linear(0.9,0.999)' \\
      --search=optimizer.name=lamb,adamw --trials=8 --seeds=3 --dry-run

A key is searched in a range, log(LOW,HIGH) or linear(LOW,HIGH), or in a list of values. If all keys
have lists, the search is the grid of all combinations. Otherwise --trials points come from a scrambled
Halton sequence, which covers the ranges evenly: a larger --trials keeps the first points and does
not run them again. The metric is measured on config.data.eval_split; to spare the test set, search
with --config.data.train_split='train[:90%]' --config.data.eval_split='train[90%:]'.

On a cluster, job I of an array of N jobs runs this command with --index=I/N and trains only its
trials. The same command without --index then gathers their records and ranks all trials.

DIR, which may be gs://BUCKET/FOLDER, receives sweep.jsonl with a line per run, and a workdir per run
below DIR/sweep. At the end it receives sweep.md and sweep.png: the trials by their metric, and the
metric against each key. Any config key can be overridden for all trials:
--config.duration='500 steps'.
"""

from absl import flags

from lamb_tpu import cli, limits

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    cli.define_run_flags(workdir="Folder of the sweep; an existing sweep in it is resumed.")
    flags.DEFINE_multi_string(
        "search", None, "KEY=log(LOW,HIGH), KEY=linear(LOW,HIGH) or KEY=A,B,C"
    )
    flags.DEFINE_integer(
        "trials", None, "Number of trials; default: the full grid.", 1, limits.MAX_TRIALS
    )
    flags.DEFINE_integer("seed", 0, "Seed of the quasi-random points.", 0, 2**32 - 1)
    flags.DEFINE_integer("seeds", 1, "Runs per trial, with seeds from 0.", 1, limits.MAX_SEEDS)
    flags.DEFINE_string(
        "metric",
        None,
        "Metric of the evaluation to rank by; default: the metric of "
        "config.checkpoint.best or config.target, or the task's main metric.",
    )
    flags.DEFINE_enum(
        "better", None, ["higher", "lower"], "Default: lower for a loss or an error, else higher."
    )
    flags.DEFINE_integer(
        "processes", 1, "Number of concurrent runs, which share the cores.", 1, limits.MAX_PROCESSES
    )
    flags.DEFINE_string("time-limit", None, "Save and stop after this time, such as 90m or 2h.")
    flags.DEFINE_string(
        "index", None, "I/N: train only the trials of job I (from 0) of an array of N jobs."
    )
    flags.DEFINE_bool("dry-run", False, "Only check and list the trials.")
    cli.answer_help()

import pathlib

from ml_collections import config_flags

from lamb_tpu import style
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.reproduce import arrays, running, sweeps, trials
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.sweeps import Sweep
from lamb_tpu.reproduce.tables import check_runs
from lamb_tpu.spec import parse
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.terminal import columns, fit


def main() -> None:
    """Entry point of the command line."""
    options = flags.FLAGS
    index = arrays.parse(options.index) if options.index is not None else None
    request = running.TableRequest(
        scale=sweeps.NAME,
        cells=None,
        seeds=None,
        runs=Workdir(options.workdir).path,
        data=None,
        processes=options.processes,
        time_limit=cli.seconds("--time-limit", options["time-limit"].value),
        dry_run=bool(options["dry-run"].value),
        records=None,
        index=index,
    )
    sweep = _make(request.runs)
    check_runs("the sweep", sweep.cells, sweep.scale.seeds)
    results, others = running.records_of(sweep.table, request.runs, index, None)
    (plan,) = running.share_out(
        [
            running.TablePlan(
                table=sweep.table,
                scale=sweep.scale,
                cells=sweep.cells,
                seeds=sweep.scale.seeds,
                results=results,
                others=others,
            )
        ],
        index,
    )
    if request.dry_run:
        results.warn()
        print(columns(trials.rows(sweep, trials.ranked(sweep, results))))
        print(f"{len(plan.missing())} runs to train")
        return
    sweeps.check_records(sweep, results)
    plan.gather()
    running.train([plan], request, lambda *_: None, "--workdir")
    if index is None:
        _show(sweep, results)
    else:
        print(
            f"the trials of index {index.number} are complete; once all indices are, rank the trials "
            "with the same command without --index"
        )


def _make(folder: pathlib.Path) -> Sweep:
    options = flags.FLAGS
    if (folder / "config.json").exists():
        raise UserError(
            f"--workdir {folder}", problem="holds a run", remedy="give another folder for the sweep"
        )
    recipe = sweeps.short_recipe(config_flags.get_config_filename(options["config"]))
    config = parse(options.config)
    dimensions, points = sweeps.points(config, options.search, options.trials, options.seed)
    return sweeps.make(
        recipe,
        config,
        dimensions,
        points,
        folder,
        seeds=options.seeds,
        metric=options.metric,
        better=options.better,
    )


def _show(sweep: Sweep, results: Results) -> None:
    folder = sweep.table.path.parent
    ranking = trials.ranked(sweep, results)
    print()
    print(columns(trials.rows(sweep, ranking)))
    writing.replace(folder / f"{sweeps.NAME}.md", trials.page(sweep, ranking))
    path = folder / f"{sweeps.NAME}.png"
    writing.replace(path, style.png(trials.draw(sweep, ranking)))
    print(fit(f"\n{folder / f'{sweeps.NAME}.md'}, {path}"))
    if command := trials.best_command(sweep, ranking):
        print(f"The best trial:\n{command}")


if __name__ == "__main__":
    cli.run_main(main, required=("config", "search", "workdir"))
