"""Evaluates a checkpoint of a workdir, or published weights, counting every example once.

  python -m lamb_tpu.evaluate --workdir=DIR
  python -m lamb_tpu.evaluate --workdir=DIR --split=test --step=best
  python -m lamb_tpu.evaluate --workdir=DIR --config=configs/digits.py \\
      --config.data.dir=ELSEWHERE
  python -m lamb_tpu.evaluate --config=configs/imagenet_resnet.py \\
      --config.init_from=FOLDER

Prints one JSON object with the metrics of the run's evaluation split, or of --split. Files that a
task makes, such as predictions.json, go into DIR; those of another split than the run's are named
SPLIT_predictions.json. --config must be the run's own config with all its overrides. It is needed
only to change keys that may differ, such as where the data lies. Without --config, DIR/config.json
may name only custom code that your own modules define; --trust_workdir follows other names too.

Without --workdir, the weights of config.init_from are evaluated: of another run, or of Hugging
Face, timm or torchvision, see lamb_tpu/run/initial.py. Nothing is trained or written, and only the
evaluation split of the data has to be there.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_run_flags(workdir="Folder of the run; without it, config.init_from is evaluated.")
    cli.define_process_flags()
    cli.define_trust_flag()
    flags.DEFINE_string(
        "step", None, "Completed updates of the checkpoint, or 'best'; default the newest."
    )
    flags.DEFINE_string("split", None, "Split to evaluate; default the run's evaluation split.")
    cli.answer_help()

import json
import os
import re
import sys

import jax
from ml_collections import ConfigDict

from lamb_tpu import own, terminal, trust
from lamb_tpu.cluster import cpu_devices, distributed
from lamb_tpu.config import base_config, check_keys, unflatten
from lamb_tpu.errors import UserError
from lamb_tpu.run import identity
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe_read
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.run.preflight import check_data
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import as_json
from lamb_tpu.store.position import Position
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.watch.best import Best
from lamb_tpu.watch.evaluations import check_finite


@own.calling("the evaluation")
def evaluate_checkpoint(
    config: ConfigDict | None,
    workdir: str | os.PathLike[str],
    step: int | str | None = None,
    split: str | None = None,
    trust_workdir: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint and writes the task's files, such as predictions.json.

    The run's folder may be read-only: a line on stderr then says that the files are not written.

    Args:
      config: the config that the run was started with; None reads it from the workdir.
      workdir: folder of the run.
      step: completed updates of the checkpoint; 'best' for the one that `config.checkpoint.best`
        keeps, None for the newest.
      split: split to evaluate; None: config.data.eval_split.
      trust_workdir: whether a config that is read from the workdir may name any custom code, see
        `lamb_tpu.trust`.

    Returns:
      The metrics, and `step`, the update of the checkpoint.

    Raises:
      UserError: the config has a mistake, or there is no such checkpoint.
    """
    identity.check_start(
        config, workdir, {"--step": step, "--split": split, "--trust_workdir": trust_workdir}
    )
    folder = Workdir(workdir)
    with distributed.together():
        of_run = folder.read_config()  # refuses a folder without a run
    if config is None and not trust_workdir:
        trust.check(of_run, folder.config, "--trust_workdir")
    if config is None:
        config = unflatten(of_run)
        identity.check_start(config, workdir)
    config = config.copy_and_resolve_references()

    def prepared(split: str) -> Run:
        config.data.eval_split = split
        return prepare(config, workdir, training=False)

    own_split, split = of_run.get("data.eval_split"), split or config.data.eval_split
    # A split such as train[:10%] has characters that do not belong in a file's name.
    prefix = "" if split == own_split else re.sub(r"\W+", "_", split).strip("_") + "_"
    run = prepared(split)
    with Checkpoints(
        folder.checkpoints,
        config.checkpoint.keep,
        report=lambda text: print(terminal.fit(text), file=sys.stderr),
        writes=False,
    ) as checkpoints:
        restored = None
        # The newest checkpoint remembers which one is the best, and by which metric.
        if step in (None, "best"):
            restored = checkpoints.restore_latest(run.saved_state)
        if step == "best" and restored is not None:
            state, position = restored[0], Position.from_json(restored[1])
            kept = position.observers["best"]
            best = Best(kept["metric"], kept["mode"])
            best.restore(kept)
            if position.eval_due:  # a preempted run's last evaluation was broken off
                # Only the run's own split decides which checkpoint is the best.
                decides = prepared(own_split) if prefix and own_split is not None else run
                best.evaluated(int(state.step), make_evaluator(decides)(state))
            step = best.step
            if step is None:
                raise UserError(
                    f"--workdir {folder.path} has no best checkpoint: the run's "
                    "config.checkpoint.best named no metric, or it has had no evaluation yet; give "
                    "--step=UPDATE of "
                    f"{', '.join(map(str, checkpoints.steps()))}"
                )
        if step not in (None, "best"):
            restored = checkpoints.restore(int(step), run.saved_state)
    if restored is None:
        raise UserError(f"--workdir {folder.path} has no checkpoint yet")
    state, _ = restored

    # A folder that may only be read is no reason to withhold the metrics.
    def keep_file(name: str, text: str) -> None:
        try:
            folder.write_file(name, text)
        except UserError as error:
            _tell(f"{name} is not written: {str(error).partition(';')[0]}")

    check_data(run, training=False)
    evaluator = make_evaluator(run, keep_file=keep_file, files_prefix=prefix)
    metrics = evaluator(state)
    _tell(describe_read(run, training=False))
    return {"step": int(state.step), **metrics}


@own.calling("the evaluation")
def evaluate_weights(config: ConfigDict | None, split: str | None = None) -> dict[str, float]:
    """Evaluates the weights of config.init_from, without the folder of a run.

    Args:
      config: a config; only its data, task, model, mesh and partition rules matter.
      split: split to evaluate; None: config.data.eval_split.

    Raises:
      UserError: the config has a mistake, or the weights do not fit the model or lack some of its
        parameters.
    """
    if config is None or not config.init_from:
        raise UserError(
            "--workdir is missing; for weights that no run here has trained give --config and "
            "--config.init_from instead"
        )
    identity.check_start(config, None, {"--split": split})
    check_keys(config)
    given = config.copy_and_resolve_references()
    # Parts that only training needs are left out: moments, averages, the training split.
    config = base_config()
    with config.unlocked(), config.ignore_type():
        for key in ("data", "eval", "init_from", "mesh", "model", "phases", "task"):
            config[key] = given[key]
        config.parallel.rules = given.parallel.rules
        config.init.new_parameters = given.init.new_parameters
        # `prepare` loads a training set too; the evaluation's stands in for it.
        config.data.eval_split = config.data.train_split = split or config.data.eval_split
        # Plain SGD keeps no moments, for which there may be no memory.
        config.optimizer = ConfigDict({"name": "sgd", "learning_rate": 0.0})
        config.batch_size = 1
    run = prepare(config, None, training=False)
    start = run.start
    assert start is not None and start.match is not None  # config.init_from is given
    new = start.match.new
    if new:
        raise UserError(
            f"config.init_from {config.init_from} does not fit all of the model: {len(new)} of its "
            f"arrays would be random, such as {new[0].partition('/')[2]}; train from it first"
        )
    _tell("; ".join([start.describe_weights(), *start.notes]))
    check_data(run, training=False)
    metrics = make_evaluator(run)(run.first_state())
    _tell(describe_read(run, training=False))
    return metrics


def _tell(text: str) -> None:
    # Standard output holds the JSON object alone.
    if text and jax.process_index() == 0:
        print(terminal.fit(text), file=sys.stderr)


def main() -> None:
    """Entry point of the command line."""
    # Both calls must come before anything asks JAX for a device.
    cpu_devices.make_from_flags()
    distributed.initialize_from_flags()
    step = flags.FLAGS.step
    if step is not None and step != "best":
        if not step.isdecimal():
            raise UserError(f"--step is {step!r}; it must be a number of updates or 'best'")
        step = int(step)
    values = flags.FLAGS
    if values.workdir:
        metrics = evaluate_checkpoint(
            values.config, values.workdir, step, values.split, values.trust_workdir
        )
    elif step is not None:
        raise UserError(f"--step={step} is of a run's checkpoints; give its --workdir")
    else:
        metrics = evaluate_weights(values.config, values.split)
    if jax.process_index() == 0:
        print(json.dumps(as_json(metrics)), flush=True)
    check_finite("the evaluation", metrics, _allows(values), _tell)


def _allows(values: flags.FlagValues) -> bool:
    """Returns config.guards.allow_nonfinite_eval, of --config or else of the run."""
    if values.config is not None:
        return bool(values.config.guards.allow_nonfinite_eval)
    return bool(Workdir(values.workdir).read_config().get("guards.allow_nonfinite_eval"))


if __name__ == "__main__":
    cli.run_main(main)
