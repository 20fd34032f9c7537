"""The expected result of a case: one device, one microbatch, jit, evaluated in float64 by `exact`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax import lax
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.optim import schedule_free
from lamb_tpu.parallel import backends, step
from lamb_tpu.parallel.update import make_update
from lamb_tpu.run.build import Run
from lamb_tpu.spec import flatten
from tests import tiny
from tests.fuzz import exact, families, textbook
from tests.fuzz.case import Case
from tests.fuzz.losses import Gradients
from tests.fuzz.running import Arrays, arrays, prepared

# Factors of the rounding errors: the spread of 1 and -1 measures the errors of smooth functions, and
# the large one finds discontinuities, such as the sign of a value near 0.
SMALL, LARGE = 1.0, 16.0
LARGE_BFLOAT16 = 2.0  # 16 errors of bfloat16 are 12 %


class Trajectory(NamedTuple):
    """States, metric sums and evaluations by the number of completed updates.

    The sums are pairs (sum, weight) of one update.
    """

    states: dict[int, Arrays]
    sums: dict[int, dict[str, Any]]
    evaluations: dict[int, dict[str, float]]

    def metrics(self, kind: str, update: int, count: int) -> dict[str, float]:
        """Returns the metrics of a record after `update`, which covers `count` updates."""
        if kind == "eval":
            return self.evaluations[update]
        return means(*(self.sums[each] for each in range(update - count + 1, update + 1)))


# Keys that the oracle sets: all of them promise not to change the numbers.
ONE_DEVICE = {
    "mesh": ConfigDict({"data": 1}),
    "accumulation_steps": 1,
    "parallel.backend": "jit",
    "parallel.rules": (),
    "parallel.optimizer_state": "replicated",
    "parallel.exchange": ConfigDict({"name": "float32"}),
    "statistics.noise_scale": False,
    "statistics.preconditioned": False,
    "statistics.halves": False,
    "statistics.per_example": 0,
    "loop.updates_per_call": 1,
    "guards.desync_every": "0 steps",
}


class Oracle:
    """The traced programs of a case on one device."""

    def __init__(self, case: Case) -> None:
        config = tiny.change(case.made(case.first), ONE_DEVICE)
        exchange = case.config.get("parallel.exchange", {}).get("name", "float32")
        self.run = run = prepared(config, 1)
        self.state = run.first_state()
        self._treedef = jax.tree.structure(self.state)
        total = families.UPDATES * run.spec.batch_size
        rule = case.config.get("batch_rule")
        self.sizes = textbook.batch_sizes(rule, run.spec.batch_size, total)
        self.batches = _batches(run, self.sizes)
        starts = np.cumsum([0, *self.sizes[:-1]]) / run.spec.batch_size
        self.rates = textbook.rates(rule, schedule_of(run), starts, self.sizes)
        self._saved = {families.SAVED, len(self.sizes)}
        self._steps: dict[int, _Traced] = {}
        with mock.patch.object(backends.JitBackend, "reduce", _reduce(exchange)):
            for batch, size in zip(self.batches, self.sizes, strict=True):
                if size not in self._steps:
                    self._steps[size] = _Traced(_step(run), self.state, batch, np.float32(0))
        self._eval = _evaluation(run, self.state)
        self.gradients = Gradients(run, self.state.key)
        self.text = "".join(str(each.closed) for each in self._steps.values())
        self.large = LARGE_BFLOAT16 if "bf16" in self.text else LARGE

    def trajectories(self) -> dict[float, Trajectory]:
        """Returns the exact trajectory, and those with rounding errors, by their factor."""
        return {k: self.trajectory(k) for k in (0.0, SMALL, -SMALL, self.large, -self.large)}

    def trajectory(self, k: float) -> Trajectory:
        """Makes all updates and evaluations with the factor `k` of the rounding errors."""
        found = Trajectory({}, {}, {})
        flat = jax.tree.leaves(self.state)
        for number, (batch, rate) in enumerate(zip(self.batches, self.rates, strict=True), start=1):
            step_of = self._steps[self.sizes[number - 1]]
            state, sums = step_of(k, self._treedef.unflatten(flat), batch, np.float64(rate))
            flat, found.sums[number] = jax.tree.leaves(state), sums
            if number in self._saved:
                found.states[number] = arrays(state)
                found.evaluations[number] = self._eval(k, state)
        return found

    def gradient(
        self, state: Any, update: int, batch: data.Batch | None = None, first: int = 0
    ) -> tuple[float, Any]:
        """Returns the loss and its gradient at a state, by default for the update's full batch."""
        rows = self.batches[update] if batch is None else batch
        loss, _, grads = self.gradients(state.params, state.model_state, update, rows, first)
        return loss, grads


def schedule_of(run: Run) -> textbook.Schedule:
    """Returns the learning rate of a run by its formula."""
    keys = flatten(run.spec)
    rate = keys["optimizer.learning_rate"]
    return textbook.schedule(keys, rate, len(run.train_set), families.UPDATES)


def _batches(run: Run, sizes: Sequence[int]) -> list[data.Batch]:
    """Returns the batches: epoch after epoch in its order, with no example left out."""
    source, found, start = run.train_set, [], 0
    for size in sizes:
        positions = np.arange(start, start + size)
        epochs, offsets = np.divmod(positions, len(source))
        indices = offsets
        if source.streams is None:
            orders = {
                epoch: data.example_order(run.spec.seed, int(epoch), len(source))
                for epoch in np.unique(epochs)
            }
            pairs = zip(epochs, offsets, strict=True)
            indices = np.array([orders[epoch][offset] for epoch, offset in pairs])
        found.append(source.gather(indices, epochs))
        start += size
    return found


def _step(run: Run) -> Any:
    """Returns an update `(state, batch, rate)`; a constant batch takes the schedule's rate."""
    if run.recipe.path is None:
        made = run.make_train_step()
        return lambda state, batch, rate: made.__wrapped__(state, batch)
    backend = step.make_backend("jit", run.layout)
    skips = run.spec.guards.max_skipped > 0

    def update(state: Any, batch: Any, rate: jax.Array) -> Any:
        tx = run.optimizer_at(rate)
        made = make_update(run.task, tx, backend, parts=run.parts, skip_nonfinite=skips)
        return made(state, batch)

    return step.in_mesh(run.mesh, update)


def means(*updates: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of some updates or batches from their pairs (sum, weight)."""
    names = [name for name in updates[0] if any(each[name][1] for each in updates)]
    found = {
        name: sum(float(each[name][0]) for each in updates)
        / sum(float(each[name][1]) for each in updates)
        for name in names
    }
    return {k: float(np.exp(v)) if k.endswith("perplexity") else v for k, v in found.items()}


class _Traced:
    """A traced program: `(k, *arguments) -> result` as NumPy arrays."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        traced = jax.jit(function).trace(*arguments) if not hasattr(function, "trace") else None
        traced = traced or function.trace(*arguments)
        self.closed, self._out = traced.jaxpr, jax.tree.structure(traced.out_info)

    def __call__(self, k: float, *arguments: Any) -> Any:
        return self._out.unflatten(exact.evaluate(self.closed, k, jax.tree.leaves(arguments)))


def _evaluation(run: Run, state: Any) -> Callable[[float, Any], dict[str, float]]:
    """Returns the evaluation of a state: the full set as one batch without padding."""
    count = len(run.eval_set)
    [batch] = data.eval_batches(run.eval_set, count)
    program = _Traced(
        step.make_eval_step(run.task, run.mesh), state.params, state.model_state, batch
    )
    averaged = None
    if schedule_free.keeps_evaluation_params(state.opt_state):
        averaged = _Traced(schedule_free.evaluation_params, state.opt_state, state.params)

    def evaluate(k: float, state: Any) -> dict[str, float]:
        params = averaged(k, state.opt_state, state.params) if averaged else state.params
        found = means(program(k, params, state.model_state, batch))
        if state.ema is not None:
            of_averages = means(program(k, *state.ema, batch))
            found |= {f"ema_{name}": value for name, value in of_averages.items()}
        return found

    return evaluate


def _reduce(exchange: str) -> Callable[..., Any]:
    """Returns `JitBackend.reduce` with the rounding of an exchange that only rounds."""
    original = backends.JitBackend.reduce

    def reduce(self: backends.JitBackend, grads: Any, residual: Any) -> tuple[Any, Any]:
        if exchange == "bfloat16":
            grads = jax.tree.map(lambda leaf: lax.reduce_precision(leaf, 8, 7), grads)
        return original(self, grads, residual)

    return reduce
