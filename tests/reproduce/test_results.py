"""Records are kept beside their table, and a damaged file is one sentence."""

import json
import pathlib

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import jobs, loading, results
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.workdir import Workdir
from tests.reproduce.papers import TABLE, record, write


def job_of(table: Table, cell: str = "lamb", seed: int = 0) -> Job:
    return Job(table, table.scales["small"], table.cells[cell], seed)


def add(found: Results, job: Job, accuracy: float | None, **more: object) -> None:
    flat = jobs.flat_configs([stage.config() for stage in jobs.stages(job)])
    digest = jobs.config_hash(flat)
    fields = {"factor": job.factor, "config": digest, **more}
    found.add(record(job.cell.name, job.seed, accuracy, **fields), flat)


def test_two_processes_may_add(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    first, second = Results(table), Results(table)
    add(first, job_of(table), 0.9)
    add(second, job_of(table, seed=1), 0.8)
    assert [record["seed"] for record in Results(table)] == [0, 1]


def test_records_outlive_the_process(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    found = Results(table)
    assert list(found) == [] and not found.holds(job_of(table))
    for seed in (1, 0):
        add(found, job_of(table, seed=seed), 0.9)
    again = Results(table)
    assert [r["seed"] for r in again] == [0, 1]
    assert again.holds(job_of(table)) and not again.holds(job_of(table, seed=2))
    # Both seeds have one config, which is kept once.
    assert len(json.loads((tmp_path / "small" / "digits.configs.json").read_text())) == 1
    add(again, job_of(table), 0.8)
    assert [r["values"]["accuracy"] for r in Results(table)] == [0.8, 0.9]


def test_a_changed_config_makes_a_record_stale(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9)
    table = write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    found = Results(table)
    assert found.of(job_of(table)) is not None and not found.holds(job_of(table))
    assert found.changes(job_of(table)) == ["duration: '4 steps' there, '5 steps' now"]
    add(found, job_of(table), 0.7)
    assert found.holds(job_of(table)) and len(list(found)) == 1
    # The config of nobody's record is gone.
    assert len(json.loads((tmp_path / "small" / "digits.configs.json").read_text())) == 1


def test_records_of_the_package_are_of_committed_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9, commit="0123456789ab+")  # a user's own table
    monkeypatch.setattr(loading, "folder", lambda: tmp_path)
    shipped = Results(table)
    message = "digits.jsonl takes records of committed code only, .* since commit 0123456789ab;"
    with pytest.raises(UserError, match=message):
        add(shipped, job_of(table, seed=1), 0.9, commit="0123456789ab+")
    assert [found["seed"] for found in Results(table)] == [0]  # still readable
    for seed, commit in ((1, "0123456789ab"), (2, None)):  # an installed package has no commit
        add(shipped, job_of(table, seed=seed), 0.9, commit=commit)
    add(Results(table, tmp_path / "mine"), job_of(table), 0.9, commit="0123456789ab+")
    assert len(list(Results(table))) == 3


def test_machine() -> None:
    old = record("lamb", 0, 0.9)
    versions = "jax 0.10.2, commit 0123456789ab"
    assert results.machine(old) == f"1 x cpu, 2 cores, processor not recorded, {versions}"
    new = old | {"processor": "Fast", "commit": "0123456789ab+"}
    assert results.machine(new) == f"1 x cpu, 2 cores, Fast, {versions} with uncommitted changes"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("digits.jsonl", "{\n", "line 1 of .*digits.jsonl is not JSON"),
        ("digits.jsonl", '{"cell": "lamb"}\n', "digits.jsonl is damaged .line 1 has no scale"),
        ("digits.configs.json", "[", "digits.configs.json is damaged"),
        ("digits.configs.json", "{}", "digits.configs.json is damaged .the config .* is missing"),
    ],
)
def test_damage(tmp_path: pathlib.Path, name: str, text: str, message: str) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9)
    (tmp_path / "small" / name).write_text(text)
    with pytest.raises(UserError, match=message):
        Results(table)


def test_a_metric_that_is_not_finite_is_a_run_that_diverged(tmp_path: pathlib.Path) -> None:
    job = job_of(write(tmp_path))
    (stage,) = jobs.stages(job)
    folder = Workdir(tmp_path / "run")
    folder.check(stage.config())
    folder.write_config(stage.config())
    receipt = dict.fromkeys(("device", "devices", "cores", "jax", "commit", "python"), "")
    receipts = [receipt | {"commit": "a+"}, receipt | {"commit": "b", "processor": "Fast"}]
    (folder.path / "run.jsonl").write_text("".join(json.dumps(each) + "\n" for each in receipts))
    with MetricsWriter(folder.path, 0, tensorboard=False) as writer:
        writer.write(4, "train", {"loss": 2.0, "seconds": 0.5, "learning_rate": 0.1})
        writer.write(4, "eval", {"accuracy": float("nan"), "loss": 2.0, "epoch": 0.3})
    found = results.of_run(job, folder.path)
    assert found["values"] is None and found["diverged"] == "the last accuracy is nan"
    # The run began with changed code.
    assert (found["commit"], found["processor"]) == ("a+", "Fast")
    assert found["evaluations"] == [[0.3, None]] and found["losses"] == [[4, 2.0]]
    assert (found["updates"], found["examples"]) == (4, 4 * 128)
    with MetricsWriter(folder.path, 4, tensorboard=False) as writer:  # of a batch that changes
        writer.write(8, "train", {"seconds": 0.9, "learning_rate": 0.1, "examples": 900})
    found = results.of_run(job, folder.path)
    assert (found["updates"], found["examples"]) == (8, 900) and found["sent_bytes"] is None


def test_bytes_are_a_mean_over_updates() -> None:
    records = [{"step": 3}, {"step": 4, "sent_bytes": 100}, {"step": 7, "sent_bytes": 20}]
    assert results._sent_bytes(records) == 40


def test_curves_are_thinned_and_keep_their_end() -> None:
    found = results._thinned([{"step": n} for n in range(1, 1001)], 60)
    assert 50 <= len(found) <= 60 and found[-1]["step"] == 1000
    assert results._thinned([], 60) == []
    assert [r["step"] for r in results._thinned([{"step": 1}, {"step": 2}], 60)] == [1, 2]
