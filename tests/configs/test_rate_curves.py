"""Tests the learning rate of every update of every recipe against the schedules of the sources.

A reference is the source's formula with the source's constants, in NumPy's float64; the formula reads
nothing from the recipe. `t` is the number of completed updates, which the sources call global_step.
If a recipe differs from its source by rounding, `within` bounds the difference as a fraction of the
peak, and a comment gives the reason.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.run.recipe import resolve
from tests import tiny

IMAGENET, MNIST = 1_281_167, 60_000
# The LAMB authors and dawn.py drop the last images of an epoch, so it has 97 updates of 512 images.
CIFAR10 = 97 * 512
SQUAD = 64 * 1370  # close to the number of windows in SQuAD, and divisible into ten equal parts
# Tolerance for schedules in float32, as in the sources and here.
EXACT = 3e-6
# Tolerance if a source rounds the warm-up down to updates and ends its decay one update after the run.
ROUNDED = 1e-3

Curve = Callable[[np.ndarray], np.ndarray]


def polynomial_decay(
    t: np.ndarray, rate: float, steps: float, end: float, power: float
) -> np.ndarray:
    """Returns the rates of tf.train.polynomial_decay, without cycles."""
    return end + (rate - end) * (1 - np.minimum(t, steps) / steps) ** power


def create_optimizer(rate: float, total: int, warmup: float, power: float = 1.0) -> Curve:
    """Schedule of google-research/bert (optimization.py) and fastalgo/mnist_tpu (lamb/optimization.py)."""
    return lambda t: np.where(
        t < warmup, rate * t / max(warmup, 1), polynomial_decay(t, rate, total, 0.0, power)
    )


def paper(rate: float, total: int, base_total: int) -> Curve:
    """The LAMB paper's rule: at every batch size, the warm-up has `base_total` / 5 updates."""
    return create_optimizer(rate, total, base_total / 5)


def poly_warmup_scheduler(rate: float, total: int, proportion: float) -> Curve:
    """Schedule of NVIDIA/DeepLearningExamples, BERT in PyTorch, schedulers.py, PolyWarmUpScheduler."""

    def curve(t: np.ndarray) -> np.ndarray:
        progress = (t + 1) / total
        falling = rate * (1 - progress) ** 0.5
        return np.where(progress < proportion, rate * progress / proportion, falling)

    return curve


def warmup_exp_decay_exp(rate: float, offset: float, proportion: float, decay_steps: int) -> Curve:
    """Schedule of DeepSpeedExamples, bing_bert, optimization.py, plus update_learning_rate's offset."""

    def curve(t: np.ndarray) -> np.ndarray:
        x = t / 7500
        falling = 0.9 ** ((t - proportion * 7500) / decay_steps)
        return rate * np.where(x < proportion, (x / proportion) ** 2.0, falling) + offset

    return curve


def triangular_lr(rate: float, total: int, warmup: float) -> Curve:
    """Schedule of fastalgo/davidnet-cifar (triangular_lr) and imagenet_resnet50_lamb (optimization.py)."""
    return lambda t: np.where(t <= warmup, t * rate / warmup, (total - t) * rate / (total - warmup))


def piecewise_linear(epochs: list[float], rates: list[float]) -> Curve:
    """Schedule of davidcpage/cifar10-fast, dawn.py: np.interp at the number of completed epochs."""
    return lambda t: np.interp(t / 97, epochs, rates)


def polynomial_warmup(rate: float, total: float, warmup: float) -> Curve:
    """Schedule of NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch, utils.py, with end_lr=0 and power 2."""
    return lambda t: np.where(
        t < warmup, t / warmup * rate, polynomial_decay(t - warmup, rate, total - warmup, 0.0, 2.0)
    )


def legw(rate: float, warmup: float) -> Curve:
    """Schedule of arXiv:1901.08256: a linear warm-up, then a constant rate."""
    return lambda t: rate * np.minimum(t / warmup, 1)


def mnist_momentum(rate: float, total: int) -> Curve:
    """Schedule of fastalgo/mnist_tpu, momentum_poly/mnist_tpu.py, without a warm-up."""
    return lambda t: polynomial_decay(t, rate, total, 1e-4, 0.5)


def poly_rate_schedule(rate: float, epochs: float, batch: int, train_steps: int) -> Curve:
    """Schedule of tensorflow/tpu and MLPerf v0.7 in TF, resnet/lars_util.py; it ends at TF's default 1e-4."""
    w_steps = epochs * IMAGENET // batch

    def curve(t: np.ndarray) -> np.ndarray:
        epoch = t * batch / IMAGENET
        falling = polynomial_decay(
            np.maximum(1, t - w_steps), rate, train_steps - w_steps + 1, 1e-4, 2.0
        )
        return np.where(epoch <= epochs, rate * epoch / epochs, falling)

    return curve


def polynomial_learning_rate_fn(rate: float, epochs: int, num_epochs: int) -> Curve:
    """Schedule of MLPerf v0.7 in JAX, train.py, at batch 65,536."""
    per_epoch = IMAGENET / 65_536
    per_epoch *= math.ceil(per_epoch * 4) / (per_epoch * 4)
    warmup, total = epochs * per_epoch, num_epochs * per_epoch

    def curve(t: np.ndarray) -> np.ndarray:
        falling = polynomial_decay(t - warmup, rate, total - warmup + 1, 1e-4, 2.0)
        return np.where(t <= warmup, rate * t / warmup, falling)

    return curve


def goyal(batch: int) -> Curve:
    """Schedule of arXiv:1706.02677: a warm-up of 5 epochs from 0.1 to 0.1 * batch / 256, then three drops."""
    peak = 0.1 * batch / 256

    def curve(t: np.ndarray) -> np.ndarray:
        epoch = t * batch / IMAGENET
        drops = sum((epoch >= edge).astype(float) for edge in (30, 60, 80))
        return np.where(epoch < 5, 0.1 + (peak - 0.1) * epoch / 5, peak * 0.1**drops)

    return curve


def build_learning_rate(rate: float, batch: int, epochs: int, kind: str, total: int) -> Curve:
    """Schedule of tensorflow/tpu, models/official/efficientnet/utils.py."""
    per_epoch = IMAGENET / batch
    warmup = int(epochs * per_epoch)

    def curve(t: np.ndarray) -> np.ndarray:
        if kind == "exponential":
            falling = rate * 0.97 ** np.floor(t / (2.4 * per_epoch))
        else:
            falling = polynomial_decay(
                np.maximum(1, t - warmup), rate, total - warmup + 1, 0.1, 2.0
            )
        return np.where(t < warmup, rate * t / warmup, falling)

    return curve


def halvings(rate: float, total: int, warmup: float) -> Curve:
    """LEGW's warm-up, then four halvings in the last third, as in MLPerf's GNMT, lr_scheduler.py."""

    def curve(t: np.ndarray) -> np.ndarray:
        remain = 0.666 * total
        passed = np.floor((t - remain) / ((total - remain) / 4)) + 1
        return rate * np.minimum(1, t / warmup) * 0.5 ** np.clip(passed, 0, 4)

    return curve


class Case(NamedTuple):
    """A recipe, and the schedule of its source."""

    name: str
    argument: str
    total: int  # updates
    curve: Curve
    within: float = EXACT
    num_examples: int = 10**6
    misses: int = 0  # number of updates that may differ by more than `within`

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}"


def _bert() -> list[Case]:
    cases = []
    for batch in (512, 1024, 2048, 4096, 8192, 16_384, 32_768):
        rate = 5 / (2 ** (math.log2(32_768 / batch) / 2) * 1000)
        for phase, base in ((1, 14_063), (2, 1_562)):
            total = base * 32_768 // batch
            curve = paper(rate, total, base)
            cases.append(Case("bert_pretrain", f"batch={batch},phase={phase}", total, curve))
    # The same rule at batch 65,536: 7,038 updates read as many examples as 14,076 updates of 32,768.
    cases += [
        Case("bert_pretrain", "recipe=mixed,phase=1", 7038, paper(5e-3 * 2**0.5, 7038, 14_076)),
        Case("bert_pretrain", "recipe=mixed,phase=2", 1561, paper(5e-3, 1561, 1561)),
        Case(
            "bert_pretrain",
            "recipe=nvidia,phase=1",
            7038,
            poly_warmup_scheduler(6e-3, 7038, 0.2843),
        ),
        Case(
            "bert_pretrain", "recipe=nvidia,phase=2", 1563, poly_warmup_scheduler(4e-3, 1563, 0.128)
        ),
        Case(
            "bert_pretrain",
            "recipe=deepspeed,phase=1",
            math.ceil(403e6 / 65_536),
            warmup_exp_decay_exp(11e-3, 10e-4, 0.06, 250),
        ),
        Case(
            "bert_pretrain",
            "recipe=deepspeed,phase=2",
            math.ceil(22e6 / 32_768),
            warmup_exp_decay_exp(2e-3, 0.0, 0.02, 150),
        ),
        # Devlin et al.: a warm-up of 10,000 of 1,000,000 updates.
        Case(
            "bert_pretrain",
            "optimizer=adamw,batch=512,phase=1",
            900_032,
            create_optimizer(1e-4, 900_032, 9000.32),
        ),
    ]
    total = int(SQUAD / 64 * 2.0)
    for optimizer, rate in (("lamb", 4e-4), ("adamw", 4e-5)):
        curve = create_optimizer(rate, total, int(total * 0.1))
        cases.append(Case("bert_squad", f"optimizer={optimizer}", total, curve, EXACT, SQUAD))
    return cases


def _small() -> list[Case]:
    total = math.ceil(30 * MNIST / 1024)
    cases = [
        Case("mnist_lenet", f"network={network},optimizer={optimizer}", total, curve, EXACT, MNIST)
        for network in ("lenet", "lenet5")
        for optimizer, curve in (
            ("lamb", create_optimizer(0.004, total, MNIST / 1024, 0.5)),
            ("adamw", create_optimizer(0.004, total, MNIST / 1024, 0.5)),
            ("adam", create_optimizer(0.004, total, MNIST / 1024, 0.5)),
            # At batch 8,192 the warm-up has 16 epochs; LEGW scales it to two epochs at 1,024.
            ("lars", create_optimizer(6.0 / 8**0.5, total, 2 * MNIST / 1024, 0.5)),
            ("momentum", mnist_momentum(0.08, total)),
            ("nesterov", mnist_momentum(0.08, total)),  # not in the author's code; same as momentum
            # SGD and AdaGrad are not there either: 0.025 and 0.01 at batch 64, times the square root of 16.
            ("sgd", create_optimizer(4 * 0.025, total, 0, 0.5)),
            ("adagrad", create_optimizer(4 * 0.01, total, 0, 0.5)),
        )
    ]
    for batch in (128, 512, 2048, 8192):
        k, total = batch / 128, math.ceil(25 * MNIST / batch)
        cases += [
            Case("mnist_lstm", f"batch={batch},rule={rule}", total, curve, EXACT, MNIST)
            for rule, curve in {
                "legw": legw(0.1 * k**0.5, 0.1 * MNIST / 128),
                "same": lambda t: np.full(t.shape, 0.1),
                "linear": lambda t, k=k: np.full(t.shape, 0.1 * k),
                "sqrt": lambda t, k=k: np.full(t.shape, 0.1 * k**0.5),
                "linear_poly": polynomial_warmup(0.1 * k, total, 5 * MNIST / batch),
            }.items()
        ]
    total = 24 * 97
    curves = {
        "lamb": triangular_lr(10 / 512, total, 6 * 97),
        "momentum": piecewise_linear([0, 5, 24], [0, 0.4, 0]),
        "adamw": triangular_lr(5 / 512, total, 5 * 97),
        "adam": triangular_lr(5 / 512, total, 5 * 97),
        "adagrad": lambda t: np.full(t.shape, 0.013),
        "lars": polynomial_warmup(4.0, total, 5 * 97),
    }
    return cases + [
        Case("cifar10", f"optimizer={optimizer}", total, curve, EXACT, CIFAR10)
        for optimizer, curve in curves.items()
    ]


def _ptb() -> list[Case]:
    """Schedules of tensorflow/models, tutorials/rnn/ptb/ptb_word_lm.py, with LEGW's warm-up."""
    words, cases = 929_589, []
    for size, batch, steps, epochs, at_full_rate, factor in (
        ("small", 20, 20, 13, 4, 0.5),
        ("small", 640, 20, 13, 4, 0.5),
        ("medium", 20, 35, 39, 6, 0.8),
        ("large", 160, 35, 55, 14, 1 / 1.15),
    ):
        windows = (words // batch - 1) // steps
        scale = batch / 20
        warmup, peak = 0.1 * scale * windows, scale**0.5

        def curve(
            t: np.ndarray,
            windows=windows,
            warmup=warmup,
            peak=peak,
            at_full_rate=at_full_rate,
            factor=factor,
        ) -> np.ndarray:
            epoch = np.floor(t / windows)
            decayed = peak * factor ** np.maximum(epoch + 1 - at_full_rate, 0)
            return np.where(t < warmup, peak * t / warmup, decayed)

        argument = f"size={size},batch={batch}"
        cases.append(Case("ptb", argument, epochs * windows, curve, EXACT, batch * windows))
    # The baseline of the LEGW paper: linear scaling, 5 epochs of warm-up, power 2.
    windows = (words // 640 - 1) // 20
    total, warmup = 13 * windows, 5 * windows

    def polynomial(t: np.ndarray) -> np.ndarray:
        left = (total - t) / (total - warmup)
        return np.where(t < warmup, 32 * t / warmup, 32 * np.clip(left, 0, 1) ** 2)

    case = Case("ptb", "rule=linear_poly,batch=640", total, polynomial, EXACT, 640 * windows)
    return [*cases, case]


def _imagenet() -> list[Case]:
    def resnet(argument: str, total: int, curve: Curve, within: float = EXACT) -> Case:
        return Case("imagenet_resnet", argument, total, curve, within, IMAGENET)

    cases = [
        resnet("recipe=author", 3519, triangular_lr(0.04, 3519, 782)),
        resnet(
            "optimizer=lars,recipe=mlperf,batch=32768",
            2983,
            poly_rate_schedule(31.2, 25, 32_768, 2983),
            ROUNDED,
        ),
        resnet(
            "optimizer=lars,recipe=mlperf,batch=65536",
            1738,
            poly_rate_schedule(24.699, 31, 65_536, 1738),
            ROUNDED,
        ),
        resnet(
            "optimizer=lars,recipe=mlperf_jax,batch=65536",
            1817,
            polynomial_learning_rate_fn(23.080977304670448, 33, 92),
            ROUNDED,
        ),
    ]
    for power in range(9, 16):
        batch = 2**power
        total, warmup = math.ceil(90 * IMAGENET / batch), 20 * IMAGENET / 32_768
        rate = 4 / (2 ** ((15 - power) / 2) * 100)
        cases.append(resnet(f"batch={batch}", total, triangular_lr(rate, total, warmup)))
    for batch, rate, epochs in (
        (8192, 10.0, 5),
        (16_384, 25.0, 5),
        (32_768, 32.0, 14),
        (65_536, 35.6, 40),
    ):
        total = math.ceil(90 * IMAGENET / batch)
        curve = poly_rate_schedule(rate, epochs, batch, total)
        # At 65,536 the decay has only 978 updates, so one update more or less makes a larger difference.
        within = ROUNDED if batch < 65_536 else 2 * ROUNDED
        cases.append(resnet(f"optimizer=lars,batch={batch}", total, curve, within))
    for batch in (256, 8192):
        total = math.ceil(90 * IMAGENET / batch)
        cases.append(resnet(f"optimizer=momentum,batch={batch}", total, goyal(batch)))
    for optimizer, batch, rate, epochs in (
        ("rmsprop", 4096, 0.016, 5),
        ("rmsprop", 8192, 0.016, 5),
        ("rmsprop", 16_384, 0.016, 5),
        ("lars", 16_384, 0.236, 50),
        ("lars", 32_768, 0.118, 50),
        ("lars", 65_536, 0.081, 43),
    ):
        total = math.ceil(350 * IMAGENET / batch)
        # At 16,384, a warm-up of 5 epochs has 391 updates: rounding it changes rates, one of them by more.
        kind, within, misses = (
            ("exponential", 3 * ROUNDED, 1) if optimizer == "rmsprop" else ("poly", ROUNDED, 0)
        )
        curve = build_learning_rate(rate * batch / 256, batch, epochs, kind, total)
        argument = f"size=b5,optimizer={optimizer},batch={batch}"
        cases.append(
            Case(
                name="imagenet_efficientnet",
                argument=argument,
                total=total,
                curve=curve,
                within=within,
                num_examples=IMAGENET,
                misses=misses,
            )
        )
    return cases


def _translation() -> list[Case]:
    cases = []
    for optimizer, rate in (("adam", 1e-3), ("lamb", 4e-3)):
        for batch in (256, 4096):
            total, factor = 2 * 14_000 * 256 // batch, (batch / 256) ** 0.5
            curve = halvings(rate * factor, total, 0.0145 * 14_000)
            argument = f"data=wmt16,optimizer={optimizer},batch={batch}"
            cases.append(Case("translation", argument, total, curve, EXACT, 14_000 * 256))
    return cases


CASES = [*_bert(), *_small(), *_imagenet(), *_ptb(), *_translation()]


def _config(name: str, argument: str) -> ConfigDict:
    return tiny.recipe_file(tiny.ROOT / "configs" / f"{name}.py").get_config(argument)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_update_has_the_rate_of_the_source(case: Case) -> None:
    actual = resolve(_config(case.name, case.argument), case.num_examples).learning_rates
    expected = case.curve(np.arange(case.total, dtype=np.float64))
    assert len(actual) == case.total
    peak = expected.max()
    misses = np.abs(actual - expected) > case.within * peak
    assert misses.sum() <= case.misses, (
        f"{misses.sum()} of {case.total} updates, the first {misses.argmax()}: "
        f"{actual[misses.argmax()]} for {expected[misses.argmax()]}"
    )
    assert actual.sum() == pytest.approx(expected.sum(), rel=max(case.within, 1e-5))


def test_no_recipe_is_left_out() -> None:
    def arguments(name: str) -> str:
        return " ".join(f"{case.argument}," for case in CASES if case.name == name)

    def rows(file: str) -> Any:
        return tiny.recipe_file(tiny.ROOT / "configs" / f"{file}.py")

    bert, resnet = rows("bert_pretrain"), rows("imagenet_resnet")
    for recipe in bert.RECIPES:
        for phase in (1, 2):
            assert f"recipe={recipe},phase={phase}," in arguments("bert_pretrain")
    for recipe, batch in resnet.MLPERF:
        assert f"recipe={recipe},batch={batch}," in arguments("imagenet_resnet")
    assert set(resnet.RECIPES) == {"lamb", "lars", "momentum"}
    assert arguments("imagenet_resnet").count("optimizer=lars,batch=") == len(resnet.LARS_TPU)
    for batch in rows("imagenet_efficientnet").LARS:
        assert f"optimizer=lars,batch={batch}," in arguments("imagenet_efficientnet")
    for file in ("mnist_lenet", "cifar10", "bert_squad", "translation"):
        for optimizer in rows(file).OPTIMIZERS:
            assert f"optimizer={optimizer}," in arguments(file)
    for rule in rows("mnist_lstm").RULES:
        assert f"rule={rule}," in arguments("mnist_lstm")
    files = {path.stem for path in (tiny.ROOT / "configs").glob("*.py")} - {"__init__"}
    without_paper = {"digits", "image_folder"}  # recipes without a paper
    assert files - {case.name for case in CASES} == without_paper
