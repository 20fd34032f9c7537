"""Writes the report: a Markdown page and pictures for each table, and the same as HTML.

Two reports of the same records are equal byte for byte: nothing of the time or the machine of their
making is in them.
"""

import os
import pathlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamb_tpu import style
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading, writing
from lamb_tpu.reproduce.report import pages as pages_lib
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.report.pages import Page
from lamb_tpu.reproduce.tables import Table

_TEMPLATES = pathlib.Path(__file__).parent / "templates"


def write(
    tables: Mapping[str, Table],
    output: pathlib.Path,
    html: pathlib.Path | None,
    records: pathlib.Path | None = None,
    overview: pathlib.Path | None = None,
    index: bool = True,
) -> list[pathlib.Path]:
    """Writes the report and prints where it lies.

    Args:
      tables: every table, or those of which pages are wanted.
      output: folder of the Markdown pages and of the pictures.
      html: folder of the same as a site; None for none.
      records: folder of records of one's own; None: those beside the tables.
      overview: folder with a template README.md.j2, from which its README.md is made; None, or a
        folder without the template, for none. The template may include rows.md.j2, the table of
        all cells, and missing.md.j2.
      index: whether `output` receives a README.md, the list of `tables`.

    Returns:
      The pages of the tables and their pictures.

    Raises:
      UserError: a folder cannot be written, records are damaged, or the template has a mistake.
    """
    folders = [folder for folder in (output, html) if folder is not None]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror})") from None
    pages = [pages_lib.of_table(table, records) for table in tables.values()]
    if overview is not None and (overview / "README.md.j2").exists():
        _write_overview(pages, overview, output)
        print(overview / "README.md")
    written = []
    for page in pages:
        for part in page.parts:
            for kind, figure in part.figures.items():
                text = style.svg(figure)
                for folder in folders:
                    written.append(folder / f"{page.slug}-{part.name}-{kind}.svg")
                    writing.replace(written[-1], text)
    for folder, kind, name in zip(folders, ("md", "html"), ("README.md", "index.html")):
        environment = _environment(kind == "html")
        for page in pages:
            template = environment.get_template(f"table.{kind}.j2")
            written.append(folder / f"{page.slug}.{kind}")
            writing.replace(written[-1], template.render(page=page))
        if index or folder != output:
            template = environment.get_template(f"index.{kind}.j2")
            writing.replace(folder / name, template.render(pages=pages))
            print(folder / name)
    return written


def _write_overview(pages: Sequence[Page], folder: pathlib.Path, output: pathlib.Path) -> None:
    path = folder / "README.md.j2"
    report = pathlib.Path(os.path.relpath(output, folder)).as_posix()
    text = reading.read_text(path)
    # The folder may come from someone else, so its template gets no access to Python.
    environment = _equip(_Sandbox(**_OPTIONS, autoescape=False))
    try:
        text = environment.from_string(text).render(pages=pages, report=report)
    except UserError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise _in_template(error.name or path, error.lineno, str(error.message)) from None
    except Exception as error:  # an expression of the template can raise anything
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == "<template>"), None)
        what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise _in_template(path, line, f"{what}{error}") from error
    writing.replace(folder / "README.md", text)


def _in_template(file: str | pathlib.Path, line: int | None, reason: str) -> UserError:
    at = "" if line is None else f" at line {line}"
    reason = " ".join(reason.split())
    return UserError(f"{file}{at} is not a template that jinja2 can render ({reason})")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Environment of a template from outside the package: it reads values and writes text.

    The sandbox of jinja2 hides Python's internals but not what public methods do: a table has
    paths, which can write files. So only functions of the environment, macros, and methods of
    plain values can be called.
    """

    def is_safe_callable(self, obj: Any) -> bool:
        plain = str, bytes, int, float, tuple, list, dict
        return super().is_safe_callable(obj) and (
            isinstance(obj, Macro)
            or any(obj is known for known in self.globals.values())
            or type(getattr(obj, "__self__", None)) in (*plain, LoopContext)
        )


_OPTIONS: dict[str, Any] = {
    "loader": jinja2.FileSystemLoader(_TEMPLATES),
    "undefined": jinja2.StrictUndefined,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
}


def _environment(html: bool) -> jinja2.Environment:
    return _equip(jinja2.Environment(**_OPTIONS, autoescape=html))


def _equip(environment: jinja2.Environment) -> jinja2.Environment:
    """Adds the functions that templates call."""
    environment.globals |= {
        "captions": pictures.CAPTIONS,
        "papers": pages_lib.papers,
        "spent": pages_lib.spent,
        "total": pages_lib.total,
    }
    return environment
