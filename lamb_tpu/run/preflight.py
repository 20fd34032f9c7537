"""Checks of a run's data before anything compiles, and of a batch after which a loss is not finite."""

import jax
import numpy as np

from lamb_tpu import data, tasks
from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import Run

_ALL_BYTES = 2**26  # a set of arrays up to this size is checked in full
# Examples of other sets: to gather them may cost work, or reading a file for each.
_IN_MEMORY, _READ = 512, 32


def train_check(run: Run) -> data.Check:
    """Returns the check of training batches."""
    return data.Check(
        run.train_set,
        run.config.data.train_split,
        tasks.field_ranges(run.task, run.train_set),
        # A run that may skip updates gets past NaN; the guards then name the example.
        finite=not run.config.guards.max_skipped,
    )


def eval_check(run: Run) -> data.Check:
    """Returns the check of evaluation batches."""
    return data.Check(
        run.eval_set, run.config.data.eval_split, tasks.field_ranges(run.task, run.eval_set)
    )


def check_data(run: Run, training: bool = True) -> None:
    """Checks the first examples of both data sets, or of small ones in memory all examples.

    Later batches are checked as they are read.

    Args:
      run: the run.
      training: whether to check the training set too.

    Raises:
      UserError: a value, a shape or a dtype is wrong; it is raised in every process.
    """
    train_set, eval_set = run.train_set, run.eval_set
    with distributed.together():
        if training:
            rows = run.local_rows()
            if (count := _count(train_set)) < len(train_set):
                loader = data.TrainLoader(train_set, run.config.batch_size, run.config.seed)
                indices, epochs, _ = loader.places(0, run.config.batch_size, rows[:count])
            else:
                indices, epochs = np.arange(count), np.zeros(count, np.int64)
            train_check(run).read(indices, epochs)
        trained, evaluated = train_set.num_classes, eval_set.num_classes
        if trained is not None and evaluated is not None and evaluated > trained:
            raise UserError(
                f"config.data.eval_split is {run.config.data.eval_split!r}, which has {evaluated} "
                f"classes, and the training set has {trained}; both must have the same"
            )
        eval_check(run).read(np.arange(_count(eval_set)))


def examine(run: Run, update: int) -> None:
    """Checks the batch of an update whose loss, gradient or parameters are not finite.

    Each process gathers a part of it again: the order is a function of seed, epoch and index. All
    processes must call this function.

    Args:
      run: the run.
      update: number of the update, counted from 1.

    Raises:
      UserError: a value of the batch may be the cause; it is raised in every process.
    """
    recipe, config = run.recipe, run.config
    start, count = recipe.examples(update - 1), recipe.batch(update - 1)
    rows = np.array_split(np.arange(count), jax.process_count())[jax.process_index()]
    loader = data.TrainLoader(run.train_set, config.batch_size, config.seed)
    with distributed.together():
        indices, epochs, _ = loader.places(start, count, rows)
        check = train_check(run)
        check.examine(check.read(indices, epochs), indices)


def _count(source: data.Source) -> int:
    """Returns the number of examples to check before the run."""
    if getattr(type(source), "gather", None) is data.ArraySource.gather:
        example_bytes = sum(spec.num_bytes for spec in source.element_spec.values())
        return min(len(source), max(_ALL_BYTES // max(example_bytes, 1), _IN_MEMORY))
    return min(len(source), _IN_MEMORY if source.in_memory else _READ)
