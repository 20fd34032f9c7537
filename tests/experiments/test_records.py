"""Committed measurements are of committed code."""

import re

from tests.tiny import ROOT

# Records with uncommitted changes, from the time before `Results.add` rejected them. Measuring a
# row again removes it here; none is added.
CHANGED = {
    "batching/mnist.jsonl": 33,
    "batching/seesaw.jsonl": 12,
    "exchange/bert.jsonl": 2,
    "exchange/mnist.jsonl": 44,
    "lamb/mnist.jsonl": 2,
    "legw/lipschitz.json": 2,
    "legw/mnist_lstm.jsonl": 12,
}


def test_no_record_of_uncommitted_code_is_added() -> None:
    folder = ROOT / "experiments"
    commits = {
        str(path.relative_to(folder)): re.findall(r'"commit": ("[^"]*"|null)', path.read_text())
        for path in sorted(folder.rglob("*.json*"))
    }
    assert sum(map(len, commits.values())) > 1000
    changed = {
        path: sum(not re.fullmatch('"[0-9a-f]{12,}"', commit) for commit in found)
        for path, found in commits.items()
    }
    above = {path: number for path, number in changed.items() if number > CHANGED.get(path, 0)}
    assert not above, f"commit the code and measure these again: {above}"
    assert {path: number for path, number in changed.items() if number} == CHANGED
