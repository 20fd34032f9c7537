"""Tests that the smoke variant of every recipe trains to its end, and that the full recipe resolves."""

import pathlib
import re

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import models
from lamb_tpu.errors import UserError
from lamb_tpu.run import phases
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import resolve
from lamb_tpu.spec import parse
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some

RECIPES = sorted(
    path for path in (tiny.ROOT / "configs").glob("*.py") if path.name != "__init__.py"
)
NAMES = [path.stem for path in RECIPES]


def test_there_are_recipes() -> None:
    vision = {"imagenet_resnet", "imagenet_efficientnet", "cifar10", "image_folder"}
    text = {"bert_pretrain", "bert_squad", "ptb", "translation"}
    assert vision | text | {"digits", "mnist_lenet"} <= set(NAMES)


@pytest.mark.optimized  # convolutions are slow without compiler optimizations
@pytest.mark.parametrize(
    "name", some([*NAMES, "translation:data=wmt16"], ("digits", "mnist_lenet"))
)
def test_smoke_trains_and_the_loss_falls(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One device, as on a user's CPU: each of eight simulated devices would compute the entire update.
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    file, _, argument = name.partition(":")
    path = RECIPES[NAMES.index(file)]
    config = tiny.recipe_file(path).get_config(f"{argument},smoke" if argument else "smoke")
    config.log.tensorboard = False
    embedded = ("digits", "python_docs", "python_docs_cloze", "python_docs_words", "grammar_de_en")
    assert config.data.name in embedded  # no download
    metrics = train(config, tmp_path, quiet=True)
    folders = [tmp_path / name for name in sorted(config.phases)] or [tmp_path]
    for folder in folders:
        losses = [r["loss"] for r in read_records(folder / "metrics.jsonl", "train")]
        assert losses[-1] < losses[0]
        assert (folder / "checkpoints").is_dir()
    assert metrics.get("loss", losses[-1]) < losses[0]
    last = read_records(folders[-1] / "metrics.jsonl", "eval")[-1]
    assert metrics == {name: last[name] for name in metrics} != {}


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_full_recipe_resolves(path: pathlib.Path) -> None:
    config: ConfigDict = tiny.recipe_file(path).get_config()
    parse(config)
    models.build(**config.model)
    for phase in phases.split(config):
        recipe = resolve(phase.config, 60_000)
        resolve_optimizer(phase.config.optimizer).make(recipe)
        assert recipe.total_steps > 100
    assert config_lib.flatten(config) == config_lib.flatten(tiny.recipe_file(path).get_config(""))


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_docstring_has_a_command_that_names_the_file(path: pathlib.Path) -> None:
    module = tiny.recipe_file(path)
    commands = re.findall(r"python -m lamb_tpu\.train --config=(\S+)", module.__doc__)
    assert commands
    for command in commands:
        file, _, argument = command.partition(":")
        assert file == f"configs/{path.name}"
        module.get_config(argument)
    assert re.search(r"arXiv|[Ss]ource", module.__doc__)
    assert re.search(r"measured\s+here|not\s+run|quoted", module.__doc__)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_typo_in_the_argument(path: pathlib.Path) -> None:
    get_config = tiny.recipe_file(path).get_config
    with pytest.raises(UserError, match="'bath', which is unknown; use .*batch"):
        get_config("bath=64")
    with pytest.raises(UserError, match="batch is 'many', which has the wrong type; use a whole"):
        get_config("batch=many")
    with pytest.raises(UserError, match="'lamp', which is unknown; use .*(lamb|lars|momentum)"):
        get_config("optimizer=lamp")


def test_batch_rescales_rate_and_warm_up() -> None:
    get_config = tiny.recipe_file(tiny.ROOT / "configs" / "mnist_lenet.py").get_config
    base, large = (resolve(get_config(f"batch={size}"), 60_000) for size in (1024, 4096))
    assert base.total_steps == 1758 and base.peak_learning_rate == pytest.approx(0.004)
    assert large.peak_learning_rate == pytest.approx(0.008)  # LEGW: sqrt(4) times the rate
    assert large.warmup_steps == pytest.approx(base.warmup_steps) == pytest.approx(60_000 / 1024)
