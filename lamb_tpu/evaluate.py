"""Evaluates a checkpoint of a workdir on the config's evaluation split, every example once.

  python -m lamb_tpu.evaluate --config=configs/digits.py --workdir=DIR

The config must be the one the run was started with. Prints one JSON object.
"""

import json
import os

import jax
from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu.checkpoint import Checkpoints
from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.recipe import make_optimizer, resolve
from lamb_tpu.train import check_config, evaluate, load_split, one_example
from lamb_tpu.workdir import Workdir


def evaluate_checkpoint(
    config: ConfigDict, workdir: str | os.PathLike[str], step: int | None = None
) -> dict[str, float]:
    """Metrics of the checkpoint of update `step`, or of the newest, with `step` among them.

    Raises:
      UserError: a mistake in the config, or no such checkpoint.
    """
    folder = Workdir(workdir)
    folder.read_config()
    folder.check(config)
    task = check_config(config)
    mesh = mesh_lib.make_mesh(config.mesh)
    mesh_lib.check_divides("config.eval.batch_size", config.eval.batch_size, mesh)
    with Checkpoints(folder.checkpoints, config.checkpoint.keep) as checkpoints:
        steps = checkpoints.steps()
        if not steps or step is not None and step not in steps:
            asked = "a checkpoint" if step is None else f"the checkpoint of update {step}"
            raise UserError(
                f"{folder.checkpoints} does not hold {asked}; it has: "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        train_set = load_split(config, config.data.train_split)
        eval_set = load_split(config, config.data.eval_split)
        tx, _ = make_optimizer(config, resolve(config, len(train_set)))
        init = step_lib.make_init(task, tx, config.seed, one_example(train_set))
        abstract = step_lib.abstract_state(init, mesh)
        if step is None:
            state, _ = checkpoints.restore_latest(abstract)
        else:
            state, _ = checkpoints.restore(step, abstract)
    eval_step = step_lib.make_eval_step(task, mesh)
    metrics = evaluate(eval_step, state, eval_set, config.eval.batch_size, mesh)
    return {"step": int(state.step), **metrics}


def main(config: ConfigDict, workdir: str) -> None:
    """Entry point of the command line."""
    metrics = evaluate_checkpoint(config, workdir, flags.FLAGS.step)
    if jax.process_index() == 0:
        print(json.dumps(metrics))


config_lib.define_flags()
flags.DEFINE_integer("step", None, "Completed updates of the checkpoint; the newest by default.")

if __name__ == "__main__":
    config_lib.run_main(main)
