"""Counts of a fuzzer's run: cases, compiles, seconds, rejections, and the largest ratios."""

import collections
import shlex
import time

from tests.fuzz import trying
from tests.fuzz.case import Case
from tests.fuzz.checking import Compiles


class Summary:
    """Collects the outcomes of cases."""

    def __init__(self, compiles: Compiles) -> None:
        self.compiles = compiles
        self.ran = self.rejected = self.failed = 0
        self.seconds = 0.0
        self.shrunk: list[Case] = []
        self._began = time.monotonic()
        self._ratios: dict[str, list[float]] = collections.defaultdict(list)
        self._rejections: collections.Counter[str] = collections.Counter()

    def add(self, case: Case, outcome: trying.Outcome, seconds: float) -> None:
        """Adds a case that took `seconds`."""
        self.failed += bool(outcome.problems)
        if outcome.rejected:
            self.rejected += 1
            self._rejections[outcome.rejected] += 1
            return
        self.ran += 1
        self.seconds += seconds
        for what, ratio, *_ in outcome.differences:
            self._ratios[category(case, what)].append(ratio)

    def line(self, number: int | None, case: Case, outcome: trying.Outcome, left: float) -> str:
        """Returns the line of progress after a case."""
        verdict = "rejected" if outcome.rejected else "passed"
        if outcome.problems:
            verdict = "FAILED"
        each = self.seconds / max(self.ran, 1)
        largest = max((each.ratio for each in outcome.differences), default=0.0)
        name = "" if number is None else f"seed {number}: "
        return (
            f"{name}{case.family} {verdict}, largest ratio {largest:.2f}; {self.ran} ran, "
            f"{self.rejected} rejected, {self.failed} failed; {each:.1f} s a case, "
            f"{left / 60:.1f} minutes left"
        )

    def table(self) -> str:
        """Returns the tables at the end of a run."""
        total = time.monotonic() - self._began
        lines = [
            "",
            "| cases | rejected | failed | programs compiled | seconds a case | minutes |",
            "|---|---|---|---|---|---|",
            f"| {self.ran} | {self.rejected} | {self.failed} | {self.compiles.count} | "
            f"{self.seconds / max(self.ran, 1):.1f} | {total / 60:.1f} |",
            "",
            "| category | comparisons | 99 % of ratios below | largest ratio |",
            "|---|---|---|---|",
        ]
        for name, ratios in sorted(self._ratios.items()):
            ratios.sort()
            almost = ratios[int(0.99 * (len(ratios) - 1))]
            lines.append(f"| {name} | {len(ratios)} | {almost:.2f} | {ratios[-1]:.2f} |")
        lines += ["", *(f"{count} x {text}" for text, count in self._rejections.most_common(40))]
        lines += [f"failed: {command(case)}" for case in self.shrunk]
        return "\n".join(lines)


def category(case: Case, what: str) -> str:
    """Returns the category of a comparison: the dtype, and whether state, metric or evaluation."""
    dtype = "bfloat16" if "bfloat16" in case.to_json() else "float32"
    kind = "state"
    for name in ("train", "eval"):
        if f" {name} " in what:
            kind = {"train": "metrics", "eval": "evaluation"}[name]
    for field in ("opt_state", "model_state", "ema", "carry"):
        if f".{field}" in what:
            kind = field
    return f"{dtype} {kind}"


def command(case: Case) -> str:
    """Returns the command that tries a case alone."""
    return f"python -m tests.fuzz --case={shlex.quote(case.to_json())}"
