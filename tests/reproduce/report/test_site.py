"""The report: pages with every value, pictures, and the same bytes each time."""

import html.parser
import pathlib
import re

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.report import site
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of


def measured(tmp_path: pathlib.Path) -> Table:
    table = write(tmp_path, TABLE.replace("cells = [", (
        'cells = [\n  {name = "wide", argument = "optimizer=lamb", '
        'overrides = {batch_size = 256}},'
    )))
    results = Results(table)
    for seed, accuracy in enumerate((0.92, 0.93)):
        for cell, batch in (("lamb", 128), ("wide", 256)):
            add(results, job_of(table, cell, seed), accuracy)
            found = next(r for r in results if (r["cell"], r["seed"]) == (cell, seed))
            results.add(found | {
                "batch": batch, "optimizer": "lamb",
                "ratios": {"hidden0/kernel": [[2, 0.1], [4, 0.2]], "out/kernel": [[2, 0.3]]},
            }, results.config(found))
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
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {
        "README.md", "small-digits.md", "small-digits-small-batches.png",
        "small-digits-small-training.png", "small-digits-small-ratios.png",
    }
    page = (tmp_path / "report" / "small-digits.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("| lamb |"))
    assert line.startswith("| lamb | 93.0 (recalled) | 92.5 ± 6.4 | -0.5 | 0: 92.0, 1: 93.0 |")
    assert "| adamw | 92.5 (seen) | 1 of 1 diverged |" in page
    assert "| lars | diverged (recalled) | - |" in page and "settings not published" in page
    assert "\n\n\n" not in page
    for path in (tmp_path / "site").glob("*.html"):
        checker = Checker()
        checker.feed(path.read_text())
        assert not checker.open
        for link in checker.links:
            assert link.startswith("https://arxiv.org/") or (path.parent / link).exists(), link
    text = (tmp_path / "site" / "small-digits.html").read_text()
    assert "--config=digits:batch=128,optimizer=lamb" in text and "optimizer.name = " in text
    for part in (r"src=\"http", r"@import", r"<script"):  # it works without a network
        assert not re.search(part, text)


def test_matrix(tmp_path: pathlib.Path) -> None:
    text = TABLE
    for name in ("lamb", "adamw", "lars"):
        text = text.replace(f'name = "{name}"', f'name = "{name}", row = "<{name}>", column = "1"')
    table = write(tmp_path, text)
    site.write({table.key: table}, tmp_path / "report", tmp_path / "site")
    assert "| <lamb> | - (93.0) |" in (tmp_path / "report" / "small-digits.md").read_text()
    page = (tmp_path / "site" / "small-digits.html").read_text()
    assert '<tr><td>&lt;lamb&gt;</td><td class="number">- (93.0)</td></tr>' in page


def test_two_reports_are_equal(tmp_path: pathlib.Path) -> None:
    table = measured(tmp_path)
    for name in ("one", "two"):
        site.write({table.key: table}, tmp_path / name, tmp_path / f"{name}-html")
    for suffix in ("", "-html"):
        first = sorted((tmp_path / f"one{suffix}").iterdir())
        assert len(first) == 5
        for path in first:
            assert path.read_bytes() == (tmp_path / f"two{suffix}" / path.name).read_bytes()


def test_committed_pages_are_those_of_the_records(tmp_path: pathlib.Path) -> None:
    tables = load_all(folder())
    site.write(tables, tmp_path, None)
    for path in tmp_path.iterdir():
        committed = folder() / "report" / path.name
        assert committed.exists(), f"{committed}: make report writes it"
        if path.suffix == ".md":
            assert committed.read_text() == path.read_text(), f"{committed}: make report"
    left = {path.name for path in (folder() / "report").iterdir()}
    assert left == {path.name for path in tmp_path.iterdir()}


def test_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    table = write(tmp_path)
    with pytest.raises(UserError, match="file/report cannot be written"):
        site.write({table.key: table}, tmp_path / "file" / "report", None)
