"""Records of studies: what is kept, what is run, and what flags may say."""

import pathlib
from typing import NamedTuple

import pytest
from absl import flags

from experiments import records as records_lib
from experiments.records import Records, best_rates, run_missing, seed_columns
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records


class Cell(NamedTuple):
    optimizer: str
    rate: float

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.rate}"


CELLS = [Cell("lars", 4.0), Cell("lamb", 0.02), Cell("lamb", 0.01)]


def test_the_newer_record_of_a_cell_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "study.jsonl"
    kept = Records(path, Cell._fields)
    kept.add([])
    assert not path.exists()
    kept.add({**cell._asdict(), "loss": 1.0} for cell in CELLS)
    kept.add([{"optimizer": "lamb", "rate": 0.02, "loss": 0.5}])
    lines = read_records(path)
    found = [(line["rate"], line["loss"]) for line in lines]
    assert found == [(0.01, 1.0), (0.02, 0.5), (4.0, 1.0)]
    again = Records(path, Cell._fields)
    assert list(again) == lines and CELLS[0] in again and Cell("lars", 8.0) not in again
    assert again.of([CELLS[0], Cell("lars", 8.0), CELLS[2], CELLS[2]]) == [lines[0], lines[2]]


def test_only_cells_without_a_record_are_run(tmp_path: pathlib.Path) -> None:
    kept = Records(tmp_path / "study.jsonl", Cell._fields)
    kept.add([CELLS[0]._asdict()])
    started: list[str] = []

    def run(cell: Cell, folder: pathlib.Path) -> None:
        assert folder == tmp_path / cell.name
        started.append(cell.name)
        if cell == CELLS[2]:
            raise KeyboardInterrupt  # of what was run before, nothing is lost
        folder.mkdir()

    def collect(runs: pathlib.Path, wanted: list[Cell]) -> list[dict[str, object]]:
        return [cell._asdict() for cell in wanted if (runs / cell.name).exists()]

    with pytest.raises(KeyboardInterrupt):
        run_missing(CELLS, kept, tmp_path, collect, run)
    assert started == ["lamb-0.02", "lamb-0.01"]
    assert len(read_records(tmp_path / "study.jsonl")) == 2
    (tmp_path / CELLS[2].name).mkdir()
    run_missing(CELLS, kept, tmp_path, collect, None)
    assert all(cell in kept for cell in CELLS) and len(started) == 2


def test_best_rates() -> None:
    found = [cell._asdict() | {"loss": loss} for cell, loss in zip(CELLS, (9.0, 2.0, 1.0))]
    assert best_rates(found, CELLS, lambda record: record["loss"]) == {"lars": 4.0, "lamb": 0.01}
    assert best_rates(found, CELLS, lambda record: -record["loss"])["lamb"] == 0.02
    message = "1 of 3 runs that choose the rates are not there, lamb-0.01 among them"
    with pytest.raises(UserError, match=message):
        best_rates(found[:2], CELLS, lambda record: record["loss"])


def test_columns_of_a_row() -> None:
    machine = {"seconds": 90.0, "device": "cpu", "devices": 1, "cores": 2}
    first, second, third = (
        {"seed": seed, "accuracy": value, **machine} for seed, value in enumerate((0.9, 0.7, None))
    )
    assert seed_columns([], "accuracy") == "not run | - | - | - | -"
    assert seed_columns([first, second], "accuracy") == (
        "0.8000 | 0.7000 to 0.9000 | 0: 0.9000, 1: 0.7000 | 1.5 | 1 x cpu, 2 cores"
    )
    assert seed_columns([first, third], "accuracy") == (
        "1 of 2 diverged | - | 0: 0.9000, 2: diverged | 1.5 | 1 x cpu, 2 cores"
    )


def test_flags_that_list(monkeypatch: pytest.MonkeyPatch) -> None:
    values = flags.FlagValues()
    for name, text in (("seeds", "0,7"), ("batches", "512,many"), ("optimizers", "lamb,sgd"),
                       ("none", "")):
        flags.DEFINE_list(name, text, "", flag_values=values)
    values.mark_as_parsed()
    monkeypatch.setattr(records_lib.flags, "FLAGS", values)
    assert records_lib.integers("seeds") == [0, 7]
    assert records_lib.choices("optimizers", ("lamb", "sgd")) == ["lamb", "sgd"]
    with pytest.raises(UserError, match="--batches is '512,many'; it must be whole numbers"):
        records_lib.integers("batches")
    with pytest.raises(UserError, match="--none is ''; it must be whole numbers"):
        records_lib.integers("none")
    with pytest.raises(UserError, match="--optimizers has 'sgd'; known: lamb, lars"):
        records_lib.choices("optimizers", ("lamb", "lars"))
    with pytest.raises(UserError, match="--none has ''; known: lamb"):
        records_lib.choices("none", ("lamb",))
