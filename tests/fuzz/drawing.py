"""Draws cases: many features at once, most of them combinations that the package accepts."""

import random
from collections.abc import Callable
from typing import Any

from lamb_tpu.models.bert_rules import TENSOR_PARALLEL, TENSOR_PARALLEL_SCANNED
from lamb_tpu.optim.factory import OPTIMIZERS, custom_arguments
from lamb_tpu.optim.presets import PRESETS
from tests.fuzz import families
from tests.fuzz.case import PROCESSES, Case, num_devices

Draw = random.Random
Values = dict[str, Any]

WEIGHTS = {"mlp": 6, "cnn": 5, "row_lstm": 1, "bert": 1.5, "bert_scanned": 1, "lstm": 3}
# Optimizers that sum over devices by themselves promise no trajectory; see `promises`.
SENDERS = ("onebit_adam", "onebit_lamb", "zero_one_adam")
NAMES = tuple(name for name in OPTIMIZERS if name not in SENDERS)
RATES = {"sgd": 0.1, "momentum": 0.05, "nesterov": 0.05, "lars": 0.5, "adagrad_norm": 0.1}
# Muon and others multiply and divide by norms; a small rate keeps the runs smooth.
RATE = 0.01


def draw(seed: int) -> Case:
    """Returns the case of a seed."""
    rng = random.Random(f"case {seed}")
    family = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    config: Values = {}
    for feature in (_network, _optimizer, _schedule, _rest):
        config |= feature(rng, family)
    if chance(rng, 0.08):
        return _lossy(rng, family, config)
    if family != "lstm" and chance(rng, 0.12):
        _ramp(rng, family, config)
    exchanges = rng.random() < 0.1
    if exchanges:
        config["parallel.exchange"] = {"name": "bfloat16"}
    settings = [_setting(rng, family, exchanges) for _ in range(2)]
    # A start of two processes takes 10 seconds, and reads the whole sets of text.
    if not family.startswith("bert") and num_devices(settings[1]) > 1 and chance(rng, 0.06):
        settings[1][PROCESSES] = 2
    return Case(family, config, *settings)


def _ramp(rng: Draw, family: str, config: Values) -> None:
    """Adds a batch size that grows and shrinks, in three updates."""
    batch = families.batch_size(family)
    points = rng.choice(([[0, batch], [batch, 2 * batch]], [[0, batch], [1, 2 * batch]]))
    config["batch_rule"] = {"name": "ramp", "points": points}
    if chance(rng, 0.5):
        config["batch_rule"]["scaling"] = rng.choice(("linear", "sqrt"))
    for key in ("task.mixup_alpha", "task.cutmix_alpha"):
        config.pop(key, None)
    if family == "cnn" or "model.batch_norm" in config:
        config.setdefault("model.group_size", 4)


def _lossy(rng: Draw, family: str, config: Values) -> Case:
    """Returns a case of an exchange with error feedback: plain SGD, with each update saved."""
    family = "mlp" if family == "lstm" else family
    kept = ("accumulation_steps", "seed", "task.label_smoothing")
    config = {key: value for key, value in config.items() if key in kept}
    if family == "cnn":
        config["model.group_size"] = 2
    if family.startswith("bert"):
        config.pop("task.label_smoothing", None)
    exchange = rng.choice(
        (
            {"name": "onebit"},
            {"name": "topk", "ratio": 0.1},
            {"name": "ef14", "compressor": "sign"},
            {"name": "ef14", "ratio": 0.05},
        )
    )
    optimizer = {"name": "sgd", "learning_rate": 0.1, "rules": families.rules(family)}
    config |= {"parallel.exchange": exchange, "checkpoint.every": "1 steps", "optimizer": optimizer}
    settings: list[Values] = []
    for _ in range(2):
        setting = {"mesh.data": rng.choice((2, 4, 8)), "parallel.backend": "shard_map"}
        if chance(rng, 0.4):
            setting["parallel.optimizer_state"] = "zero1"
        settings.append(setting)
    return Case(family, config, *settings)


def chance(rng: Draw, share: float) -> bool:
    return rng.random() < share


def _network(rng: Draw, family: str) -> Values:
    found: Values = {}
    if chance(rng, 0.35):
        found["accumulation_steps"] = 2
    if family == "mlp" and chance(rng, 0.4):
        found["model.batch_norm"] = True
    if family == "cnn" or "model.batch_norm" in found:
        # Without groups, BatchNorm sees one microbatch at a time, by declaration.
        if "accumulation_steps" in found or chance(rng, 0.5):
            found["model.group_size"] = rng.choice((2, 4, 8))
    if family != "row_lstm" and chance(rng, 0.4):
        found["model.dropout_rate"] = 0.25
        if family.startswith("bert"):
            found["model.attention_dropout_rate"] = 0.25
    if family == "lstm" and chance(rng, 0.5):
        found["model.dropout"] = "plain"
    if family in ("cnn", "bert", "bert_scanned", "lstm") and chance(rng, 0.25):
        found["model.dtype"] = "bfloat16"
    if family in ("mlp", "cnn", "row_lstm"):
        if chance(rng, 0.4):
            found["task.label_smoothing"] = 0.2
        if chance(rng, 0.15):
            found[rng.choice(("task.mixup_alpha", "task.cutmix_alpha"))] = 0.5
    if chance(rng, 0.1):
        found["prng"] = "rbg"
    return found


def _optimizer(rng: Draw, family: str) -> Values:
    name = rng.choice(NAMES)
    fields: Values = {"name": name, "learning_rate": RATES.get(name, RATE)}
    known = custom_arguments(name)
    if name in PRESETS and chance(rng, 0.5):
        fields["preset"] = rng.choice(sorted(PRESETS[name]))
    fields["rules"] = families.rules(family)
    if fields["rules"] == "all" and chance(rng, 0.6):
        fields["rules"] = rng.choice(("no_bias_no_norm", "no_bias_no_norm_decay", "resnet"))
    if "weight_decay" in known and chance(rng, 0.6):
        fields["weight_decay"] = 0.1
    if chance(rng, 0.3):
        fields["clip_global_norm"] = rng.choice((0.1, 1.0))
    if chance(rng, 0.15):
        fields["l2"] = 0.05
    if "update_gap" in known:
        fields |= {"rank": 2, "update_gap": 2}
    return {"optimizer": fields}


def _schedule(rng: Draw, family: str) -> Values:
    found: Values = {}
    if chance(rng, 0.4):
        found["schedule.warmup"] = rng.choice(("0 steps", "1 steps", "3 steps", "16 examples"))
    decay = rng.choice(("constant", "polynomial", "cosine", "exponential", "step"))
    found["schedule.decay"] = decay
    if decay in ("polynomial", "cosine"):
        found["schedule.end_factor"] = rng.choice((0.0, 0.1))
    if decay == "exponential":
        found |= {"schedule.decay_factor": 0.5, "schedule.decay_every": "1 steps"}
    if decay == "step":
        found |= {"schedule.decay_factor": 0.5, "schedule.boundaries": "2 steps, 3 steps"}
        found["schedule.decay_from"] = "zero"
    if chance(rng, 0.3):
        found["schedule.scaling"] = rng.choice(("linear", "sqrt", "legw"))
        found["schedule.base_batch_size"] = 8
    if chance(rng, 0.2):
        found["schedule.first_step"] = 1
    return found


def _rest(rng: Draw, family: str) -> Values:
    found: Values = {}
    if chance(rng, 0.35):
        found["ema.decay"] = 0.5
    if chance(rng, 0.3):
        found["seed"] = rng.randrange(1, 5)
    return found


# Sizes of the axes data, fsdp, model and sequence.
MESHES = ((1,), (2,), (4,), (2, 2), (1, 2), (1, 4), (8,), (4, 2), (2, 4))
OF_BERT = ((1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2))


def _setting(rng: Draw, family: str, exchanges: bool) -> Values:
    is_bert = family.startswith("bert")
    is_split = is_bert and not exchanges and chance(rng, 0.4)
    sizes = rng.choices(MESHES, (1, 3, 3, 3, 2, 2, 1, 1, 1))[0]
    if is_split:
        sizes = rng.choice(OF_BERT)
    axes = ("data", "fsdp", "model", "sequence")
    found: Values = {f"mesh.{axis}": size for axis, size in zip(axes, sizes) if size > 1}
    rules: list[Any] = []
    if "mesh.model" in found:
        named = TENSOR_PARALLEL_SCANNED if family == "bert_scanned" else TENSOR_PARALLEL
        rules += [[pattern, list(split)] for pattern, split in named]
    if exchanges or (not is_split and chance(rng, 0.5)):
        found["parallel.backend"] = "shard_map"
    if chance(rng, 0.4):
        found["parallel.optimizer_state"] = "zero1"
    if chance(rng, 0.25):
        rules.append(["kernel$", "fsdp"])
    if rules:
        found["parallel.rules"] = rules
    found |= _measures(rng)
    return found


def _measures(rng: Draw) -> Values:
    found: Values = {}
    options: tuple[tuple[float, Callable[[], Values]], ...] = (
        (0.12, lambda: {"statistics.noise_scale": True}),
        (0.05, lambda: {"statistics.preconditioned": True}),
        (0.08, lambda: {"statistics.halves": True}),
        (0.1, lambda: {"statistics.per_example": 4, "statistics.interval": rng.choice((1, 2))}),
        (0.15, lambda: {"loop.updates_per_call": 2, "log.every": "2 steps"}),
        (0.15, lambda: {"guards.max_skipped": 2}),
        (0.15, lambda: {"guards.desync_every": "1 steps"}),
        (0.15, lambda: {"eval.batch_size": rng.choice((8, 64))}),
        (0.1, lambda: {"loop.held_share": 0.0}),
    )
    for share, made in options:
        if chance(rng, share):
            found |= made()
    return found
