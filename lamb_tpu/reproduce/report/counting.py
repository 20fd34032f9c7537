"""Counts cells by status, and lists the values of the site's row filters."""

from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu.reproduce.report.pages import Page, papers
from lamb_tpu.reproduce.status import Counts, Status
from lamb_tpu.reproduce.tables import Paper


class PaperCounts(NamedTuple):
    """Numbers of a paper's cells by status; `paper` is None for the sum over all papers.

    Attributes:
      published: counts of the cells with a published value.
      others: counts of the other cells, such as those of studies.
      complete: number of published values measured at the paper's scale with every seed.
    """

    paper: Paper | None
    published: Counts
    others: Counts
    complete: int = 0

    @property
    def sentence(self) -> str:
        """The status counts of the published values, and the number of values with all seeds."""
        if not self.published.total:
            return ""
        paper, other, planned, left = self.published
        text = (
            f"{self.published.total} published values: {paper} {_are(paper)} measured at the "
            f"paper's scale, {other} at another scale, {planned} {_are(planned)} planned, and "
            f"{left} {_are(left)} not run."
        )
        return f"{text} {self.note}".rstrip()

    @property
    def note(self) -> str:
        """A sentence on the values at the paper's scale that lack seeds; '' if no value lacks seeds."""
        paper, have = self.published.paper, "has" if self.complete <= 1 else "have"
        if paper == self.complete:
            return ""
        return (
            f"{self.complete or 'None'} of the {paper} values at the paper's scale {have} all "
            "requested seeds."
        )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def counts(pages: Sequence[Page]) -> tuple[list[PaperCounts], PaperCounts]:
    """Returns the cell counts of each paper, in the order of `papers`, and their sum.

    A cell counts once. If it has rows at several scales, the status that comes first in `Status` decides.
    """
    by_paper = [_of_paper(paper, group) for paper, group in papers(pages)]
    everything = PaperCounts(
        None,
        Counts.sum(each.published for each in by_paper),
        Counts.sum(each.others for each in by_paper),
        sum(each.complete for each in by_paper),
    )
    return by_paper, everything


def _of_paper(paper: Paper, pages: Sequence[Page]) -> PaperCounts:
    published, others, complete = list[Status](), list[Status](), 0
    for page in pages:
        for cell in page.table.cells.values():
            rows = [row for part in page.parts for row in part.rows if row.cell == cell]
            if not rows:  # the table has only a smoke scale
                continue
            standing = min((row.standing for row in rows), key=list(Status).index)
            (published if cell.published else others).append(standing)
            complete += bool(cell.published) and any(
                row.standing is Status.PAPER and row.status == "measured" for row in rows
            )
    return PaperCounts(paper, Counts.of(published), Counts.of(others), complete)


def choices(pages: Sequence[Page]) -> dict[str, list[str]]:
    """Returns the filter values of rows: papers, statuses, optimizers and batch sizes.

    Omits filters with fewer than two values.
    """
    rows = [row for page in pages for _, row in page.best]
    statuses = [Status.PAPER.value, Status.OTHER.value, "measured", "planned", "not run"]
    options = {
        "paper": [paper.name for paper, _ in papers(pages)],
        "status": [text for text in statuses if any(row.group == text for row in rows)],
        "optimizer": sorted({row.optimizer for row in rows} - {""}, key=str.lower),
        "batch": sorted({row.batch for row in rows} - {""}, key=lambda text: (len(text), text)),
    }
    return {key: values for key, values in options.items() if len(values) > 1}
