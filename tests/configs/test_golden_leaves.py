"""Tests the treatment of every network's parameters by every optimizer, against text files.

To update the files: python -m tests.configs.test_golden_leaves
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lamb_tpu import models
from lamb_tpu.optim import factory, leaves
from tests import tiny
from tests.configs.test_golden_tables import TABLES, shapes

FOLDER = pathlib.Path(__file__).parent.parent / "golden_leaves"
# Sizes of ResNet and EfficientNet that are not in TABLES.
SIZES = [
    name
    for name in models.MODULES
    if name.startswith(("resnet", "efficientnet"))
    and name not in ("resnet18", "resnet50", "efficientnet_b0")
]


def network(name: str) -> tuple[Any, Any]:
    if name in SIZES:
        model = models.build(name, num_classes=1000)
        image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
        return jax.eval_shape(model.init, jax.random.key(0), image)["params"], "resnet"
    file, argument, _, (optimizer, *_) = TABLES[name]
    get_config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config
    config = get_config(f"{argument},optimizer={optimizer}")
    return shapes(config.model.to_json(), name), config.optimizer.to_dict()["rules"]


def lines(name: str) -> str:
    params, rules = network(name)
    actual = []
    for optimizer in factory.OPTIMIZERS:
        config = {"name": optimizer, "rules": rules}
        try:
            state = jax.eval_shape(factory.make_optimizer(config, 0.1).init, params)
        except ValueError as error:
            actual.append(f"{optimizer} | rejected: {error}")
            continue
        arguments = factory.arguments_of(config)
        report = leaves.report(optimizer, state, params, rules, arguments)
        actual.append(f"{optimizer} | {report.line()}")
    return "\n".join(actual) + "\n"


# Computing the shapes of hundreds of leaves for 20 optimizers takes seconds.
LONG = ("bert_pretrain", "imagenet_efficientnet_lars", *SIZES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in (*TABLES, *SIZES)],
)
def test_leaves(name: str) -> None:
    assert lines(name) == (FOLDER / f"{name}.txt").read_text()


def test_every_network_has_a_file() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*TABLES, *SIZES}
    used = {network_of(name) for name in TABLES} | {*SIZES}
    assert used == set(models.MODULES)


def network_of(name: str) -> str:
    file, argument, _, (optimizer, *_) = TABLES[name]
    get_config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config
    return get_config(f"{argument},optimizer={optimizer}").model.name


if __name__ == "__main__":
    for name in (*TABLES, *SIZES):
        (FOLDER / f"{name}.txt").write_text(lines(name))
