"""Evaluation of a state over the whole evaluation set, with each example counted once."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from lamb_tpu import data
from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError
from lamb_tpu.optim import schedule_free
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import eval_check
from lamb_tpu.store.metrics import fetched, mean_metrics
from lamb_tpu.tasks import HostScored, Sums


def make_evaluator(
    run: Run,
    between: Callable[[], None] = lambda: None,
    keep_file: Callable[[str, str], None] | None = None,
    files_prefix: str = "",
) -> Callable[[TrainState], dict[str, float]]:
    """Returns a function from the state to the task's metrics over the evaluation set.

    The evaluation step is compiled here, not during the first evaluation.

    Each example counts exactly once, whatever the batch size and the number of devices and
    processes. An optimizer that keeps separate weights for evaluation, such as
    `schedule_free_adamw`, is evaluated at these. If the state has moving averages of the weights,
    their metrics are added, as 'ema_accuracy' beside 'accuracy'.

    Args:
      run: the run.
      between: called before each batch, in all processes before the same batches; may raise.
      keep_file: called in the first process with the name and text of each file that a `HostScored`
        task makes; files of the averages are named 'ema_predictions.json' and so on.
      files_prefix: prefix of the files' names.
    """
    task, num_examples = run.task, len(run.eval_set)
    scored = task if isinstance(task, HostScored) else None
    # All processes score, because all return the metrics; the first one keeps the files.
    keep_file = keep_file if jax.process_index() == 0 else None
    eval_step = step_lib.make_eval_step(task, run.mesh)
    predict_step = None if scored is None else step_lib.make_predict_step(scored, run.mesh)
    batch_size = run.eval_batch_size
    rows = mesh_lib.local_rows(batch_size, run.mesh)
    # Averages may be split as the optimizer's state; the step needs them placed as the weights.
    weights = (run.abstract_state.params, run.abstract_state.model_state)
    place = jax.jit(
        lambda averages: jax.tree.map(lambda e, x: e.astype(x.dtype), averages, weights),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, weights),
    )
    # So may the weights that an optimizer keeps for evaluation.
    opt_state, at = run.abstract_state.opt_state, None
    if schedule_free.keeps_evaluation_params(opt_state):
        places = jax.tree.map(lambda leaf: leaf.sharding, weights[0])
        at = jax.jit(schedule_free.evaluation_params, out_shardings=places)
        at.lower(opt_state, weights[0]).compile()
    for step in filter(None, (eval_step, predict_step)):
        step.lower(*weights, run.abstract_eval_batch()).compile()
    if run.abstract_state.ema is not None:
        place.lower(run.abstract_state.ema).compile()

    def evaluate(state: TrainState) -> dict[str, float]:
        params = state.params if at is None else at(state.opt_state, state.params)
        models = {"": (params, state.model_state)}
        if state.ema is not None:
            models["ema_"] = place(state.ema)
        # For each set of weights the outputs of `predict`, one element a batch.
        outputs: dict[str, list[Any]] = {prefix: [] for prefix in models}
        failures: list[UserError] = []

        def steps() -> Iterator[dict[str, tuple[Sums, Any]]]:
            for batch in _batches(run, batch_size, rows, failures):
                between()
                sharded = mesh_lib.shard_batch(batch, batch_size, run.mesh)
                yield {
                    prefix: (
                        eval_step(*model, sharded),
                        predict_step and predict_step(*model, sharded),
                    )
                    for prefix, model in models.items()
                }

        # Hands the sums on to `mean_metrics` and sets the outputs aside.
        def sums() -> Iterator[Sums]:
            for found in fetched(steps()):
                for prefix, (_, output) in found.items():
                    outputs[prefix].append(output)
                yield {
                    prefix + name: pair
                    for prefix, (pairs, _) in found.items()
                    for name, pair in pairs.items()
                }

        metrics = mean_metrics(sums())
        distributed.agree(failures[0] if failures else None)
        if scored is None:
            return metrics
        for prefix, parts in outputs.items():
            # Padding follows the last example.
            whole = jax.tree.map(lambda *parts: np.concatenate(parts)[:num_examples], *parts)
            scores, files = _score(scored, run.eval_set, whole)
            metrics |= {prefix + name: value for name, value in scores.items()}
            for name, text in files.items():
                if keep_file is not None:
                    keep_file(files_prefix + prefix + name, text)
        return metrics

    return evaluate


def _batches(
    run: Run, batch_size: int, rows: np.ndarray, failures: list[UserError]
) -> Iterator[data.Batch]:
    """Yields this process's rows of the evaluation batches.

    One of several processes that cannot read its rows adds the error to `failures`, and yields
    masked zeros to the end: the other processes wait for it in each batch.
    """
    batches = data.eval_batches(run.eval_set, batch_size, rows, eval_check(run))
    for _ in range(-(-len(run.eval_set) // batch_size)):
        try:
            batch = None if failures else next(batches)
        except UserError as error:
            if jax.process_count() == 1:
                raise
            failures.append(error)
            batch = None
        if batch is None:
            count = len(rows)
            batch = {**data.zeros(run.eval_set, count), "mask": np.zeros(count, np.float32)}
        yield batch


def _score(
    task: HostScored, source: data.Source, outputs: Any
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the scores and files of a task's outputs; scores of NaN for outputs with NaN.

    A task takes the largest of its outputs, which for NaN would be an arbitrary one.
    """
    leaves = [leaf for leaf in jax.tree.leaves(outputs) if leaf.dtype.kind == "f"]
    if any(np.isnan(leaf).any() for leaf in leaves):
        return dict.fromkeys(task.score_names, math.nan), {}
    return task.score(source, outputs)


def metric_names(run: Run) -> list[str]:
    """Returns the names of the evaluation's metrics, without computing any."""
    # The fields of a batch as `eval_batches` yields it.
    batch = run.eval_set.gather(np.zeros(1, np.int64)) | {"mask": np.ones(1, np.float32)}
    state = run.abstract_state
    names = list(jax.eval_shape(run.task.evaluate, state.params, state.model_state, batch))
    if isinstance(run.task, HostScored):
        names += run.task.score_names
    return names + [f"ema_{name}" for name in names if state.ema is not None]
