"""Reproduces recorded runs of DeepSpeed's 1-bit optimizers and compressed all-reduce.

The axis of `jax.vmap` over which the exchange sums represents the workers.
"""

import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from lamb_tpu.optim.presets import preset
from lamb_tpu.optim.staged import Stage, Staged
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.onebit import OneBit
from tests.optim.golden_common import Settings, rate

Entry = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]

FED = "wgrad/<name>[:world]; averaged over ranks while local_gradients is False"
# Our field of a state -> its name in the records.
FIELDS = {
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "coefficient": "lamb_coeff_freeze",
    "scaling": "scaling_coeff",
    "factor": "last_factor",
}


def repeat(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our values for an entry of the family 'onebit' under the recorded keys."""
    name = entry["implementation"]
    if name == "compressed_allreduce":
        return _all_reduces(entry, recorded, inputs)
    if name not in OPTIMIZERS:
        raise ValueError(f"implementation={name!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    settings = Settings(entry["hyper"])
    world, names = settings.take("world"), settings.take("tensors")
    # Parameters with a mask form a separate group, which comes last in the buffer.
    mask = str(settings.get("exp_avg_mask")).partition(" ")[0]
    names = sorted(names, key=lambda name: name.startswith(f"{mask}/"))
    settings.assume("gradients", FED, why="it must equal FED")
    if name == "zero_one_adam" and world == 1:
        raise NotImplementedError(
            "with a single worker the reference discards every gradient between two changes of "
            "the second moments"
        )
    schedule = rate(Settings(entry["hyper"]))
    freeze_step = settings.get("freeze_step", 100_000)
    tx = OPTIMIZERS[name](settings)
    settings.check_empty(name)
    updates, unit = len(recorded[f"p32/{names[0]}"]) - 1, world * math.lcm(world, 8)
    length = sum(inputs[f"param/{name}"].size for name in names)
    if name == "onebit_lamb" and world > 1 and freeze_step < updates and length % unit:
        raise NotImplementedError(
            "the reference does not clear the padding of its buffer, and sends old values again"
        )
    exchange = _exchange(world, per_leaf=name != "onebit_lamb") if world > 1 else None
    return _trajectory(tx, exchange, world, names, recorded, inputs, schedule)


def _trajectory(
    tx: Staged,
    exchange: OneBit | None,
    world: int,
    names: list[str],
    recorded: Arrays,
    inputs: Arrays,
    schedule: optax.ScalarOrSchedule,
) -> dict[str, np.ndarray]:
    # JAX sorts the keys of a dict. An OrderedDict has the order of the reference's buffer, which
    # determines the chunk in which a value lies.
    start = OrderedDict((name, jnp.asarray(inputs[f"param/{name}"])) for name in names)
    grads = OrderedDict((name, jnp.asarray(inputs[f"wgrad/{name}"][:world])) for name in names)
    updates = len(recorded[f"p32/{names[0]}"]) - 1

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, 0), axis_name="workers")
    def update(
        stage: Stage, grads: Any, params: Any, state: Any, residual: Residual
    ) -> tuple[Any, Any, Residual]:
        share = jax.tree.map(lambda g: g / world, grads)
        if stage.resets and exchange:
            residual = exchange.reset(residual)
        if not stage.local:
            share = jax.lax.psum(share, "workers")
        if stage.reduces and exchange:
            message, apply = tx.message(share, state, params, stage=stage, num_devices=world)
            summed, residual = exchange.reduce(message, residual)
            steps, state = apply(summed)
        else:
            steps, state = tx.update(share, state, params, stage=stage, num_devices=world)
        return optax.apply_updates(params, steps), state, residual

    def of_each(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.stack([x] * world), tree)

    params, state = of_each(start), of_each(tx.init(start))
    residual = of_each(exchange.init(start) if exchange else Residual())
    trajectory, ratios, local = [params], [], []
    for step in range(updates):
        stage = tx.stage(step)
        params, state, residual = update(
            stage, jax.tree.map(lambda g: g[:, step], grads), params, state, residual
        )
        trajectory.append(params)
        ratios.append(state.diagnostics.ratios if stage.name != "first" else None)
        local.append(stage.local)

    actual: dict[str, Callable[[str], Any]] = {
        "p32/": lambda name: np.stack([np.asarray(p[name][0]) for p in trajectory]),
        "trust/": lambda name: np.float32([math.nan if r is None else r[name][0] for r in ratios]),
        **{
            f"rank{rank}_final/": lambda name, rank=rank: np.asarray(params[name][rank])
            for rank in range(world)
        },
        **{
            f"state/{theirs}/": lambda name, ours=ours, theirs=theirs: np.asarray(
                getattr(state, ours)[name][0]
            ).reshape(recorded[f"state/{theirs}/{name}"].shape)
            for ours, theirs in FIELDS.items()
        },
        "lr": lambda name: np.float64(
            [schedule(step) if callable(schedule) else schedule for step in range(updates)]
        ),
        "local_gradients": lambda name: np.asarray(local),
    }
    values = {}
    for key in recorded:
        prefix = max((p for p in actual if key.startswith(p)), key=len)
        values[key] = actual[prefix](key.removeprefix(prefix))
    return values


def _all_reduces(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns the results of repeated calls of the exchange with one tensor per worker."""
    settings = Settings(entry["hyper"])
    world = settings.take("world")
    # The record has OnebitLamb's settings, but the all-reduce does not use them.
    settings.assume("zero_div_with_zero_momentum", "ZeroDivisionError")
    described = re.fullmatch(
        r"(\S+)\[rank, t\], t=0\.\.(\d+), error buffers carried over", settings.take("input")
    )
    if described is None:
        raise ValueError(f"input={entry['hyper']['input']!r} has an unknown form")
    settings.check_empty("compressed_allreduce")
    exchange = _exchange(world, per_leaf=False)
    shares = jnp.asarray(inputs[described[1]][:world, : int(described[2]) + 1]) / world

    @functools.partial(jax.vmap, axis_name="workers")
    def reduces(shares: jax.Array) -> tuple[jax.Array, Residual]:
        def one(residual: Residual, share: jax.Array) -> tuple[Residual, Any]:
            mean, residual = exchange.reduce(share, residual)
            return residual, (mean, residual)

        return jax.lax.scan(one, exchange.init(shares[0]), shares)[1]

    means, residuals = jax.jit(reduces)(shares)
    values = {"out": means[0]}
    for rank in range(world):
        # Our residual on a device is that of its share, which is divided by the number of workers.
        # The residual of a server already belongs to the mean.
        values[f"worker_error_r{rank}"] = world * residuals.device[0][rank]
        values[f"server_error_r{rank}"] = residuals.split[0][rank]
    return {key: np.asarray(values[key]) for key in recorded}


def _exchange(world: int, per_leaf: bool) -> OneBit:
    return OneBit(("workers",), world, per_leaf=per_leaf, multiple=math.lcm(world, 8))


def _common(name: str, settings: Settings) -> dict[str, Any]:
    mask = settings.take("exp_avg_mask")
    rows = ()
    if mask is not None:
        actual = re.fullmatch(r"(\w+) rows (\d+)\.\.(\d+) masked to 0", mask)
        if actual is None:
            raise ValueError(f"exp_avg_mask={mask!r} must have the form 'x rows 1..2 masked to 0'")
        rows = ((f"^{actual[1]}/", (int(actual[2]), int(actual[3]) + 1)),)
    # DeepSpeed's constructors accept the flag but ignore it: no run has a bias correction.
    settings.take("bias_correction", True)
    return {
        "learning_rate": rate(settings),
        "b1": settings.take("beta1", 0.9),
        "b2": settings.take("beta2", 0.999),
        "eps": settings.take("eps", 1e-8),
        "weight_decay": settings.take("weight_decay", 0.0),
        "masked_rows": rows,
        "collect": True,
        **preset(name, "deepspeed"),
    }


def _freeze_step(settings: Settings) -> int:
    # DeepSpeed checks for freezing at the end of an update, so the warm-up has at least one update,
    # in addition to the discarded one.
    return max(settings.take("freeze_step", 100_000), 2)


def _adam(settings: Settings) -> Staged:
    return optim.onebit_adam(freeze_step=_freeze_step(settings), **_common("onebit_adam", settings))


def _lamb(settings: Settings) -> Staged:
    if settings.get("freeze_step", 100_000) < 2:
        raise NotImplementedError(
            "freeze_step must be at least 2: otherwise the second moments after freezing start at 0"
        )
    return optim.onebit_lamb(
        freeze_step=_freeze_step(settings),
        ratio_bounds=(settings.take("min_coeff", 0.01), settings.take("max_coeff", 10.0)),
        b3=settings.take("coeff_beta", 0.9),
        factor_bounds=(settings.take("factor_min", 0.5), settings.take("factor_max", 4.0)),
        factor_threshold=settings.take("factor_threshold", 0.1),
        **_common("onebit_lamb", settings),
    )


def _zero_one(settings: Settings) -> Staged:
    return optim.zero_one_adam(
        # DeepSpeed compares this step, counted from 1, after the update, so the second moments
        # change once more.
        var_freeze_step=max(settings.take("var_freeze_step", 100_000) + 1, 2),
        var_update_scaler=settings.take("var_update_scaler", 16),
        local_step_scaler=settings.take("local_step_scaler", 32_678),
        local_step_clipper=settings.take("local_step_clipper", 16),
        **_common("zero_one_adam", settings),
    )


OPTIMIZERS: dict[str, Callable[[Settings], Staged]] = {
    "onebit_adam": _adam,
    "onebit_lamb": _lamb,
    "zero_one_adam": _zero_one,
}
