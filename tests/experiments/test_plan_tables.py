"""The tables' planned values follow from the compiled programs and the calibration."""

import json
import pathlib

import pytest

from experiments.plan import logged, rows, tables
from experiments.plan.rows import Phase, Run, Source
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import planned
from lamb_tpu.reproduce.loading import folder
from lamb_tpu.store import checkout

ROW = {
    "fits": True,
    "batch_size": 4096,
    "compute": 0.06,
    "basis": [1e-3, 1e-4, 1e-4],
    "versions": {"jax": "0", "libtpu": "1"},
}


def run_of(*cells: tuple[str, str, str], phases: int = 1) -> Run:
    made = tuple(
        Phase(f"bert_pretrain:batch=4096,phase={number + 1}", {"model.scan_layers": True}, 1000)
        for number in range(phases)
    )
    return Run("a source", "v3-128", made, cells=cells)


def planned_of(run: Run) -> list[planned.Planned]:
    saved = {phase.key(run.topology): ROW for phase in run.phases}
    return tables.entries([Source("a", "b", "seen", "", (run,))], saved, "0123456789ab")


def test_a_time_and_a_rate() -> None:
    hours, rate = planned_of(run_of(("p/t", "a", "hours"), ("p/t", "b", tables.RATE)))
    assert hours.low < hours.value < hours.high and rate.low < rate.value < rate.high
    # 1,000 updates of 4,096 examples: rate and time describe the same seconds.
    for slow, fast in ((hours.high, rate.low), (hours.value, rate.value), (hours.low, rate.high)):
        assert fast == pytest.approx(4096 / slow / 3600, rel=1e-3)
    # The expected constants of v3: 0.97 times the compiler's time, plus the network.
    network = 1e-3 + 1e6 * (1e-4 * 1.55e-7 + 1e-4 * 6.78e-7)
    assert 3600 * hours.value == pytest.approx(1000 * (0.97 * 0.06 + network), rel=1e-3)
    (minutes,) = planned_of(run_of(("p/t", "a", "minutes"), phases=2))
    assert minutes.value == pytest.approx(2 * 60 * hours.value, rel=1e-3)


def test_the_command() -> None:
    rate, minutes = planned_of(run_of(("p/t", "b", tables.RATE), ("p/t", "a", "minutes")))
    plan = "python -m lamb_tpu.plan --config=bert_pretrain:batch=4096,phase=1 "
    flags = "--config.model.scan_layers=True "
    assert rate.command == f"{plan}{flags}--topology=v3-128"
    assert minutes.command == f"{plan}{flags}'--config.duration=1000 steps' --topology=v3-128"
    (both,) = planned_of(run_of(("p/t", "a", "minutes"), phases=2))
    assert both.command == f"{plan.replace(',phase=1', '')}{flags}--topology=v3-128"


def test_what_is_missing() -> None:
    run = run_of(("p/t", "a", "hours"))
    sources = [Source("a", "b", "seen", "", (run, run_of(phases=2)))]
    assert tables.missing(sources, {}) == [("v3-128", run.phases[0])]
    assert tables.missing(sources, {run.phases[0].key("v3-128"): ROW}) == []
    assert tables.entries(sources, {}, "0123456789ab") == []
    with pytest.raises(UserError, match="'days', which is unknown; use examples_per_second, hours"):
        planned_of(run_of(("p/t", "a", "days")))


def test_a_value_keeps_its_commit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAPERS", tmp_path)
    run = run_of(("p/t", "a", "hours"))
    sources, saved = [Source("a", "b", "seen", "", (run,))], {run.phases[0].key("v3-128"): ROW}
    for commit, expected in (("a" * 12, "a" * 12), ("b" * 12, "a" * 12)):
        monkeypatch.setattr(checkout, "commit", lambda commit=commit: commit)
        tables.write(sources, saved)
        (value,) = planned.read(tmp_path)
        assert value.commit == expected
    slower = {key: value | {"compute": 0.07} for key, value in saved.items()}
    tables.write(sources, slower)
    assert planned.read(tmp_path)[0].commit == "b" * 12
    monkeypatch.setattr(checkout, "commit", lambda: "c" * 12 + "+")
    with pytest.raises(UserError, match="commit the code first"):
        tables.write(sources, saved)


def test_shipped_values_are_those_of_the_programs() -> None:
    actual = tables.entries(logged.load_all(), rows.load_rows(), "0" * 12)
    shipped = json.loads((folder() / planned.FILE).read_text())
    made = json.loads(planned.dump(actual))
    assert [each | {"commit": ""} for each in made] == [each | {"commit": ""} for each in shipped]
    assert not tables.missing(logged.load_all(), rows.load_rows())
