"""PowerSGD in NumPy, in float32 or float64, and tolerances for recorded runs.

Power iterations amplify rounding errors from update to update, by an amount that depends on the
gradients. No constant tolerance is useful: if it were large enough for the last update of an
ill-conditioned run, it would accept a wrong first update. `tolerances` returns a tolerance for each
update of each array, from the distance between results of the algorithm in float32 and in float64.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.optim.golden_common import Settings
from tests.parallel.golden_powersgd import ERRORS_AFTER, random_order

Arrays = Mapping[str, np.ndarray]
# The tolerance, as a multiple of the largest distance from float64 among five runs. Two float32
# programs that differ only in the order of sums differ from each other up to twice as much as from
# float64, and five runs may miss the largest distance. The recorded runs reach at most 0.75 of the
# tolerance.
MARGIN = 4
# Minimum tolerance relative to an array's largest value, for the rounding of a few float32
# operations.
FLOOR = 2.0**-22
# Number of runs whose gradients are perturbed by up to half a unit in the last place.
PERTURBED = 4


def tolerances(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns the largest allowed difference from the record, by key and row.

    A row's tolerance is at least that of all earlier rows, because differences persist in the errors.
    """
    exact = run(entry, recorded, inputs, np.float64)
    spread = {key: np.zeros(len(rows)) for key, rows in exact.items()}
    for number in range(PERTURBED + 1):
        actual = run(entry, recorded, _perturbed(inputs, number), np.float32)
        for key, rows in exact.items():
            spread[key] = np.maximum(spread[key], _largest(actual[key] - rows))
    return {
        key: np.maximum(
            MARGIN * np.maximum.accumulate(distance),
            FLOOR * np.maximum.accumulate(_largest(exact[key])),
        )
        for key, distance in spread.items()
    }


def excess(actual: Arrays, expected: Arrays, allowed: Arrays) -> float:
    """Returns the largest ratio of a row's difference to its tolerance; at most 1 is allowed."""
    ratios = []
    for key, limit in allowed.items():
        distance = _largest(np.float64(actual[key]) - expected[key])
        # If nothing was sent or stored, all values are 0 and the tolerance is 0.
        ratios.append(
            np.divide(
                distance, limit, out=np.where(distance > 0, np.inf, 0.0), where=limit > 0
            ).max()
        )
    return float(np.nan_to_num(max(ratios), nan=np.inf))


def run(
    entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays, dtype: type
) -> dict[str, np.ndarray]:
    """Returns the arrays of a recorded run with keys `agg/...` and `err...`, recomputed in a dtype."""
    settings = Settings(entry["hyper"])
    world = settings["world"]
    grads = {name: inputs["wgrad/" + name][:world].astype(dtype) for name in settings["tensors"]}
    return _RUNS[entry["implementation"]](settings, recorded, grads, dtype)


def _perturbed(inputs: Arrays, number: int) -> Arrays:
    if number == 0:
        return inputs
    rng = np.random.default_rng(number)
    return {
        # Perturb in float64 and round to float32: some values change by one unit in the last place,
        # the rest do not change.
        key: (value * (1 + rng.uniform(-(2.0**-24), 2.0**-24, value.shape))).astype(np.float32)
        for key, value in inputs.items()
        if key.startswith("wgrad/")
    }


def _largest(rows: np.ndarray) -> np.ndarray:
    """Returns the largest magnitude of each row."""
    return np.abs(np.float64(rows)).reshape(len(rows), -1).max(axis=1)


def _orthonormal(factor: np.ndarray) -> np.ndarray:
    """Orthonormalises columns; a column of zeros does not change."""
    columns = np.zeros_like(factor)
    for index in range(factor.shape[1]):
        column = factor[:, index]
        for _ in range(2):
            column = column - columns @ (columns.T @ column)
        norm = np.linalg.norm(column)
        columns[:, index] = column / norm if norm > 0 else column
    return columns


def _pair(matrices: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the low-rank approximation of the mean of the workers' matrices, and the new Q."""
    p = _orthonormal((matrices @ q).mean(axis=0))
    q = (matrices.swapaxes(1, 2) @ p).mean(axis=0)
    return p @ q.T, q


def _matrices(grad: np.ndarray, step: int) -> np.ndarray:
    """Returns the workers' gradients of an update as matrices."""
    each = grad[:, step]
    return each.reshape(len(each), each.shape[1], -1)


def _rows(values: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.stack(values).reshape(len(values), *shape)


def _after(values: list[np.ndarray]) -> list[np.ndarray]:
    return [values[update - 1] for update in ERRORS_AFTER]


def _paper(
    settings: Settings, recorded: Arrays, grads: Arrays, dtype: type
) -> dict[str, np.ndarray]:
    actual = {}
    for name, grad in grads.items():
        shape = grad.shape[2:]
        means, errors = [], []
        if f"q0/{name}" not in recorded:
            actual[f"agg/{name}"] = grad.mean(axis=0)
            continue
        q = np.asarray(recorded[f"q0/{name}"], dtype)
        error = np.zeros_like(_matrices(grad, 0))
        for step in range(grad.shape[1]):
            if not settings["reuse_query"]:
                q = np.asarray(recorded[f"qall/{name}"][step], dtype)
            matrices = _matrices(grad, step) + error
            mean, q = _pair(matrices, q)
            error = matrices - mean
            means.append(mean)
            errors.append(error[0])
        actual[f"agg/{name}"] = _rows(means, shape)
        actual[f"err/{name}"] = _rows(_after(errors), shape)
    return actual


def _package(
    settings: Settings, recorded: Arrays, grads: Arrays, dtype: type
) -> dict[str, np.ndarray]:
    start = settings.get("start_compressing_after_num_steps", 100)
    compressed = recorded.get("compressed", np.array(list(grads))).tolist()
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name in compressed:
        shapes.setdefault(grads[name].shape[2:], []).append(name)
    actual = {}
    for name, grad in grads.items():
        shape = grad.shape[2:]
        if name not in compressed:
            actual[f"agg/{name}"] = grad.mean(axis=0)
            actual[f"err/{name}"] = np.zeros((len(ERRORS_AFTER), *shape), dtype)
            continue
        group, place = list(shapes).index(shape), shapes[shape].index(name)
        p, q = (np.asarray(recorded[f"{side}0/{group}"][place], dtype) for side in "pq")
        error, turn = np.zeros_like(_matrices(grad, 0)), 0
        means, errors = [], []
        for step in range(grad.shape[1]):
            own = _matrices(grad, step) + error
            if step < start:
                means.append(own.mean(axis=0))
                errors.append(error[0])
                continue
            mean = np.zeros_like(own[0])
            for _ in range(settings.get("num_iters_per_step", 1)):
                if turn % 2 == 0:
                    p = _orthonormal(p)
                    each = own.swapaxes(1, 2) @ p
                    q = each.mean(axis=0)
                    own, mean = own - p @ each.swapaxes(1, 2), mean + p @ q.T
                else:
                    q = _orthonormal(q)
                    each = own @ q
                    p = each.mean(axis=0)
                    own, mean = own - each @ q.T, mean + p @ q.T
                turn += 1
            error = own
            means.append(mean)
            errors.append(error[0])
        actual[f"agg/{name}"] = _rows(means, shape)
        actual[f"err/{name}"] = _rows(_after(errors), shape)
    return actual


def _torch(
    settings: Settings, recorded: Arrays, grads: Arrays, dtype: type
) -> dict[str, np.ndarray]:
    rank, start = settings.get("matrix_approximation_rank", 1), settings["start_powerSGD_iter"]
    warm, feedback = settings.get("warm_start", True), settings.get("use_error_feedback", True)
    saving = settings.get("min_compression_rate", 2)

    def worth(shape: tuple[int, ...]) -> bool:
        rows, columns = shape[0], int(np.prod(shape[1:]))
        return len(shape) > 1 and (rows + columns) * rank * saving < rows * columns

    bucket = list(reversed(list(grads)))
    sent = [name for name in bucket if worth(grads[name].shape[2:])]
    draws = random_order(recorded, sent, {"param/" + name: grads[name][0, 0] for name in grads})
    number = 1 + max(place for place, _ in draws.values())
    actual, errors = {}, {}
    for name, grad in grads.items():
        error, means, kept, q = np.zeros_like(grad[:, 0]), [], [], None
        for step in range(grad.shape[1]):
            own = grad[:, step] + error
            mean = own.mean(axis=0)
            if step >= start and name in sent:
                if q is None or not warm:
                    place, index = draws[name]
                    drawn = 0 if warm else (step - start) * number
                    q = np.asarray(recorded[f"randn/{drawn + place}"][index], dtype)
                mean, q = _pair(own.reshape(len(own), len(own[0]), -1), q)
                mean = mean.reshape(own[0].shape)
            if step >= start and feedback:
                error = own - mean
            means.append(mean)
            kept.append(error[0].ravel())
        actual[f"agg/{name}"] = np.stack(means)
        errors[name] = _after(kept)
    if "err_flat" in recorded:
        actual["err_flat"] = np.stack(
            [
                np.concatenate([errors[name][row] for name in bucket])
                for row in range(len(ERRORS_AFTER))
            ]
        )
    return actual


_RUNS: dict[str, Callable[[Settings, Arrays, Arrays, type], dict[str, np.ndarray]]] = {
    "epfml_paper_rankk": _paper,
    "epfml_powersgd": _package,
    "torch_powersgd_hook": _torch,
}
