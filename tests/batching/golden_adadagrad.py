"""Recomputes recorded tests of AdAdaGrad: statistics, batch sizes and trajectories."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.batching import variance
from lamb_tpu.batching.rules import Augmented, InnerProductTest, NormTest
from lamb_tpu.batching.rules.base import Bounded
from tests.optim.golden_common import Settings

Arrays = Mapping[str, np.ndarray]
Statistics = dict[str, float]
# The recorded tests have no largest batch, so use a bound that no test reaches.
UNLIMITED = {"granularity": 1, "upper": 2**40}


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our statistics and batch sizes under the recorded keys."""
    del inputs
    settings = Settings(entry["hyper"])
    return (_trajectory if "test" in settings else _single)(settings, recorded)


def _statistics(parts: list[Any], law: str, per_tensor: bool) -> Statistics:
    """Returns statistics of per-example gradients of several workers or microbatches."""
    actual = _measure(parts, law, per_tensor)
    return {name: float(value) for name, value in actual.items()}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _measure(parts: list[Any], law: str, per_tensor: bool) -> dict[str, jax.Array]:
    mean = jax.tree.map(lambda *leaves: jnp.concatenate(leaves).mean(axis=0), *parts)
    totals = [variance.sums(part, mean, per_tensor) for part in parts]
    return variance.statistics(jax.tree.map(lambda *terms: sum(terms), *totals), law)


def _orthogonality(nu: float, **bounds: Any) -> Augmented:
    """Returns the orthogonality test alone, for statistics with an inner-product variance of 0."""
    return Augmented(theta=1.0, nu=nu, **bounds)


def _single(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Recomputes one measurement, and the batch sizes of each test for several thresholds."""
    workers, rows = settings.take("workers"), settings.take("batch_per_worker")
    accumulation, batch = settings.take("accumulation"), settings.take("current_global_batch")
    if not settings.take("noise") > 0:
        raise NotImplementedError("noise must be above 0, because the tests need a variance")
    settings.legend("hypers")
    settings.check_empty("author_adadagrad")
    gradients = {
        name: jnp.asarray(leaf) for name, leaf in recorded.items() if name.startswith("psg/")
    }
    if workers * accumulation > 1:
        parts = [
            jax.tree.map(lambda leaf, k=part: leaf[k], gradients)
            for part in range(workers * accumulation)
        ]
    else:
        parts = [gradients]
    if any(leaf.shape[0] != rows for part in parts for leaf in part.values()):
        raise ValueError(f"every array of gradients must have {rows} rows, one per example")
    published = _statistics(parts, "parts", per_tensor=True)
    whole = _statistics(parts, "parts", per_tensor=False)
    pooled = _statistics(parts, "pooled", per_tensor=False)

    eta = recorded["eta"]
    actual = {
        "eta": eta,
        "norm_batch": _batches(
            [NormTest(eta=float(x), **UNLIMITED) for x in eta], batch, published
        ),
    }
    if accumulation > 1:  # only the norm test has recorded statistics for each setting
        return actual | {
            "var_one_norm": np.full(eta.shape, published[variance.VARIANCE]),
            "grad_norm_squared": np.full(eta.shape, published[variance.GRAD_SQ]),
        }
    theta, nu = recorded["theta"].tolist(), recorded["nu"].tolist()
    across = published | {variance.INNER_PRODUCT: 0.0}
    return actual | {
        "theta": recorded["theta"],
        "nu": recorded["nu"],
        "ip_batch": _batches(
            [InnerProductTest(theta=x, **UNLIMITED) for x in theta], batch, published
        ),
        "orth_batch": _batches([_orthogonality(x, **UNLIMITED) for x in nu], batch, across),
        "augmented_batch": _batches(
            [Augmented(theta=x, nu=y, **UNLIMITED) for x, y in zip(theta, nu, strict=True)],
            batch,
            published,
        ),
        "var_one_norm": np.asarray(published[variance.VARIANCE]),
        "var_inner_product": np.asarray(published[variance.INNER_PRODUCT]),
        "var_orthogonal": np.asarray(published[variance.ORTHOGONAL]),
        "grad_norm_squared": np.asarray(published[variance.GRAD_SQ]),
        "whole_vector/var_inner_product": np.asarray(whole[variance.INNER_PRODUCT]),
        "whole_vector/var_orthogonal": np.asarray(whole[variance.ORTHOGONAL]),
        "pooled/var_one_norm": np.asarray(pooled[variance.VARIANCE]),
    }


def _batches(rules: list[Bounded], batch: int, statistics: Statistics) -> np.ndarray:
    return np.array([rule.next_batch(batch, statistics, 0) for rule in rules])


def _rule(settings: Settings) -> tuple[type[Bounded], dict[str, float], tuple[str, str | None]]:
    """Returns the rule of a test, its thresholds, and our names for the recorded var and var2."""
    test = settings.take("test")
    if test == "norm":
        return NormTest, {"eta": settings.take("eta")}, (variance.VARIANCE, None)
    if test == "ip":
        return InnerProductTest, {"theta": settings.take("theta")}, (variance.INNER_PRODUCT, None)
    if test == "ip+orth":
        thresholds = {"theta": settings.take("theta"), "nu": settings.take("nu")}
        return Augmented, thresholds, (variance.INNER_PRODUCT, variance.ORTHOGONAL)
    raise ValueError(f"test={test!r} is unknown; use norm, ip or ip+orth")


def _trajectory(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Trains with a test before each update; the test uses the batch and the parameters of the update."""
    kind, thresholds, (first, second) = _rule(settings)
    tx = _optimizer(settings)
    batch, workers = settings.take("initial_batch"), settings.take("workers")
    interval, largest = settings.take("test_interval"), settings.take("max_batch")
    samples = settings.take("samples")
    for name in ("arrays", "model", "data", "rounding"):
        settings.legend(name)
    settings.check_empty("author_adadagrad")
    free = kind(**thresholds, **UNLIMITED, interval=interval)
    bounded = kind(**thresholds, granularity=workers, upper=largest)
    params = {
        key.removeprefix("p32/"): jnp.asarray(value[0])
        for key, value in recorded.items()
        if key.startswith("p32/")
    }
    state, start, rows, trajectory = tx.init(params), 0, [], [params]
    for step in range(len(recorded["batch"])):
        places = (start + np.arange(batch)) % samples
        x, y = recorded["x"][places], recorded["y"][places]
        losses, gradients = _per_example(params, x, y)
        row = {"batch": batch, "start": start, "loss": float(losses.mean())}
        start = (start + batch) % samples
        row |= dict.fromkeys(("var", "var2", "g2", "returned"), -1)
        if free.due(step) and batch < largest:
            parts = [
                jax.tree.map(
                    lambda leaf, k=k, b=batch // workers: leaf[k * b : (k + 1) * b], gradients
                )
                for k in range(workers)
            ]
            actual = _statistics(parts, "parts", per_tensor=True)
            row |= {"var": actual[first], "g2": actual[variance.GRAD_SQ]}
            row |= {"var2": actual[second]} if second else {}
            row["returned"] = free.next_batch(batch, actual, start)
            batch = bounded.next_batch(batch, actual, start)
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), gradients)
        updates, state = tx.update(mean, state, params)
        params = optax.apply_updates(params, updates)
        rows.append(row)
        trajectory.append(params)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]} | {
        f"p32/{name}": np.stack([params[name] for params in trajectory]) for name in params
    }


def _loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cross-entropy of one example; kernels are [out, in]."""
    hidden = jnp.tanh(params["fc1.weight"] @ x + params["fc1.bias"])
    logits = params["fc2.weight"] @ hidden + params["fc2.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


_per_example = jax.jit(jax.vmap(jax.value_and_grad(_loss), in_axes=(None, 0, 0)))


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    name, rate = settings.take("optimizer"), settings.take("lr")
    if name == "sgd":
        return optax.sgd(rate)
    if name == "adagrad":  # PyTorch's eps of 1e-10, outside the root, is below the rounding error
        return optax.chain(optax.scale_by_rss(0.0, eps=0.0), optax.scale(-rate))
    if name == "adam":
        return optax.adam(rate)
    if name == "adagradnorm":
        return _published_adagradnorm(rate)
    raise ValueError(f"optimizer={name!r} is unknown; use sgd, adagrad, adam or adagradnorm")


def _published_adagradnorm(rate: float) -> optax.GradientTransformation:
    """Repeats `adagradnorm.py`: each row of a matrix has one sum of squares.

    These sums also leak into the sums of the following vector, so this is not AdaGrad-Norm.
    """

    def init(params: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e-2), params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        new, squares = {}, None
        for name, grad in sorted(grads.items(), key=_torch_order):
            if grad.ndim > 1:
                squares = jnp.sum(jnp.square(grad.reshape(grad.shape[0], -1)), axis=1)
                new[name] = state[name] + squares.reshape(-1, *[1] * (grad.ndim - 1))
                continue
            new[name] = state[name] + jnp.square(grad)
            if squares is not None and squares.size % grad.size == 0:
                new[name] += squares.reshape(grad.size, -1).mean(axis=1)
        step = {n: -rate * grad / (jnp.sqrt(new[n]) + 1e-10) for n, grad in grads.items()}
        return step, new

    return optax.GradientTransformation(init, update)


def _torch_order(item: tuple[str, Any]) -> tuple[str, bool]:
    """Orders a layer's weight before its bias, like PyTorch."""
    layer, _, kind = item[0].rpartition(".")
    return layer, kind == "bias"
