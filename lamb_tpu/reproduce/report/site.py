"""Writes the report: a Markdown page for each table and each paper, and optionally an HTML site.

The pages do not contain the time or machine of their creation, so reports of the same records are
equal byte for byte.
"""

import os
import pathlib
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamb_tpu import style
from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading, writing
from lamb_tpu.reproduce import planned
from lamb_tpu.reproduce.report import counting
from lamb_tpu.reproduce.report import figures as figures_lib
from lamb_tpu.reproduce.report import pages as pages_lib
from lamb_tpu.reproduce.report.pages import Page
from lamb_tpu.reproduce.tables import Table

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
# The status counts are written between these lines of a start page.
_BEGIN = "<!-- counts: `python -m lamb_tpu.reproduce report` writes these lines -->"
_END = "<!-- end of counts -->"


def write(
    tables: Mapping[str, Table],
    output: pathlib.Path,
    html: pathlib.Path | None,
    records: pathlib.Path | None = None,
    overview: pathlib.Path | None = None,
    index: bool = True,
    start: pathlib.Path | None = None,
) -> list[pathlib.Path]:
    """Writes the report, prints its location, and returns the paths of the tables' pages and figures.

    Args:
      tables: the tables to report.
      output: folder of the Markdown pages and the figures.
      html: folder of the HTML site; None: no site.
      records: folder of the user's records; None uses the records beside the tables.
      overview: folder with a template README.md.j2, from which README.md is written to the same folder;
        if the folder is None or has no template, README.md is not written. The README of lamb_tpu.reproduce
        lists what the template may use.
      index: whether to write README.md (the list of `tables`) and a page for each paper to `output`.
      start: page in which the status counts of all published values are written between two comments;
        None: no page.

    Raises:
      UserError: a folder cannot be written, two pages would have the same name, or the template has an error.
    """
    _check_names(tables)
    flags = {folder: flag for folder, flag in ((output, "--output"), (html, "--html")) if folder}
    for folder, flag in flags.items():
        with writing.checked(folder, flag):
            folder.mkdir(parents=True, exist_ok=True)
    pages = [pages_lib.of_table(table, records) for table in tables.values()]
    if start is not None:
        _write_counts(pages, start)
    if overview is not None and (overview / "README.md.j2").exists():
        _write_overview(pages, overview, output)
        print(overview / "README.md")
    written = []
    for page in pages:
        for part in page.parts:
            for kind, figure in part.figures.items():
                text = style.svg(figure)
                for folder, flag in flags.items():
                    written.append(folder / f"{page.slug}-{part.name}-{kind}.svg")
                    writing.replace(written[-1], text, flag)
    forms = (("md", "README.md"), ("html", "index.html"))
    for (folder, flag), (form, name) in zip(flags.items(), forms):
        environment = _environment(jinja2.Environment, autoescape=form == "html")
        texts: dict[str, tuple[str, dict[str, Any]]] = {
            f"{page.slug}.{form}": ("table", {"page": page}) for page in pages
        }
        if index or folder != output:
            texts |= {
                f"{paper.key}.{form}": (
                    "paper",
                    {"paper": paper, "pages": group, "count": counting.counts(group)[1]},
                )
                for paper, group in pages_lib.papers(pages)
            }
            texts[name] = "index", {"pages": pages, "report": "."}
        if form == "html":
            texts["cells.html"] = "cells", {"pages": pages}
        for file, (template, values) in texts.items():
            text = environment.get_template(f"{template}.{form}.j2").render(values)
            writing.replace(folder / file, text, flag)
            if template == "table":
                written.append(folder / file)
        if name in texts:
            print(folder / name)
    return written


def _check_names(tables: Mapping[str, Table]) -> None:
    """Rejects papers and tables if two of their pages would have the same file name."""
    taken = dict.fromkeys(("README", "index", "cells"), "the report itself")
    named = {f"the folder {table.paper.key}": table.paper.key for table in tables.values()}
    named |= {f"the table {key}": pages_lib.slug(key) for key in tables}
    for what, name in named.items():
        if name in taken:
            raise UserError(
                what,
                problem=f"would have the page {name}, which {taken[name]} already has",
                remedy="rename the folder or the table",
            )
        taken[name] = what


def _write_counts(pages: Sequence[Page], path: pathlib.Path) -> None:
    """Replaces the counts in a start page; leaves a page without `_BEGIN` and `_END` unchanged."""
    text = reading.read_text(path)
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if end:
        sentence = counting.counts(pages)[1].sentence
        text = f"{before}{begin}\n{textwrap.fill(sentence, 100)}\n{end}{after}"
        writing.replace(path, text, "--papers")


def _write_overview(pages: Sequence[Page], folder: pathlib.Path, output: pathlib.Path) -> None:
    path = folder / "README.md.j2"
    report = pathlib.Path(os.path.relpath(output, folder)).as_posix()
    try:
        text = reading.read_text(path)
    except ValueError as error:
        raise unreadable(path, error, "correct it") from None
    # The folder may come from another person, so its template gets no access to Python.
    environment = _environment(_Sandbox)
    try:
        text = environment.from_string(text).render(pages=pages, report=report)
    except UserError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise _in_template(error.name or path, error.lineno, str(error.message)) from None
    except Exception as error:  # a template expression can raise any exception
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == "<template>"), None)
        what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise _in_template(path, line, f"{what}{error}") from error
    writing.replace(folder / "README.md", text, "--papers")


def _in_template(file: str | pathlib.Path, line: int | None, reason: str) -> UserError:
    at = "" if line is None else f" at line {line}"
    reason = " ".join(reason.split())
    return UserError(
        f"{file}{at}", ..., f"is not a template that jinja2 can render ({reason})", "correct it"
    )


class _Sandbox(ImmutableSandboxedEnvironment):
    """A template environment that allows reading values and writing text, but nothing else.

    The sandbox of jinja2 hides Python internals but not public methods: a table has paths, which can
    write files. So only environment functions, macros, and methods of plain values can be called.
    """

    def is_safe_callable(self, obj: Any) -> bool:
        plain = str, bytes, int, float, tuple, list, dict
        return super().is_safe_callable(obj) and (
            isinstance(obj, Macro)
            or any(obj is known for known in self.globals.values())
            or type(getattr(obj, "__self__", None)) in (*plain, LoopContext)
        )


def _environment(kind: type[jinja2.Environment], autoescape: bool = False) -> jinja2.Environment:
    """Returns an environment with the functions that templates call."""
    environment = kind(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=autoescape,
    )
    environment.globals |= {
        "captions": figures_lib.CAPTIONS,
        "papers": pages_lib.papers,
        "spent": pages_lib.spent,
        "total": pages_lib.total,
        "counts": counting.counts,
        "choices": counting.choices,
        "planned_note": planned.NOTE,
    }
    return environment
