"""Checks of a run's data before anything compiles, and of a batch that made a loss non-finite."""

import jax
import numpy as np

from lamb_tpu import data, tasks
from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import Run
from lamb_tpu.run.recipe import Recipe

_ALL_BYTES = 2**26  # a set of arrays up to this size is checked in full
# Numbers of examples to check: in other sets in memory, whose examples may be slow to compute, and in
# sets that are read from files, whose examples may be slow to read.
_IN_MEMORY, _READ = 512, 32


def train_check(run: Run) -> data.Check:
    """Returns the check of training batches."""
    return data.Check(
        run.train_set,
        run.spec.data.train_split,
        tasks.field_ranges(run.task, run.train_set),
        # A run that may skip updates survives a NaN, and the guards then name the example.
        finite=not run.spec.guards.max_skipped,
    )


def eval_check(run: Run) -> data.Check:
    """Returns the check of evaluation batches."""
    return data.Check(
        run.eval_set, run.spec.data.eval_split, tasks.field_ranges(run.task, run.eval_set)
    )


def check_data(run: Run, training: bool = True) -> None:
    """Checks the first examples of both data sets, or all examples of small sets in memory.

    Later batches are checked when they are read.
    """
    train_set, eval_set = run.train_set, run.eval_set
    with distributed.together():
        if training:
            rows = run.local_rows()
            if (count := _count(train_set)) < len(train_set):
                loader = data.TrainLoader(train_set, run.spec.batch_size, run.spec.seed)
                indices, epochs, _ = loader.indices(0, run.spec.batch_size, rows[:count])
            else:
                indices, epochs = np.arange(count), np.zeros(count, np.int64)
            train_check(run).read(indices, epochs)
        trained, evaluated = train_set.num_classes, eval_set.num_classes
        if trained is not None and evaluated is not None and evaluated > trained:
            problem = f"has {evaluated} classes, but the training set has {trained}"
            remedy = "use splits with the same classes"
            raise UserError("config.data.eval_split", run.spec.data.eval_split, problem, remedy)
        eval_check(run).read(np.arange(_count(eval_set)))


def examine(run: Run, recipe: Recipe, update: int) -> None:
    """Checks the batch of an update whose loss, gradient or parameters are not finite.

    Each process gathers a part of the batch again, which is possible because the order depends only
    on seed, epoch and index. All processes must call this function with the update's number,
    counted from 1.
    """
    spec = run.spec
    start, count = recipe.examples(update - 1), recipe.batch(update - 1)
    rows = np.array_split(np.arange(count), jax.process_count())[jax.process_index()]
    loader = data.TrainLoader(run.train_set, spec.batch_size, spec.seed)
    with distributed.together():
        indices, epochs, _ = loader.indices(start, count, rows)
        check = train_check(run)
        check.examine(check.read(indices, epochs), indices)


def _count(source: data.Source) -> int:
    if getattr(type(source), "gather", None) is data.ArraySource.gather:
        example_bytes = sum(spec.num_bytes for spec in source.element_spec.values())
        return min(len(source), max(_ALL_BYTES // max(example_bytes, 1), _IN_MEMORY))
    return min(len(source), _IN_MEMORY if source.in_memory else _READ)
