"""Generates the site's pages about recipes, components and config keys, from code and records."""

import ast
import inspect
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lamb_tpu import field_types, keys, spec_keys
from lamb_tpu.components import Registry
from lamb_tpu.reproduce import summary as summary_lib
from lamb_tpu.reproduce import timing
from lamb_tpu.reproduce.report import pages
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary
from lamb_tpu.reproduce.tables import Scale, Table

_ARXIV = re.compile(r"(?:arXiv:)?\b(\d{4}\.\d{5})\b")


class Entry(NamedTuple):
    """A table at one of its scales, if the runs at that scale use the recipe.

    Attributes:
      table: the table.
      scale: the scale.
      numbers: the number of cells with a value from the paper, and the number of cells with a mean
        measured here.
      paper: the range of the paper's values, such as '0.9933 to 0.9945 (3 of 5 cells)'; '' if the
        paper has none.
      measured: the range of the means measured here, in the same form.
      cost: hardware and time of a run; '' if unknown.
    """

    table: Table
    scale: Scale
    numbers: tuple[int, int]
    paper: str
    measured: str
    cost: str


class Recipe(NamedTuple):
    """A file in configs/.

    Attributes:
      name: the name that `--config` takes.
      text: the file's docstring.
      arguments: the docstring of the file's function `get_config`.
      source: the file's code.
      entries: the tables that use the recipe, in the order of `rank`.
    """

    name: str
    text: str
    arguments: str
    source: str
    entries: tuple[Entry, ...] = ()

    @property
    def title(self) -> str:
        """The first sentence of the file's docstring, without the full stop."""
        return re.split(r"\.(?:\s|$)", " ".join(self.text.split()))[0]

    @property
    def papers(self) -> list[str]:
        """The arXiv identifiers in the file's docstring."""
        return list(dict.fromkeys(_ARXIV.findall(self.text)))

    @property
    def command(self) -> str:
        """The command that trains the recipe."""
        return f"lamb_tpu train --config={self.name} --workdir=runs/{self.name}"

    def rank(self, entry: Entry) -> tuple[bool, int, bool, int, int]:
        """Returns the sort key of an entry.

        Entries that have values come first. Further criteria, in this order, are the position of the
        table's paper in `papers`, whether the cost is known, and the number of values.
        """
        papers, arxiv = self.papers, entry.table.paper.arxiv
        order = papers.index(arxiv) if arxiv in papers else len(papers)
        published, measured = entry.numbers
        return not any(entry.numbers), order, not entry.cost, -published, -measured


def recipes(folder: pathlib.Path, tables: Mapping[str, Table]) -> list[Recipe]:
    """Reads every recipe in a folder, with the tables that use it and the records of these tables."""
    entries = [
        (scale, Entry(table, scale, *_values(table, scale)))
        for table in tables.values()
        for scale in table.measured_scales()
    ]
    found = []
    for path in sorted(folder.glob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        (function,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "get_config"
        )
        recipe = Recipe(
            name=path.stem,
            text=ast.get_docstring(tree) or "",
            arguments=ast.get_docstring(function) or "",
            source=source,
        )
        used = [
            entry
            for scale, entry in entries
            if path.stem in {stage.partition(":")[0] for stage in scale.stages}
        ]
        found.append(recipe._replace(entries=tuple(sorted(used, key=recipe.rank))))
    return found


def _values(table: Table, scale: Scale) -> tuple[tuple[int, int], str, str, str]:
    """Returns the fields `numbers`, `paper`, `measured` and `cost` of an `Entry`."""
    cells = summary_lib.summaries(table, scale, Results(table))
    published = [
        value
        for cell in cells
        if isinstance(value := cell.cell.published.get(scale.metric.key), (int, float))
    ]
    means = [cell.mean for cell in cells if cell.mean is not None]
    diverged = sum(bool(cell.values) and cell.mean is None for cell in cells)
    measured = _span(means, scale, len(cells))
    if diverged:
        measured += f"{', ' if measured else ''}{diverged} diverged"
    numbers = len(published), len(means)
    return numbers, _span(published, scale, len(cells)), measured, _cost(scale, cells)


def _span(values: Iterable[float], scale: Scale, cells: int) -> str:
    ordered = sorted(values)
    if not ordered:
        return ""
    ends = dict.fromkeys(
        summary_lib.shown(value, scale.metric) for value in (ordered[0], ordered[-1])
    )
    return f"{' to '.join(ends)} ({len(ordered)} of {cells} cells)"


def _cost(scale: Scale, cells: Iterable[Summary]) -> str:
    text = timing.cost(scale, [record for cell in cells for record in cell.records])
    return text.replace("; processor not recorded", "")


def recipe_page(recipe: Recipe) -> str:
    """Returns the page of a recipe, as Markdown."""
    lines = [
        f"# {recipe.name}",
        "",
        f"{recipe.title}.",
        "",
        f"**Papers**: {_links(recipe)}.",
        "",
        "```sh",
        recipe.command,
        "```",
        "",
        "**Arguments** of `--config`, after the name and a colon:",
        "",
        "```text",
        recipe.arguments.removeprefix("Arguments: "),
        "```",
        "",
    ]
    if recipe.entries:
        lines += ["## Expected metric and cost", ""]
        for entry in recipe.entries:
            lines += [
                f"[{entry.table.key}](../../experiments/report/{pages.slug(entry.table.key)}.md), "
                f"scale {entry.scale.name}: {entry.table.title}",
                f": {entry.scale.metric.label}: {_expected(entry)}. "
                f"Cost: {entry.cost or 'unknown'}.",
                "",
            ]
        lines += ["The linked page of a table has its cells, seeds and commands.", ""]
    lines += ["## Sources and settings", "", "```text", recipe.text, "```", ""]
    code = recipe.source.partition('"""')[2].partition('"""')[2].strip()
    lines += ["## Code", "", "```python", code, "```", ""]
    return "\n".join(lines)


def overview_page(found: Iterable[Recipe]) -> str:
    """Returns the page that lists the recipes, as Markdown."""
    lines = [
        "# All recipes",
        "",
        "Each recipe is a config. The page of a recipe has its arguments, every table that uses "
        "it, and its code. [Recipes in use](../../configs/README.md) explains data, phases and "
        "published weights.",
        "",
    ]
    for recipe in found:
        lines += [
            f"## [{recipe.name}]({recipe.name}.md)",
            "",
            f"{recipe.title}.",
            "",
            "```sh",
            recipe.command,
            "```",
            "",
            f"- Papers: {_links(recipe)}.",
        ]
        if recipe.entries:
            entry = recipe.entries[0]
            lines += [
                f"- Expected {entry.scale.metric.label}: {_expected(entry)}.",
                f"- Cost: {entry.cost or 'unknown'}.",
            ]
        lines.append("")
    names = [recipe.name for recipe in found]
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *names, "```", ""])


def _links(recipe: Recipe) -> str:
    links = [f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in recipe.papers]
    return ", ".join(links) or "none; the setting is from this project"


def _expected(entry: Entry) -> str:
    texts = [f"in the paper {entry.paper}"] if entry.paper else []
    place = "here" if entry.scale.name == "paper" else f"here, at the scale {entry.scale.name},"
    texts.append(f"{place} {entry.measured}" if entry.measured else "not run here")
    return "; ".join(texts)


def components_page(registries: Iterable[Registry]) -> str:
    """Returns the page of the shipped components and the config keys of each, as Markdown."""
    lines = [
        "# Components and their keys",
        "",
        "Some sections of a config select a component, which is a class or a function, by its "
        "name. The other keys of such a section are the arguments of the component. If neither the "
        "recipe nor the command line sets a key, its default below is used. All other "
        "[keys](../../configs/keys.md) are the same for every component. [Custom "
        "components](../guides/custom_parts.md) are named `package.module:Name`.",
        "",
    ]
    for registry in registries:
        lines += [
            f"## config.{registry.section}",
            "",
            f"`config.{registry.name_key}` is one of:",
            "",
        ]
        for name in registry:
            lines += [f"### {name}", "", *_component(registry, name)]
    return "\n".join(lines)


def _component(registry: Registry, name: str) -> list[str]:
    made = registry[name]
    lines = []
    if hasattr(made, "__qualname__"):  # data sets are entries of a table
        lines += [f"{{py:obj}}`{made.__module__}.{made.__qualname__}`", ""]
    fields = registry.fields(name)
    if not fields:
        return [*lines, "This component has no further keys.", ""]
    lines += ["| key | type | default |", "| --- | --- | --- |"]
    for field, (kind, default) in fields.items():
        has_default = default is not inspect.Parameter.empty
        text = field_types.describe(kind, default).partition(", such as ")[0]
        shown = f"`{default!r}`".replace("|", "\\|") if has_default else "none (required)"
        lines.append(f"| `config.{registry.section}.{field}` | {text} | {shown} |")
    return [*lines, ""]


def keys_page(title: str) -> str:
    """Returns the page of all config keys, which gives each key an anchor, as Markdown.

    Args:
      title: the beginning of the page.
    """
    rows = list(keys.rows())
    rows += [
        (
            f"{key.path}.{name}",
            "whole number",
            f"`{value!r}`",
            f"See {{confval}}`config.{key.path}`.",
        )
        for key in spec_keys.keys()
        if isinstance(key.default, Mapping)
        for name, value in key.default.items()
    ]
    sections: dict[str, list[str]] = {}
    for path, kind, default, text in rows:
        lines = sections.setdefault(f"config.{path}".rpartition(".")[0], [])
        lines += [f"```{{confval}} config.{path}", f":type: {kind}"]
        lines += [f":default: {default}"] if default else []
        lines += ["", text, "```", ""]
    parts = [f"## {section}\n\n" + "\n".join(lines) for section, lines in sections.items()]
    return "\n\n".join([title.rstrip(), *parts])
