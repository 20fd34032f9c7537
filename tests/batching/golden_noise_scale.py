"""Recomputes recorded noise scales with `lamb_tpu.batching.noise_scale`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lamb_tpu.batching import noise_scale
from tests.optim.golden_common import Settings

Arrays = Mapping[str, np.ndarray]


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our averages and ratios under the recorded keys."""
    del inputs
    implementation = entry["implementation"]
    if implementation not in REPEATS:
        raise ValueError(f"implementation={implementation!r} is unknown; add it to REPEATS")
    settings = Settings(entry["hyper"])
    actual = REPEATS[implementation](settings, recorded)
    settings.check_empty(implementation)
    return actual


def _squares(gradients: np.ndarray) -> np.ndarray:
    return np.sum(np.square(gradients.astype(np.float64)), axis=-1)


def _norms(settings: Settings, recorded: Arrays) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Returns squared norms of small and large batches by step, and both batch sizes."""
    gradients = recorded["micro_gradients"].astype(np.float64)
    small, large = settings.take("small_batch"), settings.take("large_batch")
    if gradients.shape[1] != settings.take("micro_batches"):
        raise ValueError(f"the second axis of {gradients.shape} must have the length micro_batches")
    for name, meaning in (
        ("sq_norm_small", "mean over the micro batches of |g|^2"),
        ("sq_norm_large", "|mean g|^2"),
    ):
        if settings.take(name, meaning) != meaning:
            raise ValueError(f"{name} must have the meaning {meaning!r}")
    return _squares(gradients).mean(axis=1), _squares(gradients.mean(axis=1)), small, large


def _kdiffusion(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    smalls, larges, small, large = _norms(settings, recorded)
    decay, eps = settings.take("beta"), settings.take("eps")
    # The class received float32 norms. Their rounding matters if |G|^2 nearly cancels.
    fed = (recorded.get("sq_norm_small", smalls), recorded.get("sq_norm_large", larges))
    state, ratios, corrected = noise_scale.init(), [], []
    for small_sq, large_sq in zip(*fed, strict=True):
        new = noise_scale.estimate(small_sq, large_sq, small, large)
        state = noise_scale.update(state, new, decay)
        ratios.append(noise_scale.noise_scale(state, floor=eps))
        corrected.append(noise_scale.averages(state))
    return {
        "sq_norm_small": smalls,
        "sq_norm_large": larges,
        "gns": np.array(ratios),
        "stats_debiased": np.array(corrected),
    }


def _gptneox(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Repeats GPT-NeoX, which takes the small batch's norm from the last of n gradients."""
    small, parts = settings.take("batch_size_small"), settings.take("n_batches")
    decay = settings.take("beta")
    # The recorded gradients show that only the last gradient is used.
    overflown = ~np.isfinite(recorded["gradients"]).all(axis=-1)
    listed = settings.take("gradients_with_inf_at", np.flatnonzero(overflown).tolist())
    if listed != np.flatnonzero(overflown).tolist():
        raise ValueError(f"gradients_with_inf_at={listed} must list the gradients with infinities")
    state, buffer, counted, latest = noise_scale.init(), [], 0, -1.0
    rows = []
    for gradient in recorded["gradients"].astype(np.float64):
        if np.isfinite(gradient).all():
            buffer.append(gradient)
            counted += 1
            if len(buffer) == parts:
                new = noise_scale.estimate(
                    _squares(buffer[-1]), _squares(np.mean(buffer, axis=0)), small, small * parts
                )
                state, buffer = noise_scale.update(state, new, decay), []
                latest = float(noise_scale.noise_scale(state, floor=-math.inf))
        rows.append((latest, state.trace, state.grad_sq, counted))
    ratio, trace, grad_sq, count = (np.array(column) for column in zip(*rows, strict=True))
    # The record has the two names swapped.
    return {"noise_scale": ratio, "ema_scale": trace, "ema_noise": grad_sq, "n_updates": count}


def _formula(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Recomputes both estimates of each step, the ratio of their means, and the mean of their ratios.

    Every step has the same weight in a mean.
    """
    smalls, larges, small, large = _norms(settings, recorded)
    pair = noise_scale.estimate(smalls, larges, small, large)
    mean = noise_scale.NoiseScaleState(1.0, pair.grad_sq.mean(), pair.trace.mean())
    single = noise_scale.NoiseScaleState(np.ones_like(pair.trace), *pair)
    ratios = noise_scale.noise_scale(single, floor=-math.inf)
    return {
        "grad_sq": pair.grad_sq,
        "trace": pair.trace,
        "ratio_of_means": np.asarray(noise_scale.noise_scale(mean, floor=-math.inf)),
        "mean_of_ratios": np.asarray(ratios.mean()),
    }


REPEATS = {"kdiffusion_gns": _kdiffusion, "gptneox_gns": _gptneox, "mccandlish_formula": _formula}
