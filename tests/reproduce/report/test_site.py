"""The report: pages with every value, pictures, and the same bytes each time."""

import html.parser
import pathlib
import re

import pytest

from lamb_tpu import style
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.report import site
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of


def measured(tmp_path: pathlib.Path) -> Table:
    table = write(
        tmp_path,
        TABLE.replace(
            "cells = [",
            (
                'cells = [\n  {name = "wide", argument = "optimizer=lamb", '
                "overrides = {batch_size = 256}},"
            ),
        ),
    )
    results = Results(table)
    for seed, accuracy in enumerate((0.92, 0.93)):
        for cell, batch in (("lamb", 128), ("wide", 256)):
            add(results, job_of(table, cell, seed), accuracy)
            found = next(r for r in results if (r["cell"], r["seed"]) == (cell, seed))
            results.add(
                found
                | {
                    "batch": batch,
                    "optimizer": "lamb",
                    "ratios": {
                        "hidden0/kernel": [[2, 0.1], [4, 0.2]],
                        "out/kernel": [[2, 0.3], [4, None]],
                    },
                },
                results.config(found),
            )
    add(results, job_of(table, "adamw"), None)
    return table


class Checker(html.parser.HTMLParser):
    """Collects what a page refers to, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report(tmp_path: pathlib.Path) -> None:
    table = measured(tmp_path)
    tables = {table.key: table}
    site.write(tables, tmp_path / "report", tmp_path / "site")
    kinds = ("batches", "training", "ratios", "plans")
    drawn = {f"small-digits-small-{kind}.svg" for kind in kinds}
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"README.md", "small-digits.md"} | drawn
    names = {path.name for path in (tmp_path / "site").iterdir()}
    assert names == {"index.html", "small-digits.html"} | drawn
    page = (tmp_path / "report" / "small-digits.md").read_text()
    assert "| lamb | 93.0 (recalled) | 92.5 ± 6.4 | -0.5 | 2 | 0.0 | measured |" in page
    assert "- lamb: seed 0 92.0, seed 1 93.0\n" in page
    assert "| adamw | 92.5 (seen) | 1 of 1 diverged |" in page
    assert "| lars | diverged (recalled) | - |" in page and "settings not published" in page
    index = (tmp_path / "report" / "README.md").read_text()
    assert "3 of 3 cells that can be run have runs: 5 runs" in index
    for text in (page, index):
        assert "\n\n\n" not in text and not text.endswith("\n\n")
    assert "--config=digits:batch=128,optimizer=lamb" in page
    for path in (tmp_path / "site").glob("*.html"):
        checker = Checker()
        checker.feed(path.read_text())
        assert not checker.open
        for link in checker.links:
            name, _, place = link.partition("#")
            assert link.startswith("https://arxiv.org/") or (path.parent / name).exists(), link
            assert not place or f'id="{place}"' in path.read_text()
    text = (tmp_path / "site" / "small-digits.html").read_text()
    for part in (
        "--config=digits:batch=128,optimizer=lamb",
        "optimizer.name = ",
        "seed 1: 93.0",
        "run small/digits --cells=lamb --scale=small",
    ):
        assert part in text
    for part in (r"src=\"http", r"@import", r"<script src"):  # it works without a network
        assert not re.search(part, text)


def test_further_columns(tmp_path: pathlib.Path) -> None:
    asked = 'columns = ["average_batch"]\n\n[scales.small]'
    table = write(tmp_path, TABLE.replace("[scales.small]", asked))
    add(Results(table), job_of(table), 0.92, updates=3, examples=9_000)
    site.write({table.key: table}, tmp_path / "report", tmp_path / "site")
    page = (tmp_path / "report" / "small-digits.md").read_text()
    assert (
        """
| cell | paper | here | average batch | difference | runs | min/run | status |
| --- | --: | --: | --: | --: | --: | --: | --- |
| lamb | 93.0 (recalled) | 92.0 | 3,000 | -1.0 | 1 | 0.0 | 1 of 2 seeds |
| adamw | 92.5 (seen) | - |  |  |  |  | not run |
"""
        in page
    )
    html = (tmp_path / "site" / "small-digits.html").read_text()
    assert '<th class="number">average batch</th><th class="number">difference</th>' in html
    assert '<td class="number" data-label="average batch">3,000</td>' in html


def test_matrix(tmp_path: pathlib.Path) -> None:
    text = TABLE
    for name in ("lamb", "adamw", "lars"):
        text = text.replace(f'name = "{name}"', f'name = "{name}", row = "<{name}>", column = "1"')
    table = write(tmp_path, text)
    site.write({table.key: table}, tmp_path / "report", tmp_path / "site")
    assert "| <lamb> | - (93.0) |" in (tmp_path / "report" / "small-digits.md").read_text()
    page = (tmp_path / "site" / "small-digits.html").read_text()
    assert "<th>&lt;lamb&gt;</th>" in page and "<small>paper 93.0</small>" in page


def test_two_reports_are_equal(tmp_path: pathlib.Path) -> None:
    table = measured(tmp_path)
    for name in ("one", "two"):
        site.write({table.key: table}, tmp_path / name, tmp_path / f"{name}-html")
    for suffix in ("", "-html"):
        first = sorted((tmp_path / f"one{suffix}").iterdir())
        assert len(first) == 6
        for path in first:
            assert path.read_bytes() == (tmp_path / f"two{suffix}" / path.name).read_bytes()


def test_committed_pages_are_those_of_the_records(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "svg", lambda figure: "")  # only the pages are compared
    output = tmp_path / "report"
    (tmp_path / "README.md.j2").write_text((folder() / "README.md.j2").read_text())
    site.write(load_all(folder()), output, None, overview=tmp_path)
    for path in (tmp_path / "README.md", *output.iterdir()):
        committed = folder() / path.relative_to(tmp_path)
        assert committed.exists(), f"{committed}: make report writes it"
        if path.suffix == ".md":
            assert committed.read_text() == path.read_text(), f"{committed}: make report"
    left = {path.name for path in (folder() / "report").iterdir()}
    assert left == {path.name for path in output.iterdir()}


def test_overview(tmp_path: pathlib.Path) -> None:
    measured(tmp_path)
    (tmp_path / "small" / "paper.toml").write_text(
        'title = "A small paper"\nname = "Small"\narxiv = "0000.00000"\n'
        'missing = [{what = "Table 8", why = "its rows are not known"}]\n'
    )
    tables = load_all(tmp_path)
    site.write(tables, tmp_path / "report", None, overview=tmp_path)
    assert not (tmp_path / "README.md").exists()  # it has no template
    template = tmp_path / "README.md.j2"
    template.write_text('# Mine\n\n{% include "rows.md.j2" %}\n\n{% include "missing.md.j2" %}\n')
    site.write(tables, tmp_path / "report", None, overview=tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert lines[0] == "# Mine" and lines[-2:] == ["", "- Small, Table 8: its rows are not known"]
    assert lines[4] == (
        "| [Small](https://arxiv.org/abs/0000.00000) | [Table 9: Digits by optimizer]"
        "(report/small-digits.md) | wide |  | 92.5 ± 6.4 |  | measured | 0.00 | "
        "`run small/digits --cells=wide --scale=small` |"
    )
    assert lines[7] == ("|  |  | lars | diverged (recalled) |  |  | settings not published |  |  |")


# Each would run a program or write `written`, by Python's internals or by a public method.
ATTACKS = {
    "internals": "{{ pages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ papers.__globals__.__builtins__.open('written', 'w') }}",
    "filter": "{{ pages | map(attribute='__class__') | first }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(pages[0]) }}",
    "path": "{{ (pages[0].table.path.parent / 'written').write_text('x') }}",
    "read": "{{ (pages[0].table.path.parent / 'paper.toml').read_text() }}",
    "figure": "{% for f in pages[0].parts[0].figures.values() %}{{ f.savefig('written') }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_template_of_the_overview_runs_no_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table = measured(tmp_path)
    (tmp_path / "README.md.j2").write_text(f"# Mine\n\n{ATTACKS[attack]}\n")
    with pytest.raises(UserError, match=r"README.md.j2 at line 3 is not .* (unsafe|safely)"):
        site.write({table.key: table}, tmp_path / "report", None, overview=tmp_path)
    assert not list(tmp_path.rglob("written*")) and not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("# Mine\n{% include rows", r"README.md.j2 at line 2 .*end of statement block"),
        ("# Mine\n\n{{ absent }}", r"README.md.j2 at line 3 .*'absent' is undefined"),
        ("{{ 1 / 0 }}", r"README.md.j2 at line 1 .*ZeroDivisionError: division by zero"),
        ("{% include 'absent.j2' %}", r"README.md.j2 at line 1 .*absent.j2"),
    ],
)
def test_mistake_in_the_template_of_the_overview(
    tmp_path: pathlib.Path, text: str, message: str
) -> None:
    table = measured(tmp_path)
    (tmp_path / "README.md.j2").write_text(text)
    with pytest.raises(UserError, match=message):
        site.write({table.key: table}, tmp_path / "report", None, overview=tmp_path)


def test_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    table = write(tmp_path)
    with pytest.raises(UserError, match="file/report cannot be written"):
        site.write({table.key: table}, tmp_path / "file" / "report", None)
