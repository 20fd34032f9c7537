"""The updates of a run, from the examples that its loader gives next."""

from collections.abc import Callable

from lamb_tpu import data
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.gradient_statistics import Statistics
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import batches
from lamb_tpu.run.build import Run
from lamb_tpu.run.statistics import statistics_of
from lamb_tpu.tasks import Sums

Updating = Callable[[TrainState, int], tuple[TrainState, Sums]]


def make_updating(run: Run, loader: data.TrainLoader, compiles: bool = True) -> Updating:
    """Returns `(state, step) -> (state, sums)`, the update after `step` completed ones.

    It takes its examples from the loader; the state's buffers are donated.

    Args:
      run: the run.
      loader: gives the training examples, `run.local_rows` of batches of `config.batch_size`.
      compiles: whether to compile here what the updates need, so that the first does not.
    """
    statistics = statistics_of(run.config)
    if run.recipe.path is not None or statistics:
        return _make_changing(run, loader, statistics, compiles)
    train_step = run.make_train_step()
    if compiles:
        for shapes in run.abstract_batches():
            train_step.lower(run.abstract_state, shapes).compile()
    return lambda state, step: train_step(state, run.shard_batch(next(loader)))


def _make_changing(
    run: Run, loader: data.TrainLoader, statistics: Statistics, compiles: bool
) -> Updating:
    config, recipe, size = run.config, run.recipe, batches.quantum(run.config)
    step_of = ChangingStep(
        run.task, run.tx, run.layout, run.abstract_state,
        run.abstract_rows(size, run.train_set.element_spec), config.parallel.backend,
        config.parallel.gradient_dtype, run.parts, config.guards.max_skipped > 0,
        statistics,
    )
    if compiles:
        step_of.compile()
    rows = mesh_lib.local_rows(size, run.mesh)

    def update(state: TrainState, step: int) -> tuple[TrainState, Sums]:
        microbatches = [
            mesh_lib.shard_batch(loader.take(size, rows), size, run.mesh)
            for _ in range(recipe.batch(step) // size)
        ]
        return step_of(state, microbatches, recipe.learning_rates[step], statistics.is_due(step))

    return update
