"""Maps entries of the family `schedules` of the golden index to arguments of our schedules.

The family records learning rates and not trajectories, so golden.py does not include it:
`curves_for(entry, record)` returns schedules where `golden.transform_for` returns an optimizer.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import exponential_decay, legw, schedules
from tests.optim.golden_common import Settings


class Curve(NamedTuple):
    """A recorded learning rate and the schedule that reproduces it."""

    name: str  # the name of the recorded array
    schedule: optax.Schedule
    steps: np.ndarray  # the counts of completed updates at which the rate was recorded
    peak: float


Record = Mapping[str, np.ndarray]

# Implementations that computed in float32 (TensorFlow, torch tensors); the others used float64.
IN_FLOAT32 = ("tpu_efficientnet_lr", "tpu_resnet_lars_poly", "nvidia_bert_schedulers")


def curves_for(entry: dict[str, Any], record: Record) -> list[Curve]:
    """Returns every curve of an entry; raises ValueError for a setting without a counterpart."""
    hyper = entry["hyper"]
    settings = Settings({"text": hyper} if isinstance(hyper, str) else hyper)
    curves = IMPLEMENTATIONS[entry["implementation"]](settings, record)
    settings.check_empty(entry["implementation"])
    return curves


def warmup(
    peak: float, total_steps: float, warmup_steps: float = 0.0, **options: Any
) -> optax.Schedule:
    """Returns `schedules.warmup`, even for recorded runs that end within their warm-up."""
    return schedules.warmup(peak, max(total_steps, warmup_steps), warmup_steps, **options)


def _init2winit(settings: Settings, record: Record) -> list[Curve]:
    base, total = settings.take("base_lr"), settings.take("max_training_updates")
    decay_end = settings.take("decay_end", 0)
    rate = warmup(
        base,
        total + 1,
        settings.take("warmup_steps"),
        power=settings.take("power"),
        end_value=settings.take("end_lr"),
        start_value=settings.take("start_lr"),
        warmup_power=settings.take("warmup_power"),
    )
    frozen = (lambda t: rate(jnp.minimum(t, decay_end))) if decay_end > 0 else rate
    return [Curve("lr", frozen, record["step"], base)]


def _legw(settings: Settings, record: Record) -> list[Curve]:
    curves = []
    for case in [key.partition("/")[0] for key in record if key.endswith("/k1/step")]:
        base = Settings(settings.take(case))
        epochs, num_examples = base.take("epochs"), base.take("n")
        of_base = [base.take(f"base_{name}") for name in ("lr", "warmup_epochs", "batch")]
        base.check_empty(case)
        for key in [key for key in record if re.fullmatch(rf"{case}/k\d+/scalars", key)]:
            batch, name = int(record[key][0]), key.removesuffix("scalars")
            scaled = legw(*of_base, batch)
            warmup_steps = scaled.warmup_epochs * num_examples / batch
            total = epochs * num_examples // batch
            np.testing.assert_allclose(record[key], [batch, *scaled, warmup_steps, total], 1e-15)
            for label, options in {"const": {"decay": "constant"}, "poly2": {"power": 2}}.items():
                rate = warmup(scaled.learning_rate, total, warmup_steps, **options)
                curves.append(
                    Curve(
                        f"{name}lr_warm_then_{label}",
                        rate,
                        record[name + "step"],
                        scaled.learning_rate,
                    )
                )
    return curves


def _mlperf(settings: Settings, record: Record) -> list[Curve]:
    table = {  # batch size: (peak, warm-up epochs), from the recorded code
        8192: (10.0, 5),
        16384: (25.0, 5),
        32768: (29.0, 18),
        65536: (23.080977304670448, 33),
    }
    epochs, num_examples = settings.take("epochs"), settings.take("n")
    curves = []
    for batch, (peak, warmup_epochs) in table.items():
        per_epoch = math.ceil(num_examples / batch)
        if record[f"b{batch}/steps_per_epoch"] != per_epoch:
            raise ValueError(f"the recorded number of updates per epoch must be {per_epoch}")
        rate = warmup(
            peak, epochs * per_epoch + 1, warmup_epochs * per_epoch, power=2, end_value=1e-4
        )
        curves.append(Curve(f"b{batch}/lr", rate, record[f"b{batch}/step"], peak))
    return curves


def _nvidia_bert(settings: Settings, record: Record) -> list[Curve]:
    curves, last = [], {}
    for name in ("poly05", "poly1", "linear", "constant"):
        text = settings.take(name)
        if text != "same":
            last = {
                key: float(value)
                for key, value in (part.strip().rsplit(" ", 1) for part in text.split(","))
            }
        values = dict(last)
        base, total = values.pop("base"), int(values.pop("total"))
        warmup_steps = values.pop("warmup") * total
        if name.startswith("poly"):
            rate = warmup(
                base,
                total,
                warmup_steps,
                power=values.pop("degree"),
                decay_from="zero",
                first_step=1,
            )
        else:
            decay = "constant" if name == "constant" else "polynomial"
            rate = warmup(base, total, warmup_steps, decay=decay)
        Settings(values).check_empty(name)
        curves.append(Curve(name, rate, np.arange(len(record[name])), base))
    return curves


def _nvidia_jasper(settings: Settings, record: Record) -> list[Curve]:
    base, per_epoch = settings.take("initial_lr"), settings.take("steps_per_epoch")
    warmup_steps = settings.take("warmup_epochs") * per_epoch
    total = settings.take("num_epochs") * per_epoch
    options = {
        # The warm-up is one update longer than in the original: at first_step the rate is 1 / (W + 1).
        "warmup_steps": warmup_steps + 1,
        "hold_steps": settings.take("hold_epochs") * per_epoch,
        "first_step": 1,
        "min_value": settings.take("min_lr"),
    }
    gamma = exponential_decay(settings.take("exp_gamma"), per_epoch)
    legacy = warmup(base, total + 1, power=2, **options)
    exponential = warmup(base, total + 1, decay=gamma, **options)
    steps = np.arange(total)
    return [Curve("legacy", legacy, steps, base), Curve("exponential", exponential, steps, base)]


def _tpu_efficientnet(settings: Settings, record: Record) -> list[Curve]:
    # The settings are a sentence without the peak rates, so read the peaks from the record.
    text = settings.take("text")
    per_epoch = int(re.search(r"steps_per_epoch (\d+)", text)[1])
    warmup_epochs = int(re.search(r"warm-up (\d+) epochs", text)[1])
    total = int(re.search(r"global_step 0\.\.(\d+)", text)[1])
    factor, every = re.search(r"decay_factor (\.\d+) every ([\d.]+) epochs", text).groups()
    warmup_steps, peak, poly_peak = warmup_epochs * per_epoch, 0.256, 10.0
    staircase = exponential_decay(float(factor), float(every) * per_epoch)
    exponential = warmup(peak, total, warmup_steps, decay=staircase, decay_from="zero")
    cosine = warmup(peak, total, warmup_steps, decay="cosine", decay_from="zero")
    poly = warmup(poly_peak, total + 1, warmup_steps, power=2, end_value=0.1)
    constant = warmup(0.1, total, decay="constant")

    def poly_without_its_peak(t):
        # The decay uses max(1, step - warm): its first update has the rate of its second update.
        return poly(jnp.where(t == warmup_steps, t + 1, t))

    steps = np.arange(total + 1)
    return [
        Curve("exponential", exponential, steps, peak),
        Curve("cosine", cosine, steps, peak),
        Curve("poly", poly_without_its_peak, steps, poly_peak),
        Curve("constant_nowarm", constant, steps, 0.1),
    ]


def _tpu_resnet(settings: Settings, record: Record) -> list[Curve]:
    table = {4096: (10.0, 5), 16384: (25.0, 5), 32768: (32.0, 14), 65536: (35.6, 40)}
    num_examples, override = settings.take("n"), settings.take("poly_rate")
    epochs = settings.take("epochs")
    curves = []
    for batch, (peak, warmup_epochs) in table.items():
        peak = override if override > 0 else peak
        total = int(epochs * num_examples / batch) + 1
        warmup_steps = warmup_epochs * num_examples / batch
        rising = warmup(peak, total, warmup_steps)
        # The decay starts after the warm-up's length, rounded down.
        falling = warmup(peak, total, int(warmup_steps), power=2, end_value=1e-4)

        def rate(t, rising=rising, falling=falling, warmup_steps=warmup_steps):
            return jnp.where(t <= warmup_steps, rising(t), falling(t))

        curves.append(Curve(f"b{batch}/lr", rate, record[f"b{batch}/step"], peak))
    return curves


IMPLEMENTATIONS: dict[str, Callable[[Settings, Record], list[Curve]]] = {
    "init2winit_mlperf_poly": _init2winit,
    "legw_modelled": _legw,
    "mlperf_resnet_jax_poly": _mlperf,
    "nvidia_bert_schedulers": _nvidia_bert,
    "nvidia_jasper_lr_policy": _nvidia_jasper,
    "tpu_efficientnet_lr": _tpu_efficientnet,
    "tpu_resnet_lars_poly": _tpu_resnet,
}
