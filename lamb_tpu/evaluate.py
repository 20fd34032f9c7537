"""Evaluates a checkpoint of a workdir on the config's evaluation split, every example once.

  python -m lamb_tpu.evaluate --config=configs/digits.py --workdir=DIR

The config must be the one the run was started with. Prints one JSON object.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping

import jax
from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import cli, data, distributed
from lamb_tpu.checkpoint import Checkpoints
from lamb_tpu.errors import UserError
from lamb_tpu.metrics import mean_metrics
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.run import Run, prepare
from lamb_tpu.workdir import Workdir


def make_evaluator(run: Run) -> Callable[[step_lib.TrainState], dict[str, float]]:
    """A function of the state to the task's metrics over every example of the evaluation set.

    Each example counts exactly once, whatever the batch size and the number of devices.
    """
    eval_step = step_lib.make_eval_step(run.task, run.mesh)

    def evaluate(state: step_lib.TrainState) -> dict[str, float]:
        batches = data.eval_batches(
            run.eval_set, run.config.eval.batch_size, jax.process_index(), jax.process_count()
        )

        def sums() -> Iterator[Mapping[str, tuple[jax.Array, jax.Array]]]:
            for batch in batches:
                sharded = mesh_lib.shard_batch(batch, run.mesh)
                yield eval_step(state.params, state.model_state, sharded)

        return mean_metrics(sums())

    return evaluate


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | os.PathLike[str], step: int | None = None
) -> dict[str, float]:
    """Metrics of the checkpoint of update `step`, or of the newest, with `step` among them.

    Raises:
      UserError: a mistake in the config, or no such checkpoint.
    """
    Workdir(workdir).read_config()  # refuses a folder without a run, before it is made one
    run = prepare(config, workdir)
    with Checkpoints(
        run.folder.checkpoints,
        config.checkpoint.keep,
        report=lambda text: print(text, file=sys.stderr),
        writing=False,
    ) as checkpoints:
        if step is None:
            restored = checkpoints.restore_latest(run.abstract_state)
        else:
            restored = checkpoints.restore(step, run.abstract_state)
    if restored is None:
        raise UserError(f"--workdir {run.folder.path} has no checkpoint yet")
    state, _ = restored
    return {"step": int(state.step), **make_evaluator(run)(state)}


def main() -> None:
    """Entry point of the command line."""
    distributed.initialize_from_flags()
    metrics = evaluate_checkpoint(flags.FLAGS.config, flags.FLAGS.workdir, flags.FLAGS.step)
    if jax.process_index() == 0:
        print(json.dumps(metrics))


if __name__ == "__main__":
    cli.define_run_flags()
    distributed.define_flags()
    flags.DEFINE_integer("step", None, "Completed updates of the checkpoint; default the newest.")
    cli.run_main(main, required=("config", "workdir"))
