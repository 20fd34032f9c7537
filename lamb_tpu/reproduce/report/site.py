"""Writes the report: a Markdown page and pictures for each table, and the same as HTML.

Two reports of the same records are equal byte for byte: nothing of the time or the machine of their
making is in them.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence

import jinja2

from lamb_tpu import style
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading, writing
from lamb_tpu.reproduce.report import pages as pages_lib
from lamb_tpu.reproduce.report import pictures
from lamb_tpu.reproduce.report.pages import Page
from lamb_tpu.reproduce.tables import Table

_TEMPLATES = pathlib.Path(__file__).parent / "templates"


def write(
    tables: Mapping[str, Table], output: pathlib.Path, html: pathlib.Path | None,
    records: pathlib.Path | None = None, overview: pathlib.Path | None = None,
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
    try:
        template = _environment(False).from_string(reading.read_text(path))
        text = template.render(pages=pages, report=report)
    except jinja2.TemplateError as error:
        raise UserError(f"{path} is not a template that jinja2 can render ({error})") from None
    writing.replace(folder / "README.md", text)


def _environment(html: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=html, keep_trailing_newline=True,
    )
    environment.globals |= {
        "captions": pictures.CAPTIONS, "papers": pages_lib.papers, "spent": pages_lib.spent,
        "total": pages_lib.total,
    }
    return environment
