"""Tests the image recipes against rows of the papers' tables; expected values are calculated by hand."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.data.images.arrays import ArrayOptions
from lamb_tpu.data.images.source import ImageOptions
from lamb_tpu.data.registry import read_options
from lamb_tpu.errors import UserError
from lamb_tpu.optim.factory import make_optimizer
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import Recipe, resolve
from lamb_tpu.spec import parse
from lamb_tpu.tasks.classification import Classification
from tests import tiny

IMAGENET, CIFAR10 = 1_281_167, 50_000


def _config(name: str, argument: str) -> ConfigDict:
    config = tiny.recipe_file(tiny.ROOT / "configs" / f"{name}.py").get_config(argument)
    parse(config)
    return config


def _recipe(name: str, argument: str, num_examples: int = IMAGENET) -> Recipe:
    config = _config(name, argument)
    recipe = resolve(config, num_examples)
    resolve_optimizer(parse(config).optimizer).make(recipe)
    return recipe


# Batch size, peak rate and warm-up epochs, from the appendix of arXiv:1904.00962.
LAMB = (
    (512, 4 / (2**3.0 * 100), 0.3125),
    (1024, 4 / (2**2.5 * 100), 0.625),
    (2048, 4 / (2**2.0 * 100), 1.25),
    (4096, 4 / (2**1.5 * 100), 2.5),
    (8192, 4 / (2**1.0 * 100), 5.0),
    (16_384, 4 / (2**0.5 * 100), 10.0),
    (32_768, 0.04, 20.0),
)


@pytest.mark.parametrize(("batch", "rate", "epochs"), LAMB)
def test_untuned_lamb(batch: int, rate: float, epochs: float) -> None:
    recipe = _recipe("imagenet_resnet", f"batch={batch}")
    assert recipe.peak_learning_rate == pytest.approx(rate)
    assert recipe.warmup_steps == pytest.approx(epochs * IMAGENET / batch)
    assert recipe.total_steps == math.ceil(90 * IMAGENET / batch)


def test_the_authors_run() -> None:
    recipe = _recipe("imagenet_resnet", "recipe=author")
    assert (recipe.warmup_steps, recipe.total_steps) == (782, 3519)
    # optimization.py: linear up to step 782, then down to 0 at step 3,519.
    for step, rate in ((0, 0.0), (391, 0.02), (782, 0.04), (2150, 0.04 * 1369 / 2737)):
        assert recipe.learning_rates[step] == pytest.approx(rate, rel=1e-5)
    optimizer = _config("imagenet_resnet", "recipe=author").optimizer
    assert (optimizer.weight_decay, optimizer.preset) == (1.5, "author")


# Batch size, peak rate and epochs of warm-up (out of 90) in tensorflow/tpu.
@pytest.mark.parametrize(
    ("batch", "rate", "epochs"),
    [
        (8192, 10.0, 5),
        (16_383, 10.0, 5),
        (16_384, 25.0, 5),
        (32_768, 32.0, 14),
        (65_536, 35.6, 40),
        (131_072, 35.6, 40),
    ],
)
def test_lars_of_the_tpu_code(batch: int, rate: float, epochs: int) -> None:
    recipe = _recipe("imagenet_resnet", f"optimizer=lars,batch={batch}")
    assert recipe.peak_learning_rate == rate
    assert recipe.warmup_steps == pytest.approx(epochs * IMAGENET / batch)
    assert recipe.total_steps == math.ceil(90 * IMAGENET / batch)
    middle = round((recipe.total_steps + recipe.warmup_steps) / 2)
    assert recipe.learning_rates[middle] == pytest.approx(rate / 4, rel=0.02)  # (1/2) squared
    assert float(recipe.learning_rate(recipe.total_steps)) == pytest.approx(1e-4)


# Recipe and batch size; from the logs: peak rate, and the number of updates of warm-up and decay.
@pytest.mark.parametrize(
    ("name", "batch", "rate", "warmup", "decay"),
    [
        ("mlperf", 32_768, 31.2, 25 * IMAGENET // 32_768, 2007),
        ("mlperf", 65_536, 24.699, 31 * IMAGENET // 65_536, 1133),
        # In the JAX entry, an epoch is a quarter of 79 updates.
        ("mlperf_jax", 65_536, 23.080977304670448, 33 * 79 / 4, 1166.25),
    ],
)
def test_mlperf(name: str, batch: int, rate: float, warmup: float, decay: float) -> None:
    recipe = _recipe("imagenet_resnet", f"optimizer=lars,recipe={name},batch={batch}")
    assert recipe.peak_learning_rate == rate
    assert recipe.warmup_steps == warmup
    assert recipe.total_steps == warmup + decay - 1
    assert recipe.learning_rates[-1] == pytest.approx(1e-4, abs=1e-4)


@pytest.mark.parametrize("batch", [256, 8192])
def test_momentum(batch: int) -> None:
    recipe = _recipe("imagenet_resnet", f"optimizer=momentum,batch={batch}")
    peak, epoch = 0.1 * batch / 256, IMAGENET / batch
    assert recipe.warmup_steps == pytest.approx(5 * epoch)
    rates = recipe.learning_rates
    assert len(rates) == math.ceil(90 * epoch)
    assert rates[0] == pytest.approx(0.1)
    for at, part in ((5.1, 1), (29.9, 1), (30.1, 0.1), (59.9, 0.1), (60.1, 0.01), (80.1, 1e-3)):
        assert rates[round(at * epoch)] == pytest.approx(part * peak, rel=1e-5)


# Table 2 of arXiv:2011.00071: optimizer, batch, rate per 256 examples, warm-up epochs, TPU cores.
@pytest.mark.parametrize("size", ["b2", "b5"])
@pytest.mark.parametrize(
    ("optimizer", "batch", "rate", "epochs", "cores"),
    [
        ("rmsprop", 4096, 0.016, 5, 128),
        ("rmsprop", 8192, 0.016, 5, 256),
        ("rmsprop", 16_384, 0.016, 5, 512),
        ("lars", 16_384, 0.236, 50, 512),
        ("lars", 32_768, 0.118, 50, 1024),
        ("lars", 65_536, 0.081, 43, 1024),
    ],
)
def test_efficientnet(
    size: str, optimizer: str, batch: int, rate: float, epochs: int, cores: int
) -> None:
    argument = f"size={size},optimizer={optimizer},batch={batch}"
    recipe = _recipe("imagenet_efficientnet", argument)
    peak = rate * batch / 256
    assert recipe.peak_learning_rate == pytest.approx(peak)
    assert recipe.warmup_steps == pytest.approx(epochs * IMAGENET / batch)
    assert recipe.total_steps == math.ceil(350 * IMAGENET / batch)
    rates = recipe.learning_rates
    if optimizer == "lars":
        assert rates[-1] == pytest.approx(0.1, rel=0.01)
        middle = round((recipe.total_steps + recipe.warmup_steps) / 2)
        assert rates[middle] == pytest.approx(0.1 + (peak - 0.1) / 4, rel=0.01)
    else:
        for at, drops in ((5.1, 2), (7.1, 2), (7.3, 3), (349.0, 145)):
            actual = rates[round(at * IMAGENET / batch)]
            assert actual == pytest.approx(peak * 0.97**drops, rel=1e-4)
    config = _config("imagenet_efficientnet", argument)
    replicas, line = models.batch_norm_groups(config.model.to_dict(), batch, cores)
    assert replicas == 32, line


def test_efficientnet_keeps_the_l2_loss_beside_the_decay_of_lars() -> None:
    """main.py adds the L2 loss for every optimizer; a separate flag sets the decay of LARS."""
    lars = _config("imagenet_efficientnet", "optimizer=lars,batch=32768").optimizer
    assert (lars.l2, lars.l2_rules, lars.weight_decay) == (1e-5, "resnet", 1e-5)
    fields = {**lars}
    del fields["learning_rate"]
    params = {
        "stem_conv": {"kernel": jnp.full((2, 2), 0.5)},
        "stem_norm": {"scale": jnp.ones(2)},
        "output": {"bias": jnp.full(3, 2.0)},
    }
    tx = make_optimizer(fields, 10.0, params)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    # The gradient is zero, so the update is that of the L2 term and LARS's decay, each 1e-5 w.
    np.testing.assert_allclose(
        updates["stem_conv"]["kernel"], -10.0 * 0.001 * 1 / 2e-5 * 2e-5 * 0.5, rtol=1e-5
    )
    np.testing.assert_allclose(updates["output"]["bias"], -10.0 * 1e-5 * 2.0, rtol=1e-5)
    assert not updates["stem_norm"]["scale"].any()


@pytest.mark.parametrize("argument", ["", "optimizer=lars", "optimizer=momentum"])
def test_crops_and_resizing_of_resnet(argument: str) -> None:
    options = _config("imagenet_resnet", argument).data.options
    # fb.resnet.torch, the source of momentum's recipe, only requires a crop to cover 0.08 of the image.
    assert options.min_covered == (0.0 if "momentum" in argument else 0.1)
    assert options.resize == "bicubic"
    assert _config("imagenet_efficientnet", "").data.options.min_covered == 0.1
    assert _config("imagenet_efficientnet", "").data.options.resize == "bicubic"


# Tan and Le, table of efficientnet_builder.py: image size, dropout.
@pytest.mark.parametrize(
    ("size", "pixels", "dropout"),
    [
        ("b0", 224, 0.2),
        ("b1", 240, 0.2),
        ("b2", 260, 0.3),
        ("b3", 300, 0.3),
        ("b4", 380, 0.4),
        ("b5", 456, 0.4),
        ("b6", 528, 0.5),
        ("b7", 600, 0.5),
    ],
)
def test_efficientnet_sizes(size: str, pixels: int, dropout: float) -> None:
    config = _config("imagenet_efficientnet", f"size={size},augment=randaugment")
    assert config.data.options["size"] == pixels
    assert config.model.dropout_rate == dropout
    assert config.model.stochastic_depth_rate == 0.2
    assert config.data.options.policy == "randaugment"


# Optimizer, batch size, peak rate, and epochs of warm-up (out of 24 epochs of training).
@pytest.mark.parametrize(
    ("optimizer", "batch", "rate", "epochs"),
    [
        ("lamb", 512, 10 / 512, 6),
        ("lamb", 16_384, 10 / 512 * 32**0.5, 6),
        ("momentum", 512, 0.4, 5),
        ("momentum", 16_384, 12.8, 5),
        ("lars", 512, 4.0, 5),
        ("lars", 16_384, 4 * 32**0.5, 5),
        ("adamw", 512, 5 / 512, 5),
        ("adam", 512, 5 / 512, 5),
        ("adagrad", 512, 0.013, 0),
    ],
)
def test_cifar10(optimizer: str, batch: int, rate: float, epochs: int) -> None:
    recipe = _recipe("cifar10", f"optimizer={optimizer},batch={batch}", CIFAR10)
    assert recipe.peak_learning_rate == pytest.approx(rate)
    assert recipe.warmup_steps == pytest.approx(epochs * CIFAR10 / batch)
    assert recipe.total_steps == math.ceil(24 * CIFAR10 / batch)
    constant = bool(np.ptp(recipe.learning_rates) == 0)
    assert constant == (optimizer == "adagrad")
    momentum = _config("cifar10", f"optimizer={optimizer},batch={batch}").model.momentum
    assert momentum == pytest.approx({512: 0.9, 16_384: 0.9**32}[batch])


def test_a_shorter_run_shrinks_its_schedule() -> None:
    full, shorter = (
        _recipe("cifar10", f"optimizer=lamb,epochs={epochs}", CIFAR10) for epochs in (24, 3)
    )
    assert shorter.total_steps == math.ceil(3 * CIFAR10 / 512)
    assert shorter.warmup_steps == pytest.approx(full.warmup_steps / 8)
    assert shorter.peak_learning_rate == full.peak_learning_rate
    with pytest.raises(UserError, match="config.duration='0 epochs' is less than one update"):
        _recipe("cifar10", "epochs=0", CIFAR10)


def test_a_summed_loss_makes_the_same_steps() -> None:
    """The recipe's settings for mean losses give the steps of the authors' settings for summed losses."""
    grad = {"kernel": jnp.linspace(-2e-3, 3e-3, 12).reshape(3, 4)}
    params = {"kernel": jnp.linspace(-0.2, 0.3, 12).reshape(3, 4)}

    def steps(optimizer: str, scale: float, **changes: float) -> np.ndarray:
        config = _config("cifar10", f"optimizer={optimizer}")
        config.optimizer.update(changes)
        fields = {**config.optimizer, "rules": "all"}
        rate = fields.pop("learning_rate")
        tx = make_optimizer(fields, rate)
        state, moved = tx.init(params), []
        for _ in range(3):
            updates, state = tx.update(jax.tree.map(lambda g: scale * g, grad), state, params)
            moved.append(updates["kernel"])
        return np.stack(moved)

    np.testing.assert_allclose(steps("lamb", 1.0), steps("lamb", 512.0, eps=1e-6), rtol=1e-5)
    np.testing.assert_allclose(
        steps("adagrad", 1.0), steps("adagrad", 512.0, initial_accumulator_value=0.1), rtol=1e-5
    )


ARGUMENTS = [
    ("imagenet_resnet", "", ImageOptions),
    ("imagenet_resnet", "optimizer=lars", ImageOptions),
    ("imagenet_efficientnet", "", ImageOptions),
    ("cifar10", "", ArrayOptions),
    ("cifar10", "data=cifar10_jpeg,model=resnet18", ArrayOptions),
]


@pytest.mark.parametrize(("name", "argument", "kind"), ARGUMENTS)
def test_components_accept_their_fields(name: str, argument: str, kind: Any) -> None:
    config = _config(name, argument)
    assert type(read_options(config.data.name, config.data.options.to_dict())) is kind
    fields = config.task.to_dict()
    fields.pop("name")
    assert set(fields) <= {field.name for field in dataclasses.fields(Classification)}
    Classification(models.build(**config.model), **fields)


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("imagenet_resnet", "size=51", "size is 51, which is unknown; use 18, 34, 50, 101 or 152"),
        (
            "imagenet_resnet",
            "recipe=tpu",
            "recipe is 'tpu', which is unknown; use untuned or author",
        ),
        ("imagenet_resnet", "recipe=author,batch=512", "batch is 512, which is unknown; use 32768"),
        ("imagenet_resnet", "optimizer=lars,recipe=mlperf,batch=4096", "use 32768 or 65536"),
        ("imagenet_efficientnet", "size=b8", "size is 'b8', which is unknown; use b0, b1"),
        (
            "imagenet_efficientnet",
            "optimizer=lars",
            "batch is 4096, which is unknown; use 16384, 32768 or 65",
        ),
        (
            "imagenet_efficientnet",
            "augment=mix",
            "augment is 'mix', which is unknown; use autoaugment",
        ),
        ("cifar10", "data=svhn", "data is 'svhn', which is unknown; use cifar10 or cifar10_jpeg"),
    ],
)
def test_errors(name: str, argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _config(name, argument)
