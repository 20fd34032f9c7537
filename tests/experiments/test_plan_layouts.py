"""The page of the fastest layouts, and a search over synthetic plans."""

import json
import pathlib

import pytest

from experiments.plan import layouts
from lamb_tpu.plan.cache import Cache
from tests.plan import planned


@pytest.mark.long
def test_a_search_and_its_page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(config, _):
        if config.model.get("remat") == "dots":
            return "cannot have remat 'dots'"
        fits = 8 if config.accumulation_steps > 1 else 20
        return fits, 100 + config.accumulation_steps - 30 * (config.mesh["sequence"] == 2)

    planned.instead(monkeypatch, outcome)
    monkeypatch.setattr(layouts, "FOLDER", tmp_path)
    record = layouts.search("v3-1024", Cache(None))
    text = layouts.write([record])
    assert layouts.load() == [json.loads(json.dumps(record))]
    assert (tmp_path / "layouts.md").read_text() == text
    assert "| as given | 129 %: does not fit | |" in text
    assert "| `accumulation_steps=2` | 51.7 % | 102 (96.9 to 112.2) |" in text
    assert "rejected: the step cannot have remat 'dots' | |" in text
    flags = ("accumulation_steps=2", "mesh.sequence=2", "parallel.backend=jit")
    assert "\n".join([*(f"--config.{flag}" for flag in flags), "```"]) in text
    assert "the fastest layout on v3-1024: 51.7 % of memory, 72 (68.4 to 79.2) ms a step" in text
    # Every tried layout has a row.
    assert text.count("\n| ") == 2 + len(record["trials"])


def test_saved_records_make_the_page() -> None:
    records = layouts.load()
    if not records:
        pytest.skip("no search was made yet")
    assert (layouts.FOLDER / "layouts.md").read_text() == layouts.page(records)
    assert [record["topology"] for record in records] == list(layouts.TOPOLOGIES)
