"""Runs on TPUs are added to the calibration; all runs in these tests are synthetic."""

import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from ml_collections import ConfigDict

from experiments.plan import __main__ as command
from experiments.plan import generated, logged, page, rows
from lamb_tpu import cli
from lamb_tpu.config import base_config
from lamb_tpu.cost.network import Calibrations
from lamb_tpu.errors import UserError
from lamb_tpu.plan.cache import Cache
from lamb_tpu.store.workdir import Workdir
from tests import tiny

RECEIPT: dict[str, Any] = {
    "device": "TPU v5 lite",
    "devices": 4,
    "mesh": {"data": 4},
    "jax": "0.10.2",
    "commit": "abc",
}


def workdir(
    folder: pathlib.Path,
    *,
    receipts: tuple[Mapping[str, Any], ...] = ({},),
    updates: int = 30,
    finished: bool = True,
    config: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes the files of a run on TPU v5e, with invented rates."""
    folder.mkdir()
    actual = cli.load_recipe("digits:batch=64")
    actual.update_from_flattened_dict(
        {
            "duration": f"{3 * updates if finished else 999} steps",
            "checkpoint.keep": 7,
            **(config or {}),
        }
    )
    Workdir(folder).write_config(actual)
    lines = [json.dumps(RECEIPT | dict(each)) for each in receipts]
    (folder / "run.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "parameters.txt").write_text("total: 6 leaves, 17,226 values; decay: 3 leaves\n")
    records: list[dict[str, Any]] = [
        {
            "step": (index + 1) * updates,
            "kind": "train",
            "updates": updates,
            "loss": 1.0,
            "learning_rate": 0.1,
            "epoch": (index + 1) * updates * 64 / 1437,
            "seconds": 1.0,
            "examples_per_second": rate,
        }
        for index, rate in enumerate((32_000.0, 64_000.0, 640.0))
    ]
    records.append(records[-1] | {"kind": "eval", "accuracy": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder that replaces experiments/plan and has only the template of the page."""
    folder = tmp_path / "plan"
    folder.mkdir()
    name = "calibration.md.j2"
    (folder / name).write_text((rows.FOLDER / name).read_text())
    for module in (rows, page):
        monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(logged, "PATH", folder / "logged.jsonl")
    monkeypatch.setattr(generated, "PATH", folder / "calibrated.py")
    return folder


def test_a_run_in_numbers(tmp_path: pathlib.Path) -> None:
    row = logged.of_workdir(workdir(tmp_path / "run"))
    assert (row.topology, row.updates, row.examples) == ("v5e-4", 90, 1437)
    assert row.seconds == pytest.approx(90 * 64 / 32_000)  # by the median rate
    assert row.program == "mlp of 17,226 parameters"
    # The stored config gives the same program; keys that do not affect the program are left out.
    config = row.phase.config()
    assert config.batch_size == 64 and config.checkpoint.keep == base_config().checkpoint.keep != 7
    assert row.phase.name == "mlp of 17,226 parameters, batch 64"
    # If several slices have this number of devices, the slice must be given, and must have these TPUs.
    assert logged.of_workdir(tmp_path / "run", "2xv5e:1x2").topology == "2xv5e:1x2"
    with pytest.raises(UserError, match="'TPU v5 lite'.* is a v5e, and v4-8 is a slice of v4"):
        logged.of_workdir(tmp_path / "run", "v4-8")
    (tmp_path / "run" / "parameters.txt").unlink()
    with pytest.raises(UserError, match="parameters.txt has no line with the total number"):
        logged.of_workdir(tmp_path / "run")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"receipts": ({"device": "cpu"},)}, "device='cpu' is not a TPU; give a run on a TPU"),
        ({"receipts": ({"device": "NVIDIA H200"},)}, "device='NVIDIA H200' is not a TPU"),
        ({"receipts": ({"device": "TPU v99"},)}, "device 'TPU v99' is unknown; use TPU v2"),
        (
            {"receipts": ({"devices": 24, "mesh": {"data": 24}},)},
            r"no slice of v5e has 24 devices .*--topology, such as 2xv5e-12 for two",
        ),
        ({"receipts": ({}, {"devices": 8})}, "was started with devices 4 and 8"),
        ({"receipts": ()}, "has an empty run.jsonl"),
        (
            {"receipts": ({"devices": "4"},)},
            "run.jsonl has no devices of type int; restore the file",
        ),
        (
            {"receipts": ({"mesh": {"data": 2}},)},
            r"mesh=\{'data': 2\} does not fit v5e-4, which has 4 devices",
        ),
        ({"finished": False}, "holds a run that is at 90 of 999 steps; let it finish"),
        ({"updates": 16}, "has too few timed updates: 48 instead of at least 50"),
        (
            {"config": {"task.name": "mine.tasks:Other"}},
            "custom component task.name=mine.tasks:Other",
        ),
    ],
)
def test_runs_that_are_no_points(
    tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    folder = workdir(tmp_path / "run", **changes)
    with pytest.raises(UserError, match=message) as caught:
        logged.of_workdir(folder)
    assert "\n" not in str(caught.value)


def test_a_batch_that_changes(tmp_path: pathlib.Path) -> None:
    folder = workdir(tmp_path / "run")
    config = cli.load_recipe("digits:batch=64")
    config.update_from_flattened_dict({"duration": "90 steps"})
    config.batch_rule = ConfigDict({"name": "noise_scale", "upper": 256, "interval": 1})
    config.accumulation_steps = 2
    Workdir(folder).write_config(config)
    with pytest.raises(UserError, match="changes its batch, so its rates belong to several"):
        logged.of_workdir(folder)


@pytest.mark.long
def test_no_run(tmp_path: pathlib.Path) -> None:
    done = tiny.command("experiments.plan", f"--add={tmp_path}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--add {tmp_path} holds no run: config.json is missing" in tiny.unbroken(done.stderr)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("seconds", 0, "seconds=0 is out of range; give a positive, finite"),
        ("seconds", "1", "seconds='1' has the wrong type"),
        ("updates", True, "updates=True has the wrong type"),
        ("topology", "v5e-5", "cannot be planned: --topology='v5e-5'"),
        ("mesh", {"data": 3}, "has 4 devices"),
        ("config", {"batch_sice": 64}, "config has no batch_size"),
        ("config", {"batch_size": 64, "sead": 1}, "cannot be planned: config.sead is unknown"),
        ("config", {"batch_size": "64"}, "cannot be planned: config.batch_size='64'"),
        ("program", " ", "program is empty"),
        ("extra", 1, "has missing or unknown fields: extra"),
    ],
)
def test_a_damaged_file(
    tmp_path: pathlib.Path, files: pathlib.Path, field: str, value: Any, message: str
) -> None:
    logged.add(logged.of_workdir(workdir(tmp_path / "run")))
    [line] = logged.PATH.read_text().splitlines()
    logged.PATH.write_text(f"{line}\n{json.dumps(json.loads(line) | {field: value})}\n")
    with pytest.raises(UserError, match=f"^line 2 of .*logged.jsonl.*{message}"):
        logged.load_all()


def test_a_run_is_added_once(tmp_path: pathlib.Path, files: pathlib.Path) -> None:
    assert logged.load_all() == rows.load_sources()
    row = logged.of_workdir(workdir(tmp_path / "run"))
    logged.add(row)
    assert logged.read(logged.PATH) == [row]
    with pytest.raises(UserError, match="already contains this run, in line 1"):
        logged.add(row)
    logged.PATH.write_text(2 * logged.PATH.read_text())
    with pytest.raises(UserError, match="line 2 of .* repeats line 1"):
        logged.load_all()


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_a_run_joins_the_fit(
    tmp_path: pathlib.Path, files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, saved = logged.of_workdir(workdir(tmp_path / "run")), rows.load_rows()
    command.add(row, saved, Cache(None))
    printed = capsys.readouterr().out
    assert "added to logged.jsonl: mlp of 17,226 parameters, batch 64 on v5e-4, 2 ms" in printed
    assert "which excludes the measured time" in printed  # these rates are far from those of a TPU
    assert "fitted again to 32 runs" in printed and "unchanged" not in printed
    text = (files / "calibration.md").read_text()
    assert "32 runs of 9 programs on TPU v3, v4 and v5e" in text
    assert "| lamb_tpu, mlp of 17,226 parameters | v5e-4 | 64 |" in text
    assert row.phase.key("v5e-4") in json.loads((files / "rows.json").read_text())
    made: dict[str, Calibrations] = {}
    exec(generated.PATH.read_text(), made)
    calibrated = made["CALIBRATED"]
    assert calibrated.fitted_to == "31 published and 1 logged runs on TPU v3, v4 and v5e"
    assert set(calibrated.known) == {"v3", "v4", "v5e"}
    assert calibrated.validation.programs[1] == 32
    # The program is compiled for a mesh that differs from the run's.
    other = logged.of_workdir(
        workdir(tmp_path / "other", receipts=({"mesh": {"data": 2, "model": 2}},), updates=31)
    )
    message = r"mesh of the run is \{.*'model': 2\}, which differs from .* compiled for v5e-4 has the mesh"
    with pytest.raises(UserError, match=message):
        command.add(other, {}, Cache(None))
