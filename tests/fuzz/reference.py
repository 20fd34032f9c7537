"""Compares the oracle with the formulas of `textbook`: loss, learning rate, optimizer and averages."""

from typing import Any

import jax
import numpy as np

from lamb_tpu.optim import parameters
from tests.fuzz import exact, families, textbook
from tests.fuzz.case import Case
from tests.fuzz.comparing import LIMIT, Difference
from tests.fuzz.oracle import Oracle, Trajectory
from tests.fuzz.running import Leg

# Constants such as 1 - 0.999 have five digits in float32; the errors are wrong formulas.
CLOSE = 2e-3


def rates(oracle: Oracle, legs: dict[str, Leg]) -> list[Difference]:
    """Compares the learning rate of each record with the schedule's formula."""
    found = []
    for name, leg in legs.items():
        for record in leg.records:
            if record["kind"] == "train":
                expected = oracle.rates[record["step"] - 1]
                gap = abs(record["learning_rate"] - expected) / max(expected, 1e-12) / 1e-5
                what = f"{name} learning rate of update {record['step']}, by its formula"
                found.append(Difference(what, gap, record["learning_rate"], expected))
    return found


def dtypes(case: Case, oracle: Oracle) -> list[Difference]:
    """Checks that a case without bfloat16 computes nothing and stores nothing in bfloat16."""
    if "bfloat16" in case.to_json() or "bf16" not in oracle.text:
        return []
    return [Difference("the step has values in bfloat16, and the config has not", np.inf, 0, 0)]


def trajectory(case: Case, oracle: Oracle, exact_ones: dict[float, Trajectory]) -> list[Difference]:
    """Compares the oracle's parameters, averages and losses with the formulas, if they cover the case."""
    optimizer = case.config.get("optimizer", {"name": "sgd", "rules": "all"})
    if not textbook.covers(optimizer) or oracle.run.task.model.carry_shape is not None:
        return []
    made = _Reference(case, oracle, optimizer)
    return made.compared(exact_ones)


class _Reference:
    def __init__(self, case: Case, oracle: Oracle, optimizer: Any) -> None:
        self._oracle, self._run = oracle, oracle.run
        state = oracle.state
        self._paths = parameters.leaf_paths(state.params)
        self._treedef = jax.tree.structure(state.params)
        self._start = self._named(state.params)
        self._decay = case.config.get("ema.decay", 0.0)
        self._model_state = jax.tree.map(exact.widened, state.model_state)
        fields = {**optimizer, "rules": optimizer.get("rules", families.rules(case.family))}
        self._optimizer = textbook.Optimizer(fields, oracle.rates, case.family == "bert_scanned")

    def _named(self, tree: Any) -> textbook.Leaves:
        return dict(zip(self._paths, map(exact.widened, jax.tree.leaves(tree)), strict=True))

    def compared(self, exact_ones: dict[float, Trajectory]) -> list[Difference]:
        """Returns the differences of all updates."""
        found: list[Difference] = []
        params, expected = self._start, exact_ones[0.0]
        average = dict(params)
        for number, batch in enumerate(self._oracle.batches):
            tree = self._treedef.unflatten(list(params.values()))
            loss, self._model_state, grads = self._oracle.gradients(
                tree, self._model_state, number, batch
            )
            params = self._optimizer.step(params, self._named(grads))
            average = {
                path: textbook.averaged(average[path], params[path], self._decay, number)
                for path in params
            }
            value = float(expected.sums[number + 1]["loss"][0])
            gap = abs(value - loss) / max(abs(loss), 1e-6) / CLOSE
            what = f"oracle's loss of update {number + 1}, by its formula"
            found.append(Difference(what, gap * LIMIT, value, loss))
            if number + 1 in expected.states:
                found += self._leaves(number + 1, params, average, exact_ones)
        return found

    def _leaves(
        self, update: int, params: Any, average: Any, exact_ones: dict[float, Trajectory]
    ) -> list[Difference]:
        trees = [(".params", params)] + ([(".ema[0]", average)] if self._decay else [])
        found = []
        for prefix, tree in trees:
            for path, value in tree.items():
                name = prefix + "".join(f"['{each}']" for each in path.split("/"))
                exacts = {k: each.states[update][name] for k, each in exact_ones.items()}
                spread = max(float(np.linalg.norm(x - exacts[0.0])) for x in exacts.values())
                moved = float(np.linalg.norm(value - self._start[path]))
                gap = float(np.linalg.norm(exacts[0.0] - value))
                allowed = CLOSE * moved + LIMIT * spread + 1e-12
                norms = (float(np.linalg.norm(x)) for x in (exacts[0.0], value))
                what = f"oracle update {update} {name}, by its formula"
                found.append(Difference(what, LIMIT * gap / allowed, *norms))
        return found
