"""Committed measurements come from committed code."""

import json
import re

from lamb_tpu.config import unflatten
from lamb_tpu.spec import parse
from tests.tiny import ROOT

# Records from a tree with uncommitted changes, made before `Results.add` rejected them. Remove an
# entry when its row is measured again; add none.
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
        path: sum(not re.fullmatch('"[0-9a-f]{12,}"', commit) for commit in actual)
        for path, actual in commits.items()
    }
    above = {path: number for path, number in changed.items() if number > CHANGED.get(path, 0)}
    assert not above, f"commit the code and measure these again: {above}"
    assert {path: number for path, number in changed.items() if number} == CHANGED


def test_configs_of_records_have_the_keys_of_this_version() -> None:
    paths = sorted((ROOT / "experiments").rglob("*.configs.json"))
    stages = [
        stage
        for path in paths
        for configs in json.loads(path.read_text()).values()
        for stage in configs
    ]
    assert len(stages) > 500
    # Configs that differ only in values have the same keys, so one of them is checked.
    for flat in {tuple(sorted(stage)): stage for stage in stages}.values():
        parse(unflatten(flat))
