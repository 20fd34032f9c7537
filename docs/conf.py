"""Settings of the documentation site, which `make docs` builds with Sphinx.

Sphinx's source folder is the checkout. Therefore the pages beside the code, the recipes and the
measurements are pages of the site, and their relative links work on the site and on a Git server.

Sphinx with MyST-NB renders Markdown, notebooks and docstrings together, as on the sites of Optax
and Flax. The theme furo has search, light and dark modes, and a layout for phones.
"""

import os
import pathlib
import re
import sys
from typing import Any

from sphinx.application import Sphinx

import lamb_tpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for `from docs import generated`

project = "lamb_tpu"
author = "The lamb_tpu authors"
copyright = author
version = release = lamb_tpu.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/reference/*",
    "docs/recipes/*.md",
    "lamb_tpu/**.md",
    "configs/*.md",
    "experiments/**.md",
    "notebooks/*",
    "CHANGELOG.md",
    "changes/README.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["**/.*"]

# Give headings of levels 1 to 4 an anchor, as Git servers do for every heading.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
nb_execution_mode = "off"  # notebooks are stored with their outputs; the tests run them
suppress_warnings = [
    "myst.header",  # a page may begin with a heading below level 1
    "misc.highlighting_failure",  # output blocks without a language
    "ref.python",  # fields with the same name in several classes
]

# Document each object only in the module that defines it. Re-exported names would clash: for
# example, `lamb_tpu.optim.lamb` is both a module and a function.
os.environ["SPHINX_APIDOC_OPTIONS"] = "ignore-module-all,members,show-inheritance"
apidoc_modules = [
    {
        "path": str(ROOT / "lamb_tpu"),
        "destination": "docs/reference",
        "module_first": True,
        "separate_modules": False,  # a page for each package, so that a page's menu stays small
    }
]
toc_object_entries = False  # a menu of all functions would take most of the build time of a page
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # otherwise the fields of a dataclass appear twice

html_theme = "furo"
html_title = f"lamb_tpu {release}"
html_static_path = ["_static"]
html_extra_path = ["redirect"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

# Text in backticks: code, or a formula, which has a role such as `:math:` in front.
_CODE = re.compile(r"((?::\w+:)?`[^`\n]+`)")


def _restructured(line: str) -> str:
    """Converts a docstring line, whose only markup is backticked code, to reStructuredText.

    >>> _restructured("Takes `rows` of |G| * 2, one for each of `axis_name`s.")
    'Takes ``rows`` of \\\\|G\\\\| \\\\* 2, one for each of ``axis_name``\\\\ s.'
    """
    parts = _CODE.split(line)
    for index, part in enumerate(parts):
        if part.startswith(":") and index % 2:
            continue
        if index % 2:
            after = parts[index + 1][:1]
            parts[index] = f"`{part}`" + ("\\ " if after.isalnum() else "")
        elif not line.lstrip().startswith((">>>", "...")):
            parts[index] = re.sub(r"(?<!`)([*|]|_(?=\W|$))", r"\\\1", part)
    return "".join(parts)


def _convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Converts a docstring to reStructuredText, with commands and code as literal blocks."""
    # Drop the docstring that Python gives to each field of a NamedTuple.
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    converted: list[str] = []
    before = 0  # indentation of the last line that is not blank
    is_reference = False  # whether the line is in the section "References:"
    outside: int | None = None  # indentation of the text around the current literal block
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            converted.append(line)
            continue
        if outside is not None and depth <= outside:
            outside = None
        is_reference = is_reference and (depth > 0 or not line.strip())
        if is_reference and depth == 2:
            line = f"  - {line.lstrip()}"
        is_reference = is_reference or line == "References:"
        follows_blank = bool(converted) and not converted[-1].strip()
        if (
            outside is None
            and follows_blank
            and depth > before
            and not line.lstrip().startswith(">>>")
        ):
            converted += [" " * before + "::", ""]
            outside = before
        converted.append(line if outside is not None else _restructured(line))
        if outside is None and line.endswith("::"):
            outside = depth
        before = depth
    lines[:] = converted


def _write_pages(app: Sphinx) -> None:
    """Writes a page for each recipe, the page that lists all recipes, and the page of components."""
    from docs import generated
    from lamb_tpu.reproduce import loading
    from lamb_tpu.run.categories import REGISTRIES

    recipes = generated.recipes(ROOT / "configs", loading.load_all(ROOT / "experiments"))
    pages = {f"recipes/{recipe.name}": generated.recipe_page(recipe) for recipe in recipes}
    pages["recipes/index"] = generated.overview_page(recipes)
    pages["reference/components"] = generated.components_page(REGISTRIES.values())
    for name, text in pages.items():
        path = ROOT / "docs" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:  # Sphinx reads changed files again
            path.write_text(text)


def _edit_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Gives each config key an anchor, and each page of a benchmark a heading.

    The page of a benchmark is the output of its command, without a heading.
    """
    if page == "configs/keys":
        from docs import generated

        source[0] = generated.keys_page(source[0].partition("\n| key ")[0])
    if page.startswith("experiments/bench/") and not source[0].startswith("#"):
        source[0] = f"# {page.rpartition('/')[2].replace('_', ' ').capitalize()}\n\n{source[0]}"


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _edit_page)
    # Run before napoleon: `_convert` would escape the markup that napoleon writes.
    app.connect("autodoc-process-docstring", _convert, priority=400)
