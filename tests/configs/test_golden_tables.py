"""Which parameters each recipe has, which decay and which adapt, against text files.

To change one on purpose: python -m tests.configs.test_golden_tables
"""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.optim import parameters
from tests import tiny

FOLDER = pathlib.Path(__file__).parent.parent / "golden_tables"
# A recipe with its argument, and the shape of one of its images.
TABLES = {
    "digits": ("digits.py", "", (8, 8, 1)),
    "mnist_lenet": ("mnist_lenet.py", "", (28, 28, 1)),
    "mnist_lenet5": ("mnist_lenet.py", "network=lenet5", (28, 28, 1)),
}


def table(config: ConfigDict, shape: tuple[int, ...]) -> str:
    model = models.build(**config.model)
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    return parameters.table(variables["params"], config.optimizer.to_dict()["rules"]) + "\n"


@pytest.mark.parametrize("optimizer", ["lamb", "adamw", "momentum"])
@pytest.mark.parametrize("name", TABLES)
def test_table(name: str, optimizer: str) -> None:
    file, argument, shape = TABLES[name]
    get_config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config
    config = get_config(f"{argument},optimizer={optimizer}")
    assert table(config, shape) == (FOLDER / f"{name}.txt").read_text()


def test_every_recipe_has_a_table() -> None:
    files = {file for file, *_ in TABLES.values()}
    assert files == {p.name for p in (tiny.ROOT / "configs").glob("*.py")} - {"__init__.py"}
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLES)


if __name__ == "__main__":
    for name, (file, argument, shape) in TABLES.items():
        config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config(argument)
        (FOLDER / f"{name}.txt").write_text(table(config, shape))
