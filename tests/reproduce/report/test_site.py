"""The report has pages with every value, and figures; a repeated report is equal byte for byte."""

import html.parser
import pathlib
import re
import shutil

import pytest
from ml_collections import ConfigDict

from lamb_tpu import style
from lamb_tpu.reproduce.jobs import JobStage
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.report import pages, site
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests.raising import rejected
from tests.reproduce.papers import TABLE, with_keys, write
from tests.reproduce.test_results import add, job_of


def measured(tmp_path: pathlib.Path) -> Table:
    wide = '{name = "wide", argument = "optimizer=lamb", overrides = {batch_size = 256}},'
    table = write(tmp_path, TABLE.replace("cells = [", f"cells = [\n  {wide}"))
    results = Results(table)
    ratios = {"hidden0/kernel": [[2, 0.1], [4, 0.2]], "out/kernel": [[2, 0.3], [4, None]]}
    for seed, accuracy in enumerate((0.92, 0.93)):
        for cell, batch in (("lamb", 128), ("wide", 256)):
            more = {"batch": batch, "optimizer": "lamb", "ratios": ratios}
            add(results, job_of(table, cell, seed), accuracy, **more)
    add(results, job_of(table, "adamw"), None)
    return table


class Checker(html.parser.HTMLParser):
    """Collects the links of a page, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report(tmp_path: pathlib.Path) -> None:
    table = measured(tmp_path)
    tables = {table.key: table}
    site.write(tables, tmp_path / "report", tmp_path / "site")
    types = ("batches", "training", "ratios", "plans")
    drawn = {f"small-digits-small-{kind}.svg" for kind in types}
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"README.md", "small.md", "small-digits.md"} | drawn
    names = {path.name for path in (tmp_path / "site").iterdir()}
    assert names == {"index.html", "cells.html", "small.html", "small-digits.html"} | drawn
    page = (tmp_path / "report" / "small-digits.md").read_text()
    # The scale is not the paper's, so the row has no difference.
    lamb = "| lamb | measured at another scale | 93.0 (recalled) | 92.5 ± 6.4 |"
    assert f"{lamb}  | 2 | 0.0 |" in page
    assert "- lamb: seed 0 92.0, seed 1 93.0\n" in page
    assert "| adamw | measured at another scale, 1 of 2 seeds | 92.5 (seen) | 1 of 1 d" in page
    assert "| lars | not run: settings not published | diverged (recalled) | - |" in page
    index = (tmp_path / "report" / "README.md").read_text()
    assert "measured here in 5 runs" in index
    assert (
        """
| [small](small.md) | 3 | 0 | 2 | 0 | 1 | 1 of 1 |
| **all** | **3** | **0** | **2** | **0** | **1** | |
"""
        in index
    )
    paper = (tmp_path / "report" / "small.md").read_text()
    assert lamb.replace("6.4 |", "6.4 |  | 0.00 | `run small/digits --cells=lamb") in paper
    for text in (page, index, paper):
        assert "\n\n\n" not in text and not text.endswith("\n\n")
    assert "--config=digits:batch=128,optimizer=lamb" in page
    for path in (tmp_path / "site").glob("*.html"):
        checker = Checker()
        checker.feed(path.read_text())
        assert not checker.open
        for link in checker.links:
            name, _, anchor = link.partition("#")
            assert link.startswith("https://arxiv.org/") or (path.parent / name).exists(), link
            assert not anchor or f'id="{anchor}"' in (path.parent / (name or path.name)).read_text()
    text = (tmp_path / "site" / "small-digits.html").read_text()
    for part in (
        "--config=digits:batch=128,optimizer=lamb",
        "optimizer.name = ",
        "seed 1: 93.0",
        "run small/digits --cells=lamb --scale=small",
    ):
        assert part in text
    for part in (r"src=\"http", r"@import", r"<script src"):  # the page works without a network
        assert not re.search(part, text)


def test_further_columns(tmp_path: pathlib.Path) -> None:
    asked = 'columns = ["average_batch"]\n\n[scales.small]'
    table = write(tmp_path, TABLE.replace("[scales.small]", asked))
    add(Results(table), job_of(table), 0.92, updates=3, examples=9_000)
    site.write({table.key: table}, tmp_path / "report", tmp_path / "site")
    page = (tmp_path / "report" / "small-digits.md").read_text()
    assert (
        """
| cell | status | paper | here | average batch | difference | runs | min/run |
| --- | --- | --: | --: | --: | --: | --: | --: |
| lamb | measured at another scale, 1 of 2 seeds | 93.0 (recalled) | 92.0 | 3,000 |  | 1 | 0.0 |
| adamw | not run | 92.5 (seen) | - |  |  |  |  |
"""
        in page
    )
    html = (tmp_path / "site" / "small-digits.html").read_text()
    assert '<th class="number">average batch</th><th class="number">difference</th>' in html
    assert '<td class="number" data-label="average batch">3,000</td>' in html


def test_matrix(tmp_path: pathlib.Path) -> None:
    keys = {name: f'row = "<{name}>", column = "1"' for name in ("lamb", "adamw", "lars")}
    table = write(tmp_path, with_keys(**keys))
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
        assert len(first) == (8 if suffix else 7)
        for path in first:
            assert path.read_bytes() == (tmp_path / f"two{suffix}" / path.name).read_bytes()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds up tests that compare only the pages: plots nothing, and makes each config only once."""
    monkeypatch.setattr(style, "svg", lambda figure: "")
    monkeypatch.setattr(pages.plans_lib, "draw", lambda plans: None)
    made, config = dict[str, ConfigDict](), JobStage.config

    def once(stage: JobStage) -> ConfigDict:
        key = repr(stage)
        if key not in made:
            made[key] = config(stage)
        return made[key]

    monkeypatch.setattr(JobStage, "config", once)


# Small tables: one with runs, one with a search, and one without runs.
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("key", ["exchange/onebit_mnist", "lamb/cifar10", "lars/resnet50"])
def test_committed_page_is_that_of_the_records(tmp_path: pathlib.Path, key: str) -> None:
    table = load_all(folder())[key]
    written = site.write({key: table}, tmp_path, None, index=False)
    (page,) = (path for path in written if path.suffix == ".md")
    assert page.read_text() == (folder() / "report" / page.name).read_text(), "make report"


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_committed_pages_are_those_of_the_records(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "report"
    (tmp_path / "README.md.j2").write_text((folder() / "README.md.j2").read_text())
    start = tmp_path / "start" / "README.md"
    start.parent.mkdir()
    start.write_text((folder().parent / "README.md").read_text())
    site.write(load_all(folder()), output, None, overview=tmp_path, start=start)
    assert start.read_text() == (folder().parent / "README.md").read_text(), "make report"
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
    assert not (tmp_path / "README.md").exists()  # the folder has no template
    template = tmp_path / "README.md.j2"
    template.write_text(
        '# Mine\n\n{% include "rows.md.j2" %}\n\n{% include "counts.md.j2" %}\n'
        '{% include "missing.md.j2" %}\n'
    )
    site.write(tables, tmp_path / "report", None, overview=tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert lines[0] == "# Mine" and lines[-1] == "- Small, Table 8: its rows are not known"
    assert lines[4] == (
        "| [Small](https://arxiv.org/abs/0000.00000) | [Table 9: Digits by optimizer]"
        "(report/small-digits.md) | wide | measured |  | 92.5 ± 6.4 |  | 0.00 | "
        "`run small/digits --cells=wide --scale=small` |"
    )
    assert lines[7] == (
        "|  |  | lars | not run: settings not published | diverged (recalled) |  |  |  |  |"
    )
    assert lines[11] == "| [Small](report/small.md) | 3 | 0 | 2 | 0 | 1 | 1 of 1 |"


# Each template tries to run a program, or to write the file `written`.
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
    with rejected("*README.md.j2 at line 3", ..., "is not a template") as caught:
        site.write({table.key: table}, tmp_path / "report", None, overview=tmp_path)
    assert re.search("unsafe|safely", caught.value.problem)
    assert not list(tmp_path.rglob("written*")) and not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    "text, line, reason",
    [
        ("# Mine\n{% include rows", 2, "end of statement block"),
        ("# Mine\n\n{{ absent }}", 3, "'absent' is undefined"),
        ("{{ 1 / 0 }}", 1, "ZeroDivisionError: division by zero"),
        ("{% include 'absent.j2' %}", 1, "absent.j2"),
    ],
)
def test_error_in_the_template_of_the_overview(
    tmp_path: pathlib.Path, text: str, line: int, reason: str
) -> None:
    table = measured(tmp_path)
    (tmp_path / "README.md.j2").write_text(text)
    with rejected(f"*README.md.j2 at line {line}", ..., reason):
        site.write({table.key: table}, tmp_path / "report", None, overview=tmp_path)


def test_rows_can_be_filtered(tmp_path: pathlib.Path) -> None:
    table = measured(tmp_path)
    site.write({table.key: table}, tmp_path / "report", tmp_path / "site")
    for name in ("cells.html", "small.html"):
        page = (tmp_path / "site" / name).read_text()
        # A script shows the filter; without JavaScript all rows are shown.
        assert re.search(r'<form class="filter" [^>]*hidden>', page)
        for key, values in (
            ("status", ["measured at another scale", "measured", "not run"]),
            ("optimizer", ["AdamW", "LAMB"]),
            ("batch", ["128", "256"]),
        ):
            options = "".join(f"<option>{value}</option>" for value in values)
            assert f'<select name="{key}"><option value="">all</option>{options}</select>' in page
        assert (
            '<tr data-paper="small" data-status="measured" data-optimizer="LAMB" data-batch="256">'
        ) in page
    # The script uses the keys of the URL's query as names of the rows' data attributes.
    assert "new URLSearchParams(location.search)" in page and "row.dataset[key]" in page


def test_counts_in_the_start_page(tmp_path: pathlib.Path) -> None:
    table = measured(tmp_path)
    start = tmp_path / "start.md"
    start.write_text("# Mine\n\nNo counts.\n")
    site.write({table.key: table}, tmp_path / "report", None, start=start)
    assert start.read_text() == "# Mine\n\nNo counts.\n"
    begin = "<!-- counts: `python -m lamb_tpu.reproduce report` writes these lines -->\n"
    start.write_text(f"# Mine\n\n{begin}old\n<!-- end of counts -->\n\nMore.\n")
    site.write({table.key: table}, tmp_path / "report", None, start=start)
    assert start.read_text() == (
        f"# Mine\n\n{begin}3 published values: 0 are measured at the paper's scale, 2 at "
        "another scale, 0 are planned, and 1 is\nnot run.\n<!-- end of counts -->\n\nMore.\n"
    )


def test_pages_with_the_same_name(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    for name in ("small-digits", "index"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "paper.toml").write_text('title = "Another paper"\n')
        (folder / "t.toml").write_text(TABLE)
        with rejected("*", ..., f"would have the page {name}", "rename the folder or"):
            site.write(load_all(tmp_path), tmp_path / "report", None)
        shutil.rmtree(folder)
    assert not (tmp_path / "report").exists()


def test_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    table = write(tmp_path)
    with rejected("*file/report", ..., "cannot be written"):
        site.write({table.key: table}, tmp_path / "file" / "report", None)
