"""The report of a fuzzing session: counts of inputs, reasons for accepted inputs, killed commands."""

import collections
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import NamedTuple

from experiments.attack import kills, reasons
from experiments.attack.inputs import Input
from experiments.attack.outcome import ACCEPTED, MEANINGS, OUTCOMES, REJECTED, End

PAGE = pathlib.Path(__file__).with_name("attack.md")


class Row(NamedTuple):
    """An input with its outcome."""

    number: int
    given: Input
    outcome: str
    end: End

    def is_fault(self) -> bool:
        """Returns whether the outcome is neither a rejection nor an acceptance with a reason."""
        if self.outcome == ACCEPTED:
            return not reasons.reason(self.given)
        return self.outcome != REJECTED

    def describe(self) -> str:
        """Returns the input on one line."""
        return (
            f"#{self.number} {self.outcome}: {self.given.area}, {self.given.location}, "
            f"{self.given.change}: {self.given.command()}"
        )


def counts(rows: Sequence[Row]) -> list[list[str]]:
    """Returns a table with the number of inputs by area and outcome."""
    totals = collections.Counter((row.given.area, row.outcome) for row in rows)
    areas = sorted({row.given.area for row in rows})
    shown = [["area", "inputs", *OUTCOMES]]
    for area in areas:
        each = [totals[area, outcome] for outcome in OUTCOMES]
        shown.append([area, str(sum(each)), *map(str, each)])
    each = [sum(totals[area, outcome] for area in areas) for outcome in OUTCOMES]
    return [*shown, ["all", str(sum(each)), *map(str, each)]]


def accepted(rows: Sequence[Row]) -> list[list[str]]:
    """Returns a table of the accepted inputs by area and reason, with their numbers and changes."""
    groups = collections.defaultdict[tuple[str, str], list[Row]](list)
    for row in rows:
        if row.outcome == ACCEPTED:
            groups[row.given.area, reasons.reason(row.given) or "not reviewed"].append(row)
    return [
        ["area", "reason", "inputs", "change (location)"],
        *(
            [
                area,
                text,
                str(len(each)),
                "; ".join(
                    f"#{row.number} {_plain(row.given.change)} ({_plain(row.given.location)})"
                    for row in each
                ),
            ]
            for (area, text), each in sorted(groups.items())
        ),
    ]


def killed(killed_runs: Sequence[kills.Kill]) -> list[list[str]]:
    """Returns a table with each command's number of kills by signal, and the faults after these kills."""
    names = list(dict.fromkeys(kill.case for kill in killed_runs))
    signals = ("SIGKILL", "SIGTERM", "SIGINT")
    shown = [["command", *signals, "killed at, s", "faults"]]
    for name in names:
        of_case = [kill for kill in killed_runs if kill.case == name]
        sent = [kill for kill in of_case if kill.signal]
        shown.append(
            [
                name,
                *(str(sum(kill.signal == each for kill in sent)) for each in signals),
                ", ".join(f"{kill.seconds:.1f}" for kill in sent),
                "; ".join(_plain(kill.fault) for kill in of_case if kill.fault) or "none",
            ]
        )
    return shown


def markdown(table: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Returns a Markdown table; the columns in `numbers` are right-aligned."""
    head, *rest = table
    rule = ["--:" if column in numbers else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rest))


def text(
    rows: Sequence[Row], killed_runs: Sequence[kills.Kill], command: str, seconds: float
) -> str:
    """Returns the page as Markdown."""
    area_counts = markdown(counts(rows), range(1, len(OUTCOMES) + 2))
    meanings = "\n".join(f"- {name}: {meaning}." for name, meaning in MEANINGS.items())
    sent = sum(bool(kill.signal) for kill in killed_runs)
    paragraphs = [
        "# Bad inputs and kills",
        f"Outcomes of {len(rows)} inputs and {sent} kills, made by `{command}` in {seconds / 60:.0f} "
        f"minutes on {_hardware()}. Each input is a working command with one random change. The changes are "
        "drawn by the modules of experiments/attack/areas; the same seed draws the same inputs.",
        "## Inputs",
        area_counts,
        meanings,
    ]
    faults = [row for row in rows if row.is_fault()]
    if faults:
        paragraphs += [
            "Inputs that were neither rejected nor accepted for a known reason:",
            "\n".join(f"- {_plain(row.describe())}" for row in faults),
        ]
    paragraphs += [
        "## Accepted inputs",
        markdown(accepted(rows), (2,)),
        "## Kills",
        "Each command runs once without interruption. In another folder it is repeatedly killed at a "
        "random moment and started again; the last start is not killed. The arrays and the data "
        "position of the newest checkpoint, the records, and all other files must be equal in both "
        "folders. Times, paths, and the contents of pages and figures are not compared.",
    ]
    paragraphs.append(
        markdown(killed(killed_runs), (1, 2, 3)) if killed_runs else "No command was killed."
    )
    return "\n\n".join(paragraphs) + "\n"


def _plain(words: str) -> str:
    """Returns text for a table cell, without control characters and Markdown."""
    shown = re.sub(r"/\w+/attack-\w+/", "", words)
    shown = "".join(
        each if each.isascii() and each.isprintable() else ascii(each)[1:-1] for each in shown
    )
    return re.sub(r"([|`*<\[\]])", r"\\\1", shown)


def _hardware() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
