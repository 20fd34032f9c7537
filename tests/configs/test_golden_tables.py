"""Which parameters each recipe has, which decay and which adapt, against text files.

To change one on purpose: python -m tests.configs.test_golden_tables
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.optim import parameters
from tests import tiny

FOLDER = pathlib.Path(__file__).parent.parent / "golden_tables"
Inputs = Any


def _image(*shape: int) -> Inputs:
    return jax.ShapeDtypeStruct((1, *shape), jnp.float32)


_TOKENS = {
    name: jax.ShapeDtypeStruct((1, 8), jnp.int32)
    for name in ("input_ids", "token_type_ids", "attention_mask")
}
_ALL, _BERT = ("lamb", "adamw", "momentum"), ("lamb", "adamw")
# A recipe with its argument, what its network takes, and its optimizers.
TABLES = {
    "digits": ("digits.py", "", _image(8, 8, 1), _ALL),
    "mnist_lenet": ("mnist_lenet.py", "", _image(28, 28, 1), _ALL),
    "mnist_lenet5": ("mnist_lenet.py", "network=lenet5", _image(28, 28, 1), _ALL),
    "bert_pretrain": ("bert_pretrain.py", "", _TOKENS, _BERT),
    "bert_pretrain_scanned": ("bert_pretrain.py", "scan", _TOKENS, _BERT),
    "bert_squad": ("bert_squad.py", "size=base", _TOKENS, _BERT),
}


def table(config: ConfigDict, inputs: Inputs) -> str:
    model = models.build(**config.model)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
    return parameters.table(variables["params"], config.optimizer.to_dict()["rules"]) + "\n"


@pytest.mark.parametrize(
    ("name", "optimizer"), [(name, chosen) for name, (*_, known) in TABLES.items()
                            for chosen in known]
)
def test_table(name: str, optimizer: str) -> None:
    file, argument, inputs, _ = TABLES[name]
    get_config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config
    config = get_config(f"{argument},optimizer={optimizer}")
    assert table(config, inputs) == (FOLDER / f"{name}.txt").read_text()


def test_every_recipe_has_a_table() -> None:
    files = {file for file, *_ in TABLES.values()}
    assert files == {p.name for p in (tiny.ROOT / "configs").glob("*.py")} - {"__init__.py"}
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLES)


if __name__ == "__main__":
    for name, (file, argument, inputs, _) in TABLES.items():
        config = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config(argument)
        (FOLDER / f"{name}.txt").write_text(table(config, inputs))
