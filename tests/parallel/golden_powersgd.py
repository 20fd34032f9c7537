"""Recorded runs of PowerSGD, recomputed with `lamb_tpu.parallel.exchange.powersgd`.

Recorded results are means over workers, so our sums are divided by the number of workers. The
workers are an axis of `jax.vmap`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from tests.optim.golden_common import Settings
from tests.parallel.exchange import over

Arrays = Mapping[str, np.ndarray]
FED = "wgrad/<name>[rank, t]"
BUCKET = "DDP bucket: reversed parameter order after the first iteration"
ERRORS_AFTER = (1, 2, 5, 10, 20)


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our means and errors under the keys of the record, and the record's inputs."""
    implementation = entry["implementation"]
    if implementation not in REPEATS:
        raise ValueError(f"implementation={implementation!r} must be a key of REPEATS")
    settings = Settings(entry["hyper"])
    if settings.take("gradients", FED) != FED:
        raise ValueError(f"gradients must be {FED!r}")
    return REPEATS[implementation](settings, recorded, inputs)


class Run:
    """Updates of several workers, and errors as the references define them.

    Attributes:
      exchange: the tested exchange.
      residual: our residual, with a leading axis of workers.
      means: the mean over workers of each update's results.
      errors: by name, the sum of a worker's gradients so far minus the sum of the means so far, for
        each worker. This is the error in the paper; `PowerSGD` defines errors differently.
    """

    def __init__(self, exchange: Any, grads: Mapping[str, np.ndarray]) -> None:
        """Prepares updates with the gradients `grads`, {name: (workers, updates, *shape)}."""
        self.exchange, self._grads = exchange, grads
        self._workers = next(iter(grads.values())).shape[0]
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for name, leaf in grads.items()
        }
        self.residual = over.start(exchange, shapes)
        self.means: list[dict[str, np.ndarray]] = []
        self.errors = {name: np.zeros_like(leaf[:, 0]) for name, leaf in grads.items()}
        self._reduce: dict[Any, Callable[..., Any]] = {}

    def set_whole(self, kind: str, values: Mapping[str, np.ndarray]) -> None:
        """Replaces factors in the residual, 'p' or 'q', by `values`.

        A value has the shape (side, rank) or (layers, side, rank).
        """
        held = self.residual.whole
        new = dict(held[kind])
        for name, value in values.items():
            given = jnp.broadcast_to(value, held[kind][name].shape)
            new[name] = given.astype(jnp.float32)
        self.residual = self.residual._replace(whole={**held, kind: new})

    def update(self, step: int) -> None:
        """Makes update `step`, and appends its results to `means`."""
        stage = self.exchange.at(step)
        if stage not in self._reduce:
            self._reduce[stage] = jax.jit(jax.vmap(stage.reduce, axis_name="workers"))
        grads = {name: jnp.asarray(leaf[:, step]) for name, leaf in self._grads.items()}
        sums, self.residual = self._reduce[stage](grads, self.residual)
        # The sums are equal for all workers.
        self.means.append(
            {name: np.asarray(leaf[0]) / np.float32(self._workers) for name, leaf in sums.items()}
        )

    def add_to_errors(self, step: int, names: Sequence[str]) -> None:
        """Adds the workers' gradients minus the means of update `step`, the last update, to `errors`."""
        for name in names:
            self.errors[name] = self.errors[name] + self._grads[name][:, step]
            self.errors[name] = self.errors[name] - self.means[-1][name]


def options(settings: Settings) -> dict[str, Any]:
    """Returns the arguments `axes` and `num_devices` of an exchange between a run's workers."""
    return {"axes": ("workers",), "num_devices": settings.take("world")}


def given(names: Sequence[str], inputs: Arrays, workers: int) -> dict[str, np.ndarray]:
    """Returns the gradients of the first workers: {name: (workers, updates, *shape)}."""
    return {name: inputs["wgrad/" + name][:workers] for name in names}


def _paper(settings: Settings, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Repeats `RankKReducer`, which compresses all matrices; a rank is at most a matrix's smaller side."""
    names, reuse = settings.take("tensors"), settings.take("reuse_query")
    exchange = PowerSGD(
        **options(settings), rank=settings.take("rank"), min_saving=0.0, warm_start=reuse
    )
    settings.check_empty("epfml_paper_rankk")
    run = Run(exchange, given(names, inputs, exchange.num_devices))
    matrices = list(run.residual.whole["q"])
    run.set_whole("q", {name: recorded["q0/" + name] for name in matrices})
    errors = []
    for step in range(_updates(recorded)):
        if not reuse:
            run.set_whole("q", {name: recorded["qall/" + name][step] for name in matrices})
        run.update(step)
        run.add_to_errors(step, matrices)
        errors.append({name: leaf[0] for name, leaf in run.errors.items()})
    return _inputs(recorded, ("q0/", "qall/")) | _found(run, errors)


def _package(settings: Settings, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Repeats the package's `PowerSGD`, which sends one factor per iteration."""
    settings.legend("saved")
    names = settings.take("tensors")
    # Without the wrapper, which lists what it compresses, the class compresses all inputs.
    wrapped = "compressed" in recorded
    exchange = PowerSGD(
        **options(settings),
        rank=settings.take("rank"),
        alternate=True,
        iterations=settings.take("num_iters_per_step", 1),
        start=settings.take("start_compressing_after_num_steps", 100),
        min_saving=settings.take("min_compression_rate", 2.0) if wrapped else 0.0,
    )
    settings.check_empty("epfml_powersgd")
    run = Run(exchange, given(names, inputs, exchange.num_devices))
    groups: dict[tuple[int, int], list[str]] = {}
    matrices = exchange.matrices({name: inputs["param/" + name] for name in names})
    by_name = {m.path: m for m in matrices}
    compressed = [name for name in names if name in by_name]
    for name in compressed:
        groups.setdefault((by_name[name].rows, by_name[name].columns), []).append(name)
    for side in "pq":
        run.set_whole(
            side,
            {
                name: recorded[f"{side}0/{index}"][place]
                for index, group in enumerate(groups.values())
                for place, name in enumerate(group)
            },
        )
    errors = []
    for step in range(_updates(recorded)):
        run.update(step)
        kept = {name: np.asarray(leaf[0]) for name, leaf in run.residual.device.items()}
        errors.append(
            {
                name: kept[name] if name in kept else np.zeros(run.means[0][name].shape, np.float32)
                for name in names
            }
        )
    actual = _inputs(recorded, ("p0/", "q0/")) | _found(run, errors)
    actual["groups"] = np.array(
        [f"{index}:{shape}:{len(group)}" for index, (shape, group) in enumerate(groups.items())]
    )
    return actual | ({"compressed": np.array(compressed)} if wrapped else {})


def _torch(settings: Settings, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Repeats PyTorch's hook, which also has errors for uncompressed leaves."""
    settings.assume("bucket_order", BUCKET, why="the bucket must be reversed")
    names, feedback = settings.take("tensors"), settings.take("use_error_feedback", True)
    warm, start = settings.take("warm_start", True), settings.take("start_powerSGD_iter", 1000)
    if not 0 <= settings.take("orthogonalization_epsilon", 0) <= 1e-7:
        raise NotImplementedError("orthogonalization_epsilon must be 0 to 1e-7 in the exchange")
    settings.same_numbers("batch_tensors_with_same_shape")
    exchange = PowerSGD(
        **options(settings),
        rank=settings.take("matrix_approximation_rank", 1),
        start=start,
        min_saving=settings.take("min_compression_rate", 2),
        warm_start=warm,
        error_feedback=feedback,
    )
    settings.check_empty("torch_powersgd_hook")
    run = Run(exchange, given(names, inputs, exchange.num_devices))
    # The bucket has the parameters in reverse order. The hook draws the factors Q in this order.
    bucket = list(reversed(names))
    matrices = [name for name in bucket if name in run.residual.whole["q"]]
    draws, errors, drawn = random_order(recorded, matrices, inputs), [], 0
    for step in range(_updates(recorded)):
        if step >= start and (not warm or step == start):
            run.set_whole(
                "q",
                {
                    name: recorded[f"randn/{drawn + place}"][index]
                    for name, (place, index) in draws.items()
                },
            )
            drawn += 1 + max(place for place, _ in draws.values())
        run.update(step)
        if feedback and step >= start:
            run.add_to_errors(step, names)
        errors.append(np.concatenate([run.errors[name][0].ravel() for name in bucket]))
    actual = _inputs(recorded, ("randn/",)) | _found(run, [])
    if "err_flat" in recorded:
        actual["err_flat"] = np.stack([errors[step - 1] for step in ERRORS_AFTER])
    return actual


def random_order(
    recorded: Arrays, matrices: Sequence[str], inputs: Arrays
) -> dict[str, tuple[int, int]]:
    """Returns for each matrix the index of the draw that contains its Q, and its index in this draw.

    One draw may contain the factors Q of all matrices of the same shape. Draws are counted per update.
    """
    actual: dict[str, tuple[int, int]] = {}
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name in matrices:
        shapes.setdefault(inputs["param/" + name].shape, []).append(name)
    place = 0
    batched = any(
        len(recorded[f"randn/{index}"]) > 1
        for index in range(len(shapes))
        if f"randn/{index}" in recorded
    )
    if not batched:
        return {name: (index, 0) for index, name in enumerate(matrices)}
    for group in shapes.values():
        actual |= {name: (place, index) for index, name in enumerate(group)}
        place += 1
    return actual


def _updates(recorded: Arrays) -> int:
    return len(next(value for key, value in recorded.items() if key.startswith("agg/")))


def _inputs(recorded: Arrays, prefixes: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {key: value for key, value in recorded.items() if key.startswith(prefixes)}


def _found(run: Run, errors: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    actual = {f"agg/{name}": np.stack([mean[name] for mean in run.means]) for name in run.means[0]}
    if errors:
        actual |= {
            f"err/{name}": np.stack([errors[step - 1][name] for step in ERRORS_AFTER])
            for name in errors[0]
        }
    return actual


REPEATS = {"epfml_paper_rankk": _paper, "epfml_powersgd": _package, "torch_powersgd_hook": _torch}
