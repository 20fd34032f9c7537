"""Recorded runs of error feedback on least squares, recomputed: EF14, EF21 and variants, EControl."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.parallel.exchange import compressors
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.error_feedback import EF14, EF21, Compressed, EControl
from tests.optim.golden_common import Settings
from tests.parallel.exchange import over

Arrays = Mapping[str, np.ndarray]
AXES = ("data",)
OBJECTIVES = tuple(
    "f_i = |A_i x - b_i|^2/(2 m) + la |x|^2" + noise
    for noise in ("", ", plus stored gradient noise[t, i]")
)


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our iterates, estimates and errors under the keys of the record."""
    del inputs
    settings = Settings(entry["hyper"])
    settings.assume("objective", *OBJECTIVES, why="`_gradient` is for another objective")
    # These settings must agree with the recorded arrays.
    shape = tuple(settings.take(name) for name in ("workers", "rows", "dimension"))
    settings["workers"] = shape[0]
    if recorded["A"].shape != shape:
        raise ValueError(f"A has the shape {recorded['A'].shape}, but the settings say {shape}")
    if "noise" in recorded and (settings.take("sigma") == 0) == recorded["noise"].any():
        raise ValueError("sigma must be 0 if all recorded noise is 0, and must not be 0 otherwise")
    source, _, method = entry["implementation"].partition("_")
    run = {"author": _authors, "efface": _federated}[source]
    return run(method, settings, recorded)


def _exchange(method: str, settings: Settings, **common: Any) -> Compressed:
    workers = settings.take("workers")
    if method == "ef14":
        return EF14(AXES, workers, **common)
    if method in ("ef21", "ef21plus"):
        return EF21(AXES, workers, **common, plus=method == "ef21plus")
    if method == "ef21momentum":
        return EF21(AXES, workers, **common, momentum=settings.take("momentum", 0.9))
    if method == "econtrol":
        return EControl(AXES, workers, **common, eta=settings.take("eta"))
    raise ValueError(f"method={method!r} must be ef14, ef21, ef21plus, ef21momentum or econtrol")


def _compressor(settings: Settings) -> compressors.Compressor:
    """Returns the compressor of the settings, by default top-k."""
    name = str(settings.take("compressor", "topk")).lower()
    count, ratio = settings.take("k"), settings.take("sparsity")
    if "sign" in name:
        return compressors.Sign()
    if name in ("identity", "none", "compressor"):
        return compressors.Identity()
    if name != "topk":
        raise NotImplementedError(f"compressor={name!r} must be topk, sign or identity")
    return compressors.TopK(count=count) if ratio is None else compressors.TopK(ratio)


def _gradient(A: np.ndarray, b: np.ndarray, x: np.ndarray, regulariser: float) -> np.ndarray:
    """Returns every worker's gradient of |A x - b|^2 / (2 rows) + regulariser |x|^2, (workers, n)."""
    # Use NumPy: in float32 with a large eta, the order of additions in a compiled program would
    # change the iterates by up to 4e-6.
    rows = A.shape[1]
    residues = np.einsum("wmn,n->wm", A, x) - b
    return np.einsum("wmn,wm->wn", A, residues) / x.dtype.type(rows) + 2 * regulariser * x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _exchanged(
    exchange: Compressed, sizes: tuple[int, ...], gradients: jax.Array, residual: Residual
) -> tuple[jax.Array, Residual]:
    """Returns the exchange's result for the mean of `gradients`, (workers, n), and the residuals."""

    def reduce(gradient: jax.Array, residual: Residual) -> tuple[jax.Array, Residual]:
        # The names of leaves sort in the order of the recorded tensors.
        ends = np.cumsum(sizes)[:-1].tolist()
        tree = {f"{i:03}": part for i, part in enumerate(jnp.split(gradient, ends))}
        sums, residual = exchange.reduce(tree, residual)
        return jnp.concatenate([sums[name] for name in sorted(sums)]), residual

    shares = gradients / exchange.num_devices
    sums, residual = jax.vmap(reduce, axis_name=AXES[0])(shares, residual)
    return sums[0], residual


def _start(exchange: Compressed, sizes: tuple[int, ...], dtype: Any) -> Residual:
    params = {f"{i:03}": jnp.zeros(size, dtype) for i, size in enumerate(sizes)}
    return over.start(exchange, params)


def _error(exchange: Compressed, residual: Residual, size: int) -> np.ndarray:
    """Returns every worker's error, (workers, size); zeros for a method without errors."""
    if residual.device and "error" in residual.device:
        return np.concatenate(residual.device["error"], axis=-1) * exchange.num_devices
    return np.zeros((exchange.num_devices, size))


def _federated(method: str, settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Repeats recorded runs with x <- x - lr * (mean of the communicators' results)."""
    lr, iterations = settings.take("lr"), settings.take("iterations")
    regulariser, sizes = settings.take("regulariser"), tuple(settings.take("tensor_sizes"))
    exchange = _exchange(
        method,
        settings,
        compressor=_compressor(settings),
        layerwise=settings.take("layerwise"),
        whole_start=not settings.take("is_init_compressed"),
    )
    settings.check_empty(f"efface_{method}")
    actual = {}
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            A, b, noise, x = (recorded[name].astype(dtype) for name in ("A", "b", "noise", "x0"))
            residual = _start(exchange, sizes, dtype)
            points, estimates, errors = [x], [], []
            for step in range(iterations):
                gradients = _gradient(A, b, x, regulariser) + noise[step]
                estimate, residual = _exchanged(exchange.at(step), sizes, gradients, residual)
                estimate = np.asarray(estimate)
                x = x - lr * estimate
                points.append(x)
                estimates.append(estimate)
                errors.append(_error(exchange, residual, len(x)))
        bits = dtype[-2:]
        actual |= {
            f"p{bits}": np.stack(points),
            f"estimate{bits}": np.stack(estimates),
            f"error{bits}": np.stack(errors),
        }
    return {name: values for name, values in actual.items() if name in recorded}


def _authors(method: str, settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Repeats the authors' float64 runs.

    In these runs, EF14 compresses the learning rate times the gradient, and the other methods send
    the first gradient uncompressed.
    """
    lr, iterations = settings.take("stepsize"), settings.take("iterations")
    regulariser, size = settings.take("regulariser"), len(recorded["x0"])
    exchange = _exchange(
        method, settings, compressor=_compressor(settings), whole_start=method != "ef14"
    )
    settings.check_empty(f"author_{method}")
    with jax.enable_x64(True):
        A, b, x = (recorded[name] for name in ("A", "b", "x0"))
        residual, points = _start(exchange, (size,), "float64"), [x]
        for step in range(iterations):
            gradients = _gradient(A, b, x, regulariser)
            if method == "ef14":
                change, residual = _exchanged(exchange.at(step), (size,), lr * gradients, residual)
            else:
                change, residual = _exchanged(exchange.at(step), (size,), gradients, residual)
                change = lr * change
            x = x - np.asarray(change)
            points.append(x)
    points = np.stack(points)
    residues = np.einsum("wmn,tn->wtm", A, points) - b[:, None]
    # The recorded loss counts the data term of the objective twice.
    loss = (residues**2).sum((0, 2)) / (len(A) * A.shape[1]) + regulariser * (points**2).sum(1)
    means = np.stack([_gradient(A, b, x, regulariser).mean(0) for x in points])
    return {"x": points, "loss": loss, "grad_norm_squared": (means**2).sum(1)}
