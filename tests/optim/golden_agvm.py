"""Reproduces recorded runs of AGVM's hook with `optim.agvm`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from tests.optim.golden_common import Settings

Arrays = Mapping[str, np.ndarray]


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our parameters, factors and measurements under the recorded keys."""
    del inputs
    settings = Settings(entry["hyper"])
    workers, steps = settings.take("workers"), settings.take("steps")
    hook = Settings(settings.take("hook"))
    modules = [f"^{name}/" for name in settings.take("modules")]
    settings.legend("arrays")
    inner, second_moment, b2, eps = _inner(settings)
    settings.check_empty(entry["implementation"])

    start, interval = hook.take("lr_update_start_iter", 500), hook.take("lr_update_interval", 5)
    stop = hook.take("lr_update_stop_iter", -1)
    stop = stop if stop > start else None
    use_adam, static = hook.take("use_adam", False), hook.take("static_lr", False)
    clip, clip_range = hook.take("grad_clip"), hook.take("grad_clip_iter_range")
    tx = optim.agvm(
        inner,
        modules,
        interval,
        start,
        stop,
        hook.take("momentum", 0.97),
        second_moment=second_moment if use_adam else None,
        b2=b2,
        eps_root=eps,
    )
    hook.same_numbers("debug_mode")  # the hook only prints
    if hook.take("warmup_iters", 0) > start:
        raise NotImplementedError("lr_update_start_iter must be at least warmup_iters")
    hook.check_empty(entry["implementation"])
    if use_adam and start == 0:
        raise NotImplementedError(
            "lr_update_start_iter must be above 0 with use_adam: second moments do not exist yet"
        )

    params = {
        key.removeprefix("p32/"): jnp.asarray(value[0])
        for key, value in recorded.items()
        if key.startswith("p32/")
    }
    grads = {name: jnp.asarray(recorded["grad/" + name]) for name in params}

    @jax.jit
    def update(step: jax.Array, due: jax.Array, state: Any, params: Any) -> Any:
        each = {name: leaf[step] for name, leaf in grads.items()}
        halves, gradient = _halves(each, workers, due)
        if clip is not None:
            low, high = clip_range or (0, steps)
            gradient = _clipped(gradient, clip, (low <= step) & (step <= high))
        updates, state = tx.update(gradient, state, params, halves=None if static else halves)
        return optax.apply_updates(params, updates), state

    state, trajectory, rows = tx.init(params), [params], []
    for step in range(steps):
        inside = start <= step and (stop is None or step <= stop)
        due = inside and step % interval == 0 and not static
        params, state = update(step, due, state, params)
        trajectory.append(params)
        rows.append((state.factors, state.targets * due, due))
    scale, new_scale, updated = (np.array(column) for column in zip(*rows, strict=True))
    return {"scale": scale, "new_scale": new_scale, "updated": updated} | {
        f"p32/{name}": np.stack([params[name] for params in trajectory]) for name in params
    }


def _halves(each: dict[str, jax.Array], workers: int, due: jax.Array) -> tuple[Any, Any]:
    """Returns the mean of each half divided by the number of workers, and the applied gradient.

    The hook divides by the integer part of half the square of the number of workers, so with an odd
    number of workers the gradient of an update that measures is not the mean.
    """
    middle, divisor = workers // 2, workers * workers // 2
    a = {name: leaf[:middle].sum(axis=0) / divisor for name, leaf in each.items()}
    b = {name: leaf[middle:].sum(axis=0) / divisor for name, leaf in each.items()}
    gradient = {
        name: jnp.where(due, middle * a[name] + (workers - middle) * b[name], leaf.mean(axis=0))
        for name, leaf in each.items()
    }
    return (a, b), gradient


def _clipped(grads: dict[str, jax.Array], clip: Mapping[str, Any], on: jax.Array) -> Any:
    """Clips like PyTorch, which adds 1e-6 to the norm."""
    if clip["norm_type"] != 2 or set(clip) != {"max_norm", "norm_type"}:
        raise ValueError(f"grad_clip={clip!r} must have a max_norm and norm_type=2")
    norm = optax.global_norm(grads)
    scale = jnp.where(on, jnp.minimum(clip["max_norm"] / (norm + 1e-6), 1.0), 1.0)
    return {name: grad * scale for name, grad in grads.items()}


def _inner(settings: Settings) -> tuple[optax.GradientTransformation, Any, float, float]:
    """Returns PyTorch's optimizer in Optax, a function that reads its second moments, b2 and eps."""
    kind, arguments = settings.take("optimizer"), Settings(settings.take("optimizer_kwargs"))
    rate, (b1, b2) = arguments.take("lr"), arguments.take("betas", (0.9, 0.999))
    eps = arguments.take("eps", 1e-8)
    if kind == "SGD":
        momentum = arguments.take("momentum", 0.0)
        tx = optax.chain(
            optax.add_decayed_weights(arguments.take("weight_decay", 0.0)),
            optax.trace(momentum, arguments.take("nesterov", False)),
            optax.scale(-rate),
        )
    elif kind == "AdamW":
        # LAMB without its ratio, with bias correction in full precision.
        tx = optim.lamb(
            rate, b1, b2, eps, arguments.take("weight_decay", 1e-2), rules=[("", {"adapt": False})]
        )
    elif kind == "Adam":
        tx = optim.add_l2(
            optim.lamb(rate, b1, b2, eps, 0.0, rules=[("", {"adapt": False})]),
            arguments.take("weight_decay", 0.0),
        )
    else:
        raise ValueError(f"optimizer={kind!r} is unknown; use SGD, AdamW or Adam")
    arguments.check_empty(kind)
    return tx, lambda state: state.nu, b2, eps
