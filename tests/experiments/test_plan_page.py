"""The rows and the page of the calibration; one small program is compiled."""

import dataclasses
import importlib.util
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from experiments.plan import generated, interval, logged, page, rows
from experiments.plan.rows import Phase, Run, Source
from lamb_tpu.cost.network import Calibrations, Constants
from lamb_tpu.plan.making import make_plan
from tests.shared import shared

VERSIONS = {"jax": "0", "libtpu": "1"}


def saved_for(sources: tuple[Source, ...]) -> dict[str, dict[str, Any]]:
    """Returns rows of programs with the times of their runs, of which 10 % or 20 % is network time."""
    actual = {}
    for index, run in enumerate(run for source in sources for run in source.runs):
        share = 0.1 + 0.1 * (index % 2)
        time = (run.seconds or 4000.0) / sum(phase.updates for phase in run.phases)
        for phase in run.phases:
            if run.seconds is None and phase.key(run.topology) in actual:
                continue  # a measured run has set the time of this program
            actual[phase.key(run.topology)] = {
                "fits": "v6e" not in run.topology,
                "compute": (1 - share) * time,
                "batch_size": 64,
                "basis": [share * time, 0.0, 0.0],
                "versions": VERSIONS,
                "needed_bytes": 4.0,
                "usable_bytes": 16,
                "compile_seconds": 61.2,
            }
    return actual


def test_published_runs_have_configs_and_slices() -> None:
    sources = rows.load_sources()
    runs = [run for source in sources for run in source.runs]
    assert len(runs) > 30
    for run in runs:
        for phase in run.phases:
            config = phase.config()
            assert not config.phases and config.batch_size > 0
            assert phase.key(run.topology) != phase.key("v3-8")
    assert all(source.known in ("seen", "recalled", "planned") for source in sources)
    assert all(
        (run.seconds is None) == (source.known == "planned")
        for source in sources
        for run in source.runs
    )


def test_published_times_are_those_of_the_papers() -> None:
    tables = {
        (each["paper"].partition(" ")[0], each["table"]): each["rows"]
        for each in json.loads(shared("papers", "tables.json").read_text())
    }
    runs = {source.name: source.runs for source in rows.load_sources()}
    seconds = {"h": 3600, "m": 60}
    expected = [float(row[-1][:-1]) * seconds[row[-1][-1]] for row in tables["LAMB", "Table 1"][1:]]
    assert [run.seconds for run in runs["LAMB, Table 1"]] == pytest.approx(expected)
    both = *runs["EfficientNet-B2, Table 1"], *runs["EfficientNet-B5, Table 1"]
    for run, row in zip(both, tables["EfficientNet", "Table 1"], strict=True):
        size, cores, batch, speed, share = row
        assert run.topology == f"v3-{cores}" and run.phases[0].config().batch_size == batch
        assert f"size={size.lower()}" in run.phases[0].recipe
        assert run.seconds == pytest.approx(batch * run.phases[0].updates / speed / 1000, rel=1e-4)
        assert run.all_reduce == pytest.approx(share / 100)
    minutes = {tuple(row[:3]): row[3] for row in tables["performance", "MLPerf logs"]}
    for run in runs["MLPerf v0.6, ResNet-50"]:
        if run.reported_seconds:
            actual = minutes["v0.6", f"Google/tpu-{run.topology}", "resnet"]
            assert run.reported_seconds / 60 == pytest.approx(actual, abs=5e-4)


def test_saved_rows_are_of_these_configs() -> None:
    keys = {
        phase.key(run.topology)
        for source in logged.load_all()
        for run in source.runs
        for phase in run.phases
    }
    assert set(rows.load_rows()) <= keys


@pytest.mark.long
def test_page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = rows.load_sources()
    saved = saved_for(sources)
    name = "calibration.md.j2"
    (tmp_path / name).write_text((rows.FOLDER / name).read_text())
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    module = tmp_path / "calibrated.py"
    monkeypatch.setattr(generated, "PATH", module)
    text = page.write(sources, saved)
    measured = [run for source in sources for run in source.runs if run.seconds]
    assert f"{len(measured)} runs of 8 programs" in text
    fitted, lines = page.lines_of(sources, saved)
    share = page.network_share(lines[-1].sample, fitted)
    assert share == pytest.approx(0.2, rel=0.1)
    # 1,000 updates of 64 images took 423.14 seconds; the rates are in images per millisecond.
    assert (
        f"| {lines[-1].run.phases[0].recipe} | {64 / 423.14:.4g} | {64 / lines[-1].seconds:.4g} | "
        f"1 % | {100 * share:.2g} % |" in text
    )
    reported = next(line for line in lines if line.run.reported_seconds == 136.38)
    minutes = reported.seconds * 2971.46 / 2815.07 / 60
    assert f"| MLPerf v0.6, ResNet-50 | v3-1024 | 2.27 min | {minutes:.2f} min |" in text
    assert "recipe=mixed,phase=2, accumulation_steps=2 | v4-512 | 25 % | " in text
    assert "v6e-256 | does not fit |" in text
    assert (tmp_path / "calibration.svg").read_text().startswith("<?xml")
    assert (tmp_path / "calibration.md").read_text() == text == page.write(sources, saved)
    # Plans use the constants of the page.
    made: dict[str, Calibrations] = {}
    exec(module.read_text(), made)
    calibrated = made["CALIBRATED"]
    covered = sum(line.is_covered for line in lines)
    assert calibrated.validation.programs == (covered, len(lines))
    assert f"| each program in turn | {covered} of {len(lines)} |" in text
    assert calibrated.fitted_to == f"{len(measured)} published runs on TPU v3 and v4"
    assert text.count(", **outside** |") == len(lines) - covered
    # The interval of a generation without runs is wider.
    planned = next(run for run in sources[-1].runs if run.topology == "v5p-512")
    sample = page.sample_of(planned, saved)
    assert sample is not None
    exact = page.calibrations(fitted, lines).unseen
    low, middle, high = (page._time(interval.seconds(each, sample)) for each in exact)
    assert f"| v5p-512 | {middle} | {low} to {high} |" in text
    # An uncompiled run is not on the page, and plans keep their constants.
    del saved[measured[1].phases[0].key(measured[1].topology)]
    module.unlink()
    assert f"{len(measured) - 1} runs of 8 programs" in page.write(sources, saved)
    assert not module.exists()


def test_a_runs_time_is_that_of_its_phases() -> None:
    phase = Phase("digits:batch=64", {}, 10.0)
    other = dataclasses.replace(phase, updates=5.0, overrides={"batch_size": 128})
    run = Run("s", "v5e-4", (phase, other), evaluated=640, seconds=1.0)
    saved = {
        phase.key("v5e-4"): {"fits": True, "compute": 3.0, "basis": [1, 2, 3], "batch_size": 64},
        other.key("v5e-4"): {"fits": True, "compute": 6.0, "basis": [4, 0, 0], "batch_size": 128},
    }
    sample = page.sample_of(run, saved)
    assert sample is not None
    assert sample.compute == 10 * 3 + 5 * 6 + 640 / 64 * 3 / 3
    assert sample.basis == (30, 20, 30)
    saved[other.key("v5e-4")]["fits"] = False
    assert page.sample_of(run, saved) is None


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_a_programs_time_is_linear_in_the_constants() -> None:
    phase = Phase("digits:batch=64", {"parallel.backend": "shard_map"}, 1.0)
    made = make_plan(phase.config(), "v5e-4")
    row = json.loads(json.dumps(rows.measure(made, phase.key("v5e-4"))))
    (timeline,) = made.timelines([Constants(0.8, 3e-6, 7e-6, 1.0, 0.0)])
    assert row["fits"] and row["hidden"] == pytest.approx(0.0, abs=1e-12)
    assert timeline.compute == pytest.approx(row["compute"])
    assert timeline.exposed == pytest.approx(
        float(np.dot(row["basis"], (1.25, 3.0, 7.0))), rel=1e-6
    )


def test_missing_programs_are_named_once() -> None:
    phase = Phase("digits:batch=64", {}, 1.0)
    runs = Run("s", "v5e-4", (phase, phase)), Run("s", "v3-8", (phase,))
    source = Source("s", "w", "seen", "", runs)
    keys = list(page.missing([source], {}))
    assert keys == [phase.key("v5e-4"), phase.key("v3-8")]
    assert list(page.missing([source], {keys[0]: {}})) == keys[1:]
