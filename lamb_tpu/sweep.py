"""Searches keys of a config for their best values; started again, it resumes.

  python -m lamb_tpu.sweep --config=configs/digits.py --workdir=DIR \\
      --search='optimizer.learning_rate=log(1e-4,1e-1)' --trials=16
  python -m lamb_tpu.sweep --config=configs/digits.py --workdir=DIR \\
      --search=optimizer.weight_decay=0,0.01,0.1 --search=batch_size=32,128
  python -m lamb_tpu.sweep --config=configs/digits.py --workdir=DIR \\
      --search='optimizer.b2=linear(0.9,0.999)' \\
      --search=optimizer.name=lamb,adamw --trials=8 --seeds=3 --dry-run

A key is searched in a range, log(LOW,HIGH) or linear(LOW,HIGH), or in a list of values. Lists alone
make a grid of all combinations. Otherwise --trials points are taken from a scrambled Halton
sequence, which covers the ranges evenly: with more trials later, the first ones stay and are not
run again. The metric is that of config.data.eval_split; to spare the test set, search with
--config.data.train_split='train[:90%]' --config.data.eval_split='train[90%:]'.

DIR receives sweep.jsonl, a line for each run, a workdir for each run below DIR/sweep, and at the
end sweep.md and sweep.png: the trials by their metric, and the metric against each key. Any key of
the config can be overridden for all trials: --config.duration='500 steps'.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_run_flags(workdir="Folder of the sweep. One that holds this sweep is resumed.")
    flags.DEFINE_multi_string(
        "search", None, "KEY=log(LOW,HIGH), KEY=linear(LOW,HIGH) or KEY=A,B,C"
    )
    flags.DEFINE_integer("trials", None, "Number of trials; default the grid.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the quasi-random points.", lower_bound=0)
    flags.DEFINE_integer("seeds", 1, "Runs of each trial, with seeds from 0.", lower_bound=1)
    flags.DEFINE_string(
        "metric",
        None,
        "Metric of the evaluation to rank by; default that of "
        "config.checkpoint.best or config.target, or the task's main one.",
    )
    flags.DEFINE_enum(
        "better", None, ["higher", "lower"], "Default: lower for a loss or an error, else higher."
    )
    flags.DEFINE_integer("processes", 1, "Runs side by side, which share the cores.", lower_bound=1)
    flags.DEFINE_string("time-limit", None, "Save and end after this time, such as 90m or 2h.")
    flags.DEFINE_bool("dry-run", False, "Only check and list the trials.")
    cli.answer_help()

import pathlib

from ml_collections import config_flags

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.reproduce import running, sweeps, trials
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.sweeps import Sweep
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.terminal import columns, fit


def main() -> None:
    """Entry point of the command line."""
    options = flags.FLAGS
    folder = buckets.local(options.workdir, "--workdir")
    request = running.Request(
        sweeps.NAME,
        None,
        None,
        Workdir(folder).path,
        None,
        options.processes,
        cli.seconds("--time-limit", options["time-limit"].value),
        bool(options["dry-run"].value),
        None,
    )
    sweep = _make(request.runs)
    results = Results(sweep.table)
    plan = running.Plan(sweep.table, sweep.scale, sweep.cells, sweep.scale.seeds, results)
    if request.dry_run:
        print(columns(trials.rows(sweep, trials.ranked(sweep, results))))
        print(f"{len(plan.due())} runs to train")
        return
    sweeps.check_records(sweep)
    running.train([plan], request, lambda *_: None, "--workdir")
    _show(sweep, results)


def _make(folder: pathlib.Path) -> Sweep:
    options = flags.FLAGS
    if (folder / "config.json").exists():
        raise UserError(f"--workdir {folder} holds a run; give another folder for the sweep")
    recipe = sweeps.short_recipe(config_flags.get_config_filename(options["config"]))
    dimensions, points = sweeps.points(options.config, options.search, options.trials, options.seed)
    return sweeps.make(
        recipe,
        options.config,
        dimensions,
        points,
        folder,
        options.seeds,
        options.metric,
        options.better,
    )


def _show(sweep: Sweep, results: Results) -> None:
    """Prints the trials, and writes them as a page with a picture."""
    folder = sweep.table.path.parent
    found = trials.ranked(sweep, results)
    print()
    print(columns(trials.rows(sweep, found)))
    writing.replace(folder / f"{sweeps.NAME}.md", trials.page(sweep, found))
    path = folder / f"{sweeps.NAME}.png"
    with writing.checked(path):
        trials.picture(sweep, found).savefig(path)
    print(fit(f"\n{folder / f'{sweeps.NAME}.md'}, {path}"))
    if command := trials.best_command(sweep, found):
        print(f"The best trial:\n{command}")


if __name__ == "__main__":
    cli.run_main(main, required=("config", "search", "workdir"))
