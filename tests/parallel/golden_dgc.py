"""Recorded runs of Deep Gradient Compression, recomputed: parameters, sent values, residuals."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.dgc import DGC, Sampling
from tests.optim.golden_common import Settings
from tests.parallel.exchange import over

Arrays = Mapping[str, np.ndarray]
AXES = ("data",)
# Arguments of the authors' compressor with the only values that our exchange supports.
FIXED = {
    "strided_sample": True,
    "compress_upper_bound": 1.3,
    "compress_lower_bound": 0.8,
    "max_adaptation_iters": 10,
    "fp16_values": False,
}
# Masks of the update that is being traced, in the order of the leaves.
_masks: list[jax.Array] = []


@dataclasses.dataclass(frozen=True)
class Recorded(DGC):
    """DGC that takes the indices of first samples from `starts`, and stores its masks in `_masks`.

    Attributes:
      starts: pairs (index of a leaf, indices of its first samples as (updates, workers)).
    """

    starts: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()

    def sample_start(self, leaf: int, sampling: Sampling, count: jax.Array) -> jax.Array:
        return jnp.asarray(dict(self.starts)[leaf])[count, lax.axis_index(AXES)]

    def masks(self, magnitudes: list[jax.Array], count: jax.Array) -> list[jax.Array]:
        _masks[:] = super().masks(magnitudes, count)
        return list(_masks)


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our arrays under the keys of the record."""
    settings = Settings(entry["hyper"])
    settings.legend("sent_bits")
    settings.assume("gradients", "wgrad/<name>[worker, t]", "", why="it names other gradients")
    # The recorded positions of samples replace those from a seed.
    if not isinstance(settings.take("seed"), int | None):
        raise NotImplementedError("seed must be a whole number or None")
    settings.same_numbers("int32_indices")
    for name, default in FIXED.items():
        if settings.take(name, default) != default:
            raise NotImplementedError(
                f"{name} must be {default!r}, because the exchange has no option for it"
            )
    world, compressed = settings.take("world"), settings.take("compressed")
    ratio, clip = settings.take("compress_ratio"), settings.take("clip")
    if not isinstance(clip, (int, float, type(None))):
        raise NotImplementedError(f"clip={clip!r} must be a number or None in the exchange")
    stages = max(settings.take("warmup_epochs", -1), 0)
    coeff, epochs = settings.take("warmup_coeff"), settings.take("epochs")
    sgd = Settings(settings.take("sgd"))
    exchange = Recorded(
        AXES,
        world,
        ratio if ratio <= 1 else 1 / ratio,
        momentum=settings.take("momentum"),
        nesterov=settings.take("nesterov"),
        factor_masking=settings.take("momentum_masking"),
        clip_norm=clip,
        # The authors sample at least 1 %.
        sample_ratio=min(max(settings.take("sample_ratio", 0.01), 0.01), 1.0),
        resample=settings.take("resample", True),
        # The warm-up has one update per epoch, so that the argument of `at` is an epoch.
        warmup_steps=stages,
        warmup_stages=max(stages, 1),
        warmup_coeff=(tuple(coeff) if isinstance(coeff, list) else coeff) if stages else None,
    )
    decay = _decay(sgd)
    settings.check_empty(entry["implementation"])

    names = list(entry["tree"])
    params = {name: jnp.asarray(inputs["param/" + name]) for name in names}
    shapes = {name: leaf.shape for name, leaf in params.items()}
    # The exchange sends leaves with two axes or more as sparse values, so give compressed leaves two
    # axes and the other leaves one.
    seen = {
        name: (params[name].size, 1) if name in compressed else (params[name].size,)
        for name in names
    }
    sparse = [name for name in sorted(names) if name in compressed]
    residual = over.start(exchange, {name: jnp.zeros(shape) for name, shape in seen.items()})
    rates = recorded["lr"]
    epochs = _epochs(exchange, epochs, recorded["compress_ratio"])
    ratios = np.array([exchange.at(epoch).ratio for epoch in epochs])
    decay_state = decay.init(params)
    sizes = {name: params[name].size for name in names if name in compressed}
    starts = _starts(exchange, ratios, sizes, recorded["sample_start_log"].tolist())
    exchange = dataclasses.replace(exchange, starts=starts)
    trajectory, sent = [params], {name: [] for name in sparse}
    for step in range(len(rates)):
        now = dataclasses.replace(exchange, ratio=float(ratios[step]))
        grads = {
            name: jnp.asarray(inputs["wgrad/" + name][:world, step]).reshape(world, *seen[name])
            for name in names
        }
        sums, residual, masks = _exchanged(now, grads, residual)
        extra, decay_state = decay.update(params, decay_state, params)
        params = {
            name: params[name]
            - jnp.float32(rates[step]) * (extra[name] + sums[name].reshape(shapes[name]))
            for name in names
        }
        trajectory.append(params)
        for place, name in enumerate(sparse):
            bits = -np.ones(params[name].size, np.int8)
            if masks:
                rows = np.asarray(masks[place])  # (workers, n)
                bits = (rows << np.arange(world)[:, None]).sum(0).astype(np.int8)
            sent[name].append(bits)
    return _under_keys(
        recorded,
        trajectory,
        sent,
        residual,
        sparse,
        world,
        {"lr": rates, "compress_ratio": ratios, "sample_start_log": recorded["sample_start_log"]},
    )


def _decay(sgd: Settings) -> optax.GradientTransformation:
    """Returns the weight decay of the authors' SGD, which has a separate momentum for the decay."""
    sgd.take("lr")
    momentum, nesterov = sgd.take("momentum", 0.0), sgd.take("nesterov", False)
    weight = optax.scale(sgd.take("weight_decay", 0.0))
    dampening = sgd.take("dampening", 0.0)
    sgd.check_empty("DGCSGD")
    if not momentum:
        return weight
    if dampening:
        raise NotImplementedError("dampening must be 0, because optax.trace has no option for it")
    return optax.chain(weight, optax.trace(momentum, nesterov))


def _epochs(exchange: DGC, epochs: Any, ratios: np.ndarray) -> list[int]:
    """Returns the epoch of each update, counted from 0.

    Args:
      exchange: an exchange with one update per epoch of the warm-up.
      epochs: a list with the epoch of each update. If it is not a list, the epochs are determined
        from the recorded ratios.
      ratios: the recorded ratio of each update. If neither the current nor a later epoch has this
        ratio, the epoch does not advance, so the test fails.
    """
    if isinstance(epochs, list):
        if len(epochs) != len(ratios):
            raise ValueError(f"epochs has {len(epochs)} items, but there are {len(ratios)} updates")
        return epochs
    actual, epoch = [], 0
    for ratio in ratios:
        later = range(epoch, exchange.warmup_steps + 1)
        epoch = next((e for e in later if math.isclose(exchange.at(e).ratio, ratio)), epoch)
        actual.append(epoch)
    return actual


def _starts(
    exchange: DGC, ratios: np.ndarray, sizes: Mapping[str, int], log: list[int]
) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
    """Returns the logged first samples of each matrix with a sampled threshold, see `Recorded.starts`.

    The log of an update lists one worker after the other, and for each worker the matrices in the
    order of `sizes`.
    """
    actual = {name: np.zeros((len(ratios), exchange.num_devices), int) for name in sizes}
    draws = iter(log)
    for step, ratio in enumerate(ratios.tolist()):
        now = dataclasses.replace(exchange, ratio=ratio)
        for worker in range(exchange.num_devices):
            for name, size in sizes.items():
                if ratio < 1 and now.sampling(size).stride > 1:
                    actual[name][step, worker] = next(draws)
    if next(draws, None) is not None:
        raise ValueError("sample_start_log has more starts of samples than the run draws")
    return tuple(
        (sorted(sizes).index(name), tuple(map(tuple, starts.tolist())))
        for name, starts in actual.items()
    )


@functools.partial(jax.jit, static_argnums=0)
def _exchanged(
    exchange: Recorded, grads: dict[str, jax.Array], residual: Residual
) -> tuple[dict[str, jax.Array], Residual, list[jax.Array]]:
    """Returns the exchange's result for the mean gradient, and the workers' residuals and masks."""

    def reduce(grads: Any, residual: Residual) -> Any:
        _masks.clear()
        actual = exchange.reduce(grads, residual)
        return *actual, list(_masks)

    shares = jax.tree.map(lambda leaf: leaf / exchange.num_devices, grads)
    sums, residual, masks = jax.vmap(reduce, axis_name=AXES[0])(shares, residual)
    return jax.tree.map(lambda leaf: leaf[0], sums), residual, masks


def _under_keys(
    recorded: Arrays,
    trajectory: list[dict[str, jax.Array]],
    sent: Mapping[str, list[np.ndarray]],
    residual: Residual,
    sparse: list[str],
    world: int,
    given: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Returns our arrays by the keys of the record; residuals are in units of a worker's gradient."""
    actual = dict(given)
    dense = [name for name in sorted(trajectory[0]) if name not in sparse]
    for name, leaf in trajectory[0].items():
        actual["p32/" + name] = np.stack([params[name] for params in trajectory])
        if name in sent:
            actual["sent_bits/" + name] = np.stack(sent[name])
        for worker in range(world):
            if name in sparse:
                place = sparse.index(name)
                kept = residual.device["momentum"][place], residual.device["accumulated"][place]
                kept = tuple(world * part[worker].reshape(leaf.shape) for part in kept)
            else:
                momentum = residual.whole["momentum"][dense.index(name)][worker]
                kept = momentum.reshape(leaf.shape), jnp.zeros(leaf.shape)
            actual[f"momentum_w{worker}/{name}"], actual[f"velocity_w{worker}/{name}"] = map(
                np.asarray, kept
            )
    return {key: values for key, values in actual.items() if key in recorded}
