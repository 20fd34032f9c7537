"""Recomputes recorded runs of SimiGrad: cosines, batch sizes, rates and parameters."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lamb_tpu.batching.learning_rate import rate_factor
from lamb_tpu.batching.rules.simigrad import round_to_granularity, wanted_batch
from lamb_tpu.batching.similarity import similarity
from tests.optim.golden_common import Settings

Arrays = Mapping[str, np.ndarray]
FED = "rank r, micro step k: noise*wgrad[n][r, k%20] + mean_w wgrad[n][w, k%20] (float32), lr 0.01"
RATE = 0.01


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our values of each update and our last parameters under the recorded keys."""
    del recorded
    settings = Settings(entry["hyper"])
    if settings.take("gradient_fed") != FED:
        raise ValueError("gradient_fed must equal FED; this code computes its gradients")
    world, micro, names = (settings.take(name) for name in ("world", "micro0", "names"))
    steps, target = settings.take("gas0"), settings.take("target")
    lower, upper = settings.take("lower"), settings.take("upper")
    bounds = (1 if lower is None else lower, math.inf if upper is None else upper)
    largest, smoothing = settings.take("maxmicro"), settings.take("smooth")
    factor, noise = settings.take("factor"), settings.take("noise")
    adjust = 1.0 if factor is None else factor
    updates = settings.take("updates")
    settings.check_empty(entry["implementation"])

    feeds = {name: _fed(inputs["wgrad/" + name], world, noise) for name in names}
    params = {name: inputs["param/" + name] for name in names}
    original, count, offset, start = world * micro * steps, 0, 0, 0
    modifier, rows = 1.0, []
    for _ in range(updates):
        last = count + steps - 1
        summed = {name: _summed(feed, count, steps) for name, feed in feeds.items()}
        even, odd = (
            {name: grads[half::2].mean(axis=0) for name, grads in summed.items()} for half in (0, 1)
        )
        cosine = float(similarity(even, odd)["similarity"])
        # The published code divides the mean of each half by its number of workers again.
        applied = {name: (even[name] + odd[name]) / np.float32(2 * (world // 2)) for name in names}
        params = {
            name: value - np.float32(RATE * modifier) * applied[name]
            for name, value in params.items()
        }
        mean = {name: grads.mean(axis=0) for name, grads in summed.items()}
        before = (world * micro * steps, steps, micro, modifier)

        batch = before[0]
        wanted = wanted_batch(batch, cosine, target, steps, *bounds, smoothing)
        if cosine != target and not (cosine > target and batch == 1):
            if wanted > batch and largest is not None:
                # The microbatch grows with the batch up to a limit, so the granularity changes.
                micro = min(max(1, wanted // world), largest)
            granularity = world * micro
            steps = round_to_granularity(wanted, batch, granularity) // granularity
            offset, start = (last + 1) % steps, last + steps
            modifier = rate_factor("sqrt", original, granularity * steps, adjust)
        rows.append(
            {
                "cos": cosine,
                "micro_step": last,
                "batch_before": before[0],
                "gas_before": before[1],
                "micro_before": before[2],
                "lr_modifier_used": before[3],
                "batch_after": world * micro * steps,
                "gas_after": steps,
                "micro_after": micro,
                "lr_modifier_after": modifier,
                "offset_after": offset,
                "start_after": start,
                "grad_scale_vs_mean": _norm(applied) / _norm(mean),
            }
        )
        count = last + 1
    actual = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    last_params = np.concatenate([np.ravel(params[name]) for name in names])
    return actual | {"params_final": last_params}


def _fed(gradients: np.ndarray, world: int, noise: float) -> np.ndarray:
    """Returns the gradients of every rank and micro step, (ranks, 20, *shape)."""
    return np.float32(noise) * gradients[:world] + gradients.mean(axis=0)


def _summed(feed: np.ndarray, first: int, steps: int) -> np.ndarray:
    """Returns each rank's mean gradient over the micro steps of one update."""
    return sum(feed[:, k % feed.shape[1]] / np.float32(steps) for k in range(first, first + steps))


def _norm(tree: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in tree.values()))
