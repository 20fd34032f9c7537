"""Recorded runs of Deep Gradient Compression, repeated: parameters, what is sent, what is kept."""

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
from tests.quick import jit

Arrays = Mapping[str, np.ndarray]
AXES = ("data",)
# Arguments of the authors' compressor whose value is fixed here, with that value.
FIXED = {
    "strided_sample": True,
    "compress_upper_bound": 1.3,
    "compress_lower_bound": 0.8,
    "max_adaptation_iters": 10,
    "fp16_values": False,
}
# The masks of the update that is being traced, in the order of the leaves.
_masks: list[jax.Array] = []


@dataclasses.dataclass(frozen=True)
class Recorded(DGC):
    """DGC with given starts of the samples, which also shows what it selects.

    Attributes:
      starts: pairs of a leaf and its starts, (updates, workers).
    """

    starts: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()

    def sample_start(self, leaf: int, sampling: Sampling, count: jax.Array) -> jax.Array:
        return jnp.asarray(dict(self.starts)[leaf])[count, lax.axis_index(AXES)]

    def masks(self, magnitudes: list[jax.Array], count: jax.Array) -> list[jax.Array]:
        _masks[:] = super().masks(magnitudes, count)
        return list(_masks)


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our arrays under the recorded keys."""
    settings = Settings(entry["hyper"])
    settings.legend("sent_bits")
    settings.assume("gradients", "wgrad/<name>[worker, t]", "", why="gradients are fed otherwise")
    # The starts that a seed draws are recorded.
    if not isinstance(settings.take("seed"), int | None):
        raise NotImplementedError("seed must be a whole number, or None")
    settings.same_numbers("int32_indices")
    for name, default in FIXED.items():
        if settings.take(name, default) != default:
            raise NotImplementedError(f"{name} is {default!r} in the exchange, and no option of it")
    world, compressed = settings.take("world"), settings.take("compressed")
    ratio, clip = settings.take("compress_ratio"), settings.take("clip")
    if not isinstance(clip, (int, float, type(None))):
        raise NotImplementedError(f"the exchange clips norms of leaves only, and clip is {clip!r}")
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
        # The authors take at least 1 %.
        sample_ratio=min(max(settings.take("sample_ratio", 0.01), 0.01), 1.0),
        resample=settings.take("resample", True),
        # Here an update is an epoch of the warm-up, so that `at` takes epochs.
        warmup_steps=stages,
        warmup_stages=max(stages, 1),
        warmup_coeff=(tuple(coeff) if isinstance(coeff, list) else coeff) if stages else None,
    )
    decay = _decay(sgd)
    settings.check_empty(entry["implementation"])

    names = list(entry["tree"])
    params = {name: jnp.asarray(inputs["param/" + name]) for name in names}
    shapes = {name: leaf.shape for name, leaf in params.items()}
    # The exchange sends what is not a vector as sparse values.
    seen = {
        name: (params[name].size, 1) if name in compressed else (params[name].size,)
        for name in names
    }
    sparse = [name for name in sorted(names) if name in compressed]
    residual = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (world, *leaf.shape)),
        exchange.init({name: jnp.zeros(shape) for name, shape in seen.items()}),
    )
    rates = recorded["lr"]
    ratios = np.array(
        [
            exchange.at(epoch).ratio
            for epoch in _epochs(exchange, epochs, recorded["compress_ratio"])
        ]
    )
    decay_state = decay.init(params)
    exchange = dataclasses.replace(
        exchange,
        starts=_starts(
            exchange,
            ratios,
            {name: params[name].size for name in names if name in compressed},
            recorded["sample_start_log"].tolist(),
        ),
    )
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
    """The weight decay of the authors' SGD, whose momentum is separate from the gradient's."""
    sgd.take("lr")
    momentum, nesterov = sgd.take("momentum", 0.0), sgd.take("nesterov", False)
    weight = optax.scale(sgd.take("weight_decay", 0.0))
    dampening = sgd.take("dampening", 0.0)
    sgd.check_empty("DGCSGD")
    if not momentum:
        return weight
    if dampening:
        raise NotImplementedError("dampening of the weight decay is no option of optax.trace")
    return optax.chain(weight, optax.trace(momentum, nesterov))


def _epochs(exchange: DGC, epochs: Any, ratios: np.ndarray) -> list[int]:
    """Returns the epoch of each update, counted from 0.

    Args:
      exchange: with one update for each epoch of the warm-up.
      epochs: the setting: a list of these epochs, or anything else, which does not say at which
        updates they begin; the recorded ratios show that.
      ratios: those that were recorded, one for each update. A ratio that no later epoch has leaves
        the epoch as it is, so that it differs from ours.
    """
    if isinstance(epochs, list):
        if len(epochs) != len(ratios):
            raise ValueError(f"{len(epochs)} epochs are given for {len(ratios)} updates")
        return epochs
    found, epoch = [], 0
    for ratio in ratios:
        later = range(epoch, exchange.warmup_steps + 1)
        epoch = next((e for e in later if math.isclose(exchange.at(e).ratio, ratio)), epoch)
        found.append(epoch)
    return found


def _starts(
    exchange: DGC, ratios: np.ndarray, sizes: Mapping[str, int], log: list[int]
) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
    """The logged starts of each matrix whose threshold is sampled, see `Recorded`.

    A worker draws for its matrices in the order of `sizes`, one worker after the other.
    """
    found = {name: np.zeros((len(ratios), exchange.num_devices), int) for name in sizes}
    draws = iter(log)
    for step, ratio in enumerate(ratios.tolist()):
        now = dataclasses.replace(exchange, ratio=ratio)
        for worker in range(exchange.num_devices):
            for name, size in sizes.items():
                if ratio < 1 and now.sampling(size).stride > 1:
                    found[name][step, worker] = next(draws)
    if next(draws, None) is not None:
        raise ValueError("more starts of samples are recorded than are drawn")
    return tuple(
        (sorted(sizes).index(name), tuple(map(tuple, starts.tolist())))
        for name, starts in found.items()
    )


@functools.partial(jit, static_argnums=0)
def _exchanged(
    exchange: Recorded, grads: dict[str, jax.Array], residual: Residual
) -> tuple[dict[str, jax.Array], Residual, list[jax.Array]]:
    """The mean gradient with its momentum, the workers' residuals, and their masks."""

    def reduce(grads: Any, residual: Residual) -> Any:
        _masks.clear()
        found = exchange.reduce(grads, residual)
        return *found, list(_masks)

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
    """Our arrays by their recorded keys; what a worker keeps is in units of its own gradient."""
    found = dict(given)
    dense = [name for name in sorted(trajectory[0]) if name not in sparse]
    for name, leaf in trajectory[0].items():
        found["p32/" + name] = np.stack([params[name] for params in trajectory])
        if name in sent:
            found["sent_bits/" + name] = np.stack(sent[name])
        for worker in range(world):
            if name in sparse:
                place = sparse.index(name)
                kept = residual.device["momentum"][place], residual.device["accumulated"][place]
                kept = tuple(world * part[worker].reshape(leaf.shape) for part in kept)
            else:
                momentum = residual.whole["momentum"][dense.index(name)][worker]
                kept = momentum.reshape(leaf.shape), jnp.zeros(leaf.shape)
            found[f"momentum_w{worker}/{name}"], found[f"velocity_w{worker}/{name}"] = map(
                np.asarray, kept
            )
    return {key: values for key, values in found.items() if key in recorded}
