"""Tests of the site's generated pages (recipes, components, keys), and of the code in the guides."""

import ast
import pathlib
import re

import pytest

from docs import generated
from lamb_tpu import spec_keys
from lamb_tpu.reproduce import loading
from lamb_tpu.run.categories import REGISTRIES
from tests.shared import ROOT

CONFIGS = ROOT / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.fixture(scope="module")
def recipes() -> dict[str, generated.Recipe]:
    tables = loading.load_all(loading.folder())
    chosen = {key: tables[key] for key in ("lamb/mnist", "demo/scaling", "lars/resnet50")}
    return {recipe.name: recipe for recipe in generated.recipes(CONFIGS, chosen)}


def test_every_recipe_has_a_page(recipes: dict[str, generated.Recipe]) -> None:
    assert sorted(recipes) == NAMES
    overview = generated.overview_page(list(recipes.values()))
    for name, recipe in recipes.items():
        assert f"\n## [{name}]({name}.md)\n\n{recipe.title}.\n" in overview
        assert f"\n{name}\n" in overview.rpartition("{toctree}")[2]
        page = generated.recipe_page(recipe)
        assert page.startswith(f"# {name}\n\n{recipe.title}.\n")
        assert recipe.command in page and recipe.arguments.partition("\n")[0][12:] in page
        code = page.rpartition("```python\n")[2].partition("```")[0]
        assert any(isinstance(node, ast.FunctionDef) for node in ast.parse(code).body)


def test_a_recipe_has_the_values_of_its_tables(recipes: dict[str, generated.Recipe]) -> None:
    paper, small = recipes["mnist_lenet"].entries
    assert (paper.scale.name, small.scale.name) == ("paper", "small")
    assert paper.paper == "0.9928 to 0.9945 (5 of 5 cells)" and paper.numbers[0] == 5
    assert re.fullmatch(r"0\.\d{4} to 0\.\d{4} \(3 of 5 cells\)", paper.measured)
    assert "2 CPU cores" in paper.cost
    page = generated.recipe_page(recipes["mnist_lenet"])
    assert "[lamb/mnist](../../experiments/report/lamb-mnist.md)" in page
    assert "https://arxiv.org/abs/1904.00962" in page
    (digits,) = recipes["digits"].entries
    assert digits.paper == "" and digits.measured.endswith("3 diverged")
    assert recipes["imagenet_resnet"].entries[0].measured == ""


def test_the_page_of_keys_has_an_entry_for_each_key() -> None:
    page = generated.keys_page("# Keys\n\nText.")
    assert page.startswith("# Keys\n\nText.\n\n## config\n")
    entries = re.findall(r"^```\{confval\} (.*)$", page, re.MULTILINE)
    assert {f"config.{key.path}" for key in spec_keys.keys()} <= set(entries)
    assert len(entries) == len(set(entries))
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings)) and "config.mesh" in headings
    assert "```{confval} config.mesh.fsdp\n:type: whole number" in page


def test_the_page_of_components_has_every_field() -> None:
    page = generated.components_page(REGISTRIES.values())
    for section, registry in REGISTRIES.items():
        for name in registry:
            assert f"\n### {name}\n" in page
            for field in registry.fields(name):
                assert f"| `config.{section}.{field}` |" in page
    assert "| `config.optimizer.b2` | a number | `0.999` |" in page
    assert "| `config.optimizer.learning_rate` | a number | none (required) |" in page


GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_the_code_of_a_guide_runs(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    if path.stem == "records":  # the code on this page reads a record that the page shows
        record = re.findall(r'^\{"step".*"eval".*\}$', path.read_text(), re.MULTILINE)
        (tmp_path / "runs" / "digits").mkdir(parents=True)
        (tmp_path / "runs" / "digits" / "metrics.jsonl").write_text("\n".join([*record, ""]))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)
    assert blocks or path.stem in ("custom_parts", "large_batches", "packages")
