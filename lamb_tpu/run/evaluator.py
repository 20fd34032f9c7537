"""Evaluation of a state over the full evaluation set; each example counts once."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lamb_tpu import custom, data
from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError
from lamb_tpu.optim import schedule_free
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import memory
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

    Compiles the evaluation step. If the set fits into `config.loop.held_share` of a device's
    memory, it stays there after the first evaluation, and later evaluations do not send it again.

    Each example counts exactly once for any batch size and any numbers of devices and processes. If
    the optimizer has separate weights for evaluation, as `schedule_free_adamw` has, those weights are
    evaluated. If the state has moving averages of the weights, the averages are evaluated too:
    'ema_accuracy' is returned beside 'accuracy'.

    Args:
      run: the run.
      between: called before each batch, at the same batches in all processes; may raise.
      keep_file: called in the first process with the name and text of each file that a `HostScored`
        task makes; for the averaged weights, 'ema_' precedes the name.
      files_prefix: prefix of all file names.
    """
    # All processes compute scores, because all return the metrics; only the first writes files.
    writer = keep_file if jax.process_index() == 0 else None
    return _Evaluator(run, between, writer, files_prefix)


class _Evaluator:
    def __init__(
        self,
        run: Run,
        between: Callable[[], None],
        keep_file: Callable[[str, str], None] | None,
        files_prefix: str,
    ) -> None:
        self._run, self._between = run, between
        self._keep_file, self._files_prefix = keep_file, files_prefix
        self._scored = run.task if isinstance(run.task, HostScored) else None
        self._eval_step = step_lib.make_eval_step(run.task, run.mesh)
        self._predict_step: jax.stages.Wrapped | None = None
        if self._scored is not None:
            self._predict_step = step_lib.make_predict_step(self._scored, run.mesh)
        # Batches on the devices, after the first evaluation of a set that fits.
        self._held: list[dict[str, jax.Array]] = []
        self._holds = memory.fits(
            data.num_bytes(run.eval_set) // mesh_lib.num_batch_shards(run.mesh),
            run.spec.loop.held_share,
            run.mesh,
        )
        # Averages may be sharded like the optimizer's state; the step needs the weights' shardings.
        weights = (run.abstract_state.params, run.abstract_state.model_state)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, weights)
        self._reshard = jax.jit(
            lambda averages: jax.tree.map(lambda e, x: e.astype(x.dtype), averages, weights),
            out_shardings=shardings,
        )
        # Weights that an optimizer stores for evaluation may be sharded like its state too.
        opt_state, self._at = run.abstract_state.opt_state, None
        if schedule_free.keeps_evaluation_params(opt_state):
            self._at = jax.jit(schedule_free.evaluation_params, out_shardings=shardings[0])
            self._at.lower(opt_state, weights[0]).compile()
        steps = [self._eval_step, *filter(None, [self._predict_step])]
        for step in steps:
            with _explained(run):
                lowered = step.lower(*weights, run.abstract_eval_batch())
            lowered.compile()
        if run.abstract_state.ema is not None:
            self._reshard.lower(run.abstract_state.ema).compile()

    def __call__(self, state: TrainState) -> dict[str, float]:
        params = state.params if self._at is None else self._at(state.opt_state, state.params)
        models = {"": (params, state.model_state)}
        if state.ema is not None:
            models["ema_"] = self._reshard(state.ema)
        # For each set of weights, the outputs of `predict` for each batch.
        outputs: dict[str, list[Any]] = {prefix: [] for prefix in models}
        failures: list[UserError] = []

        # Yields the sums for `mean_metrics` and collects the outputs.
        def sums() -> Iterator[Sums]:
            for results in fetched(self._steps(models, failures)):
                for prefix, (_, output) in results.items():
                    outputs[prefix].append(output)
                yield {
                    prefix + name: pair
                    for prefix, (pairs, _) in results.items()
                    for name, pair in pairs.items()
                }

        metrics = mean_metrics(sums())
        distributed.agree(failures[0] if failures else None)
        for prefix, batches in outputs.items() if self._scored is not None else ():
            metrics |= self._score(prefix, batches)
        return metrics

    def _steps(
        self, models: Mapping[str, tuple[Any, Any]], failures: list[UserError]
    ) -> Iterator[dict[str, tuple[Sums, Any]]]:
        for batch in self._batches(failures):
            self._between()
            yield {
                prefix: (
                    self._eval_step(*model, batch),
                    self._predict_step and self._predict_step(*model, batch),
                )
                for prefix, model in models.items()
            }

    def _batches(self, failures: list[UserError]) -> Iterator[dict[str, jax.Array]]:
        """Yields the evaluation batches on the devices, and keeps them there if they fit."""
        if self._held:
            yield from self._held
            return
        run, size, held = self._run, self._run.eval_batch_size, []
        for batch in _batches(run, size, rows_lib.local_rows(size, run.mesh), failures):
            sharded = rows_lib.shard_batch(batch, size, run.mesh)
            if self._holds:
                held.append(sharded)
            yield sharded
        # Only a complete evaluation reaches this line.
        if not failures:
            self._held.extend(held)

    def _score(self, prefix: str, parts: Sequence[Any]) -> dict[str, float]:
        source = self._run.eval_set
        assert self._scored is not None
        # Drop the padding after the last example.
        outputs = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(source)], *parts)
        floats = [leaf for leaf in jax.tree.leaves(outputs) if leaf.dtype.kind == "f"]
        files: dict[str, str] = {}
        # Tasks choose the largest output, which is arbitrary if an output is NaN.
        if any(np.isnan(leaf).any() for leaf in floats):
            scores = dict.fromkeys(self._scored.score_names, math.nan)
        else:
            scores, files = self._scored.score(source, outputs)
        for name, text in files.items():
            if self._keep_file is not None:
                self._keep_file(self._files_prefix + prefix + name, text)
        return {prefix + name: value for name, value in scores.items()}


def _batches(
    run: Run, batch_size: int, rows: np.ndarray, failures: list[UserError]
) -> Iterator[data.Batch]:
    """Yields this process's rows of the evaluation batches.

    If one of several processes cannot read its rows, that process adds the error to `failures` and
    yields masked zeros from then on, because the other processes wait for it in each batch.
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


@contextlib.contextmanager
def _explained(run: Run) -> Iterator[None]:
    """If tracing an evaluation fails, raises an error that names a field in which the splits differ.

    Use this context manager around tracing only: a failed compilation has other causes.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a network can raise anything
        difference = None
        if custom.is_custom(run.spec.data.name):  # splits of shipped sets have the same fields
            difference = data.split_difference(run.train_set, run.eval_set)
        if difference is None:
            raise
        raise difference from error


def metric_names(run: Run) -> list[str]:
    """Returns the names of the evaluation's metrics without computing them."""
    # One batch with the fields that `eval_batches` yields.
    batch = run.eval_set.gather(np.zeros(1, np.int64)) | {"mask": np.ones(1, np.float32)}
    state = run.abstract_state
    with _explained(run):
        names = list(jax.eval_shape(run.task.evaluate, state.params, state.model_state, batch))
    if isinstance(run.task, HostScored):
        names += run.task.score_names
    return names + [f"ema_{name}" for name in names if state.ema is not None]
