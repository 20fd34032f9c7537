"""Checks statistics that compare parts of a batch: the noise scale, and the cosine of two halves.

A part is a microbatch and, under shard_map, one device's rows of it: consecutive examples.
"""

from typing import Any

import jax
import numpy as np

from tests.fuzz.case import Case, num_devices
from tests.fuzz.comparing import LIMIT, Difference
from tests.fuzz.oracle import Oracle
from tests.fuzz.running import Leg

CLOSE = 1e-3


def compare(case: Case, oracle: Oracle, legs: dict[str, Leg]) -> list[Difference]:
    """Compares the statistics of the first update, if the model's examples are independent."""
    found: list[Difference] = []
    mixes = bool(getattr(oracle.run.task, "mixed_by", ()))
    settings = {"first": case.first, "second": case.second}
    if jax.tree.leaves(oracle.state.model_state) or mixes or "image" not in oracle.batches[0]:
        return found
    for name, leg in legs.items():
        setting = settings[name]
        record = next((each for each in leg.records if each["kind"] == "train"), None)
        asked = {"statistics.noise_scale", "statistics.halves"} & setting.keys()
        # The first update belongs to the first leg, whose records the second one keeps.
        if name != "first" or not asked or record is None or record.get("updates") != 1:
            continue
        found += _statistics(case, oracle, record, setting)
    return found


def _statistics(case: Case, oracle: Oracle, record: Any, setting: Any) -> list[Difference]:
    named = setting.get("parallel.backend") == "shard_map"
    devices = num_devices(setting) if named else 1
    steps = case.config.get("accumulation_steps", 1)
    batch, count = oracle.batches[0], devices * steps
    rows = len(batch["label"]) // count
    means = []
    for part in range(count):
        some = {key: value[part * rows : (part + 1) * rows] for key, value in batch.items()}
        _, grads = oracle.gradient(oracle.state, 0, some, part * rows)
        means.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)]))
    found = []
    if setting.get("statistics.noise_scale"):
        small, large = rows, rows * count
        small_sq = float(np.mean([mean @ mean for mean in means]))
        large_sq = float(np.mean(means, 0) @ np.mean(means, 0))
        expected = {
            "noise_scale/grad_sq": (large * large_sq - small * small_sq) / (large - small),
            "noise_scale/trace": (small_sq - large_sq) / (1 / small - 1 / large),
        }
        scales = {"noise_scale/grad_sq": small_sq, "noise_scale/trace": small_sq * small}
        for key, value in expected.items():
            found.append(_close(f"first update 1 {key}", record[key], value, scales[key]))
    if setting.get("statistics.halves") and count > 1:
        index = np.arange(count) % devices if devices > 1 else np.arange(count)
        even, odd = (
            np.sum([means[i] for i in range(count) if index[i] % 2 == k], 0) for k in (0, 1)
        )
        cosine = float(even @ odd / np.linalg.norm(even) / np.linalg.norm(odd))
        found.append(_close("first update 1 similarity", record["similarity"], cosine, 1.0))
    return found


def _close(what: str, value: float, expected: float, scale: float) -> Difference:
    return Difference(what, LIMIT * abs(value - expected) / (CLOSE * scale), value, expected)
