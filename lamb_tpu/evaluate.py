"""Evaluates a checkpoint of a workdir, or published weights; counts each example once.

  python -m lamb_tpu.evaluate --workdir=DIR
  python -m lamb_tpu.evaluate --workdir=DIR --split=test --step=best
  python -m lamb_tpu.evaluate --workdir=DIR --config=configs/digits.py \\
      --config.data.dir=ELSEWHERE
  python -m lamb_tpu.evaluate --config=configs/imagenet_resnet.py \\
      --config.init_from=FOLDER

Prints one JSON object with the metrics of the run's evaluation split, or of --split. Files that a
task writes, such as predictions.json, go into DIR; if --split differs from the run's split, their
names begin with SPLIT_. --config must be the run's config with all its overrides; it is needed only
to change keys that may differ, such as the folder of the data. Without --config, DIR/config.json may
name only custom code that your own modules define; --trust-workdir allows other names too.

Without --workdir, evaluates the weights of config.init_from: a run, or a file or folder in the
format of Hugging Face, timm or torchvision, see lamb_tpu/run/initial.py. Nothing is trained or
written, and only the evaluation split of the data is needed.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    cli.define_run_flags(workdir="Folder of the run; without it, config.init_from is evaluated.")
    cli.define_process_flags()
    cli.define_trust_flag()
    flags.DEFINE_string(
        "step", None, "Checkpoint: its completed updates, or 'best'; default: the newest."
    )
    flags.DEFINE_string("split", None, "Split to evaluate; default: the run's evaluation split.")
    cli.answer_help()

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lamb_tpu import custom, terminal, trust
from lamb_tpu.cluster import cpu_devices, distributed
from lamb_tpu.errors import ABSENT, UserError, listed
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import identity
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe_read
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.run.preflight import check_data
from lamb_tpu.spec import Config, Spec, changed, of_flat, parse
from lamb_tpu.spec_keys import Component
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import as_json
from lamb_tpu.store.position import Position
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.watch.best import Best
from lamb_tpu.watch.evaluations import check_finite


@custom.calling("the evaluation")
def evaluate_checkpoint(
    config: Config | None,
    workdir: str | os.PathLike[str],
    step: int | str | None = None,
    split: str | None = None,
    trust_workdir: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint and writes the task's files, such as predictions.json.

    If the run's folder is read-only, a line on stderr says that the files are not written.

    Args:
      config: the config of the run; None: the config in the workdir.
      workdir: folder of the run.
      step: completed updates of the checkpoint; 'best': see config.checkpoint.best; None: the newest.
      split: split to evaluate; None: config.data.eval_split.
      trust_workdir: whether a config from the workdir may name any custom code; see `trust`.

    Returns:
      The metrics, and `step`: the number of completed updates of the checkpoint.

    Raises:
      UserError: the config is wrong, differs from the run's or names code that is not trusted, or
        the checkpoint does not exist or is damaged.
    """
    identity.check_start(
        config, workdir, {"--step": step, "--split": split, "--trust-workdir": trust_workdir}
    )
    folder = Workdir(workdir)
    with distributed.together():
        of_run = folder.read_config()  # rejects a folder without a run
    if config is None and not trust_workdir:
        trust.check(of_run, folder.config, "--trust-workdir")
    if config is None:
        config = of_flat(of_run)
        identity.check_start(config, workdir)
    spec = parse(config)

    def prepared(split: str) -> Run:
        return prepare(changed(spec, {"data.eval_split": split}), workdir, training=False)

    run_split, split = of_run.get("data.eval_split"), split or spec.data.eval_split
    # A split such as train[:10%] has characters that do not belong in a file name.
    prefix = "" if split == run_split else re.sub(r"\W+", "_", split).strip("_") + "_"
    run = prepared(split)
    with Checkpoints(
        folder.checkpoints,
        spec.checkpoint.keep,
        report=lambda text: print(terminal.fit(text), file=sys.stderr),
        writes=False,
    ) as checkpoints:
        restored = None
        # The newest checkpoint records which checkpoint is the best, and by which metric.
        if step in (None, "best"):
            restored = checkpoints.restore_latest(run.saved_state)
        if step == "best" and restored is not None:
            # Only the run's evaluation split decides which checkpoint is the best.
            decides = run_split if prefix and run_split is not None else None
            step = _best(*restored, lambda: run if decides is None else prepared(decides))
            if step is None:
                raise UserError(
                    f"--workdir {folder.path}",
                    problem="has no best checkpoint, because config.checkpoint.best is '' or the run "
                    "has had no evaluation yet",
                    remedy=f"use --step={listed(checkpoints.steps())}",
                )
        if step not in (None, "best"):
            restored = checkpoints.restore(int(step), run.saved_state)
    if restored is None:
        problem, remedy = "has no checkpoint yet", "train the run, or give another folder"
        raise UserError(f"--workdir {folder.path}", ABSENT, problem, remedy)
    state, _ = restored

    check_data(run, training=False)
    evaluator = make_evaluator(run, keep_file=_keeping(folder), files_prefix=prefix)
    metrics = evaluator(state)
    _print(describe_read(run, training=False))
    return {"step": int(state.step), **metrics}


def _keeping(folder: Workdir) -> Callable[[str, str], None]:
    """Returns a function that writes a file into a folder or, if it cannot, says so on stderr."""

    def keep(name: str, text: str) -> None:
        try:
            folder.write_file(name, text)
        except UserError as error:
            _print(f"{name} is not written: {str(error).partition(';')[0]}")

    return keep


def _best(state: TrainState, saved: Mapping[str, Any], decides: Callable[[], Run]) -> int | None:
    """Returns the best checkpoint's number of updates, which the newest checkpoint records in `saved`.

    If the last evaluation was interrupted, it is first repeated: on `state`, with the run from `decides`.
    """
    position = Position.from_json(saved)
    record = position.observers["best"]
    best = Best(record["metric"], record["mode"])
    best.restore(record)
    if position.eval_due:  # the run was preempted during an evaluation
        best.evaluated(int(state.step), make_evaluator(decides())(state))
    return best.step


@custom.calling("the evaluation")
def evaluate_weights(config: Config | None, split: str | None = None) -> dict[str, float]:
    """Evaluates the weights of config.init_from without a workdir; see `evaluate_checkpoint`.

    Uses only the data, task, model, mesh and partition rules of the config. Raises a `UserError` if
    the config is wrong, or if the weights do not fit the model or lack some of its parameters.
    """
    spec = None
    if config is not None:
        identity.check_start(config, None, {"--split": split})
        spec = parse(config)
    if spec is None or not spec.init_from:
        remedy = "give it, or give --config and --config.init_from to evaluate other weights"
        raise UserError("--workdir", ABSENT, "is missing", remedy)
    run = prepare(_for_evaluation(spec, split or spec.data.eval_split), None, training=False)
    start = run.start
    assert start is not None and start.match is not None  # config.init_from is given
    new = start.match.new
    if new:
        problem = (
            f"lacks {len(new)} of the model's arrays, such as {new[0].partition('/')[2]}, which would "
            "be random"
        )
        raise UserError("config.init_from", spec.init_from, problem, "train from it first")
    _print("; ".join([start.describe_weights(), *start.notes]))
    check_data(run, training=False)
    metrics = make_evaluator(run)(run.first_state())
    _print(describe_read(run, training=False))
    return metrics


def _for_evaluation(spec: Spec, split: str) -> Spec:
    """Returns the config without the parts that only training needs: moments, averages, training data."""
    return changed(
        Spec(),
        {
            **{
                key: getattr(spec, key)
                for key in ("data", "eval", "init_from", "mesh", "model", "phases", "task")
            },
            "parallel.rules": spec.parallel.rules,
            "init.new_parameters": spec.init.new_parameters,
            # `prepare` loads a training set too; use the evaluation split for it.
            "data.train_split": split,
            "data.eval_split": split,
            # Plain SGD has no moments, which might not fit into memory.
            "optimizer": Component("sgd", {"learning_rate": 0.0}),
            "batch_size": 1,
        },
    )


def _print(text: str) -> None:
    # Standard output holds only the JSON object.
    if text and jax.process_index() == 0:
        print(terminal.fit(text), file=sys.stderr)


def main() -> None:
    """Entry point of the command line."""
    # Make both calls before anything asks JAX for a device.
    cpu_devices.make_from_flags()
    distributed.initialize_from_flags()
    step = flags.FLAGS.step
    if step is not None and step != "best":
        if not step.isdecimal():
            remedy = "use a number of updates or 'best'"
            raise UserError("--step", step, "is not a checkpoint", remedy)
        step = int(step)
    values = flags.FLAGS
    if values.workdir:
        metrics = evaluate_checkpoint(
            values.config, values.workdir, step, values.split, values.trust_workdir
        )
    elif step is not None:
        raise UserError("--step", step, "needs the --workdir of a run", "give --workdir")
    else:
        metrics = evaluate_weights(values.config, values.split)
    if jax.process_index() == 0:
        print(json.dumps(as_json(metrics)), flush=True)
    check_finite("the evaluation", metrics, _allows(values), _print)


def _allows(values: flags.FlagValues) -> bool:
    """Returns config.guards.allow_nonfinite_eval from --config or, without it, from the run's config."""
    if values.config is not None:
        return bool(values.config.guards.allow_nonfinite_eval)
    return bool(Workdir(values.workdir).read_config().get("guards.allow_nonfinite_eval"))


if __name__ == "__main__":
    cli.run_main(main)
