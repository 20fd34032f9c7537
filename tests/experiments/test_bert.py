"""The BERT studies: their cells, their recipes, and the pages made of records."""

import json
import pathlib

import pytest

from experiments.bert import end_to_end, large_steps, pod_plan, scaling, scaling_page
from experiments.records import best_rates
from lamb_tpu import config as config_lib
from lamb_tpu import plan
from lamb_tpu.cost import topology
from lamb_tpu.run import phases
from lamb_tpu.run.recipe import resolve


def test_a_rule_carries_the_rate_from_the_smallest_batch():
    rates = {"lamb": 0.004, "adamw": 0.001}
    cells = scaling.cells(65_536, 128, [0], rates)
    assert len({cell.name for cell in cells}) == len(cells) == 11
    peaks = {}
    for cell in cells:
        config = scaling.make_config(cell, None)
        config_lib.check_keys(config)
        config_lib.check_values(config)
        recipe = resolve(config, 10**6)
        assert recipe.total_steps * cell.batch == 65_536
        share = recipe.warmup_steps / recipe.total_steps
        assert share == pytest.approx(cell.batch / 64 / 320)
        assert config.batch_size == 64 * config.accumulation_steps
        peaks[cell[:3]] = recipe.peak_learning_rate
    assert peaks["lamb", "sqrt", 4096] == pytest.approx(8 * 0.004)
    assert peaks["adamw", "sqrt", 1024] == pytest.approx(4 * 0.001)
    assert peaks["adamw", "linear", 4096] == pytest.approx(64 * 0.001)


def test_the_rates_are_those_that_won_at_the_smallest_batch():
    grid = scaling.tuning_cells(65_536, 128)
    assert {(cell.batch, cell.examples) for cell in grid} == {(64, 16_384)}
    won = {"lamb": 0.005, "adamw": 0.002}
    records = [
        cell._asdict() | {"mlm_loss": 5.0 if cell.rate == won[cell.optimizer] else 6.0}
        for cell in grid
    ]
    assert best_rates(records, grid, lambda record: record["mlm_loss"]) == won


def _write(
    folder: pathlib.Path, loss: float, steps: int, scores: dict[str, float] | None = None
) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": steps, "kind": "train", "loss": loss, "seconds": 60.0},
        *({"step": step, "kind": "eval", "mlm_loss": loss * steps / step, "mlm_accuracy": 0.25,
           **(scores or {})} for step in (steps // 2, steps)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    receipt = {"device": "cpu", "devices": 1, "cores": 2, "jax": "0.10", "commit": "abc"}
    (folder / "run.jsonl").write_text(json.dumps(receipt) + "\n")
    (folder / "config.json").write_text(json.dumps({"model.vocab_size": 8192}))


def test_page_of_the_complete_runs(tmp_path):
    rates = {"lamb": 0.01, "adamw": 0.001}
    cells = scaling.cells(65_536, 128, [0, 1], rates)
    for number, cell in enumerate(cells):
        _write(tmp_path / cell.name, 5 + number, cell.examples // cell.batch)
    unfinished = cells[-1]
    metrics = tmp_path / unfinished.name / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    tuned = scaling.tuning_cells(65_536, 128)[0]
    _write(tmp_path / tuned.name, 7.5, tuned.examples // tuned.batch)

    records = scaling.collect(tmp_path, cells)
    assert len(records) == len(cells) - 1
    text = scaling_page.page(records, scaling.collect(tmp_path, [tuned]))
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "% |" in line}
    large = [n for n, cell in enumerate(cells) if cell[:3] == ("lamb", "sqrt", 4096)]
    assert f"0.08 | {5 + sum(large) / 2:.3f} | 25.00% |" in rows["4,096"]
    assert "| lamb | 0.005 | 7.500 | 25.00% |" in text and "not run" not in text
    assert "\n8,192; measured" in text and "128 units" in text
    # At the smallest batch both lines of AdamW show the one run that there is.
    assert rows["64"].split(" | ")[5:8] == [cell.strip(" |") for cell in
                                             rows["64"].split(" | ")[8:11]]
    scaling_page.draw(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_end_to_end_recipes_and_page(tmp_path):
    config = end_to_end.pretrain_config("text", 98_304, 128, 8192)
    first, second = (phase.config for phase in phases.split(config, tmp_path))
    assert (resolve(first, 10**6).total_steps, resolve(second, 10**6).total_steps) == (1536, 256)
    assert (first.data.options.sequence_length, second.data.options.sequence_length) == (128, 512)
    pretrained = tmp_path / "pretrained"
    for number, phase in enumerate((first, second), start=1):
        folder = pretrained / f"phase_{number}"
        _write(folder, 5.0, 64)
        (folder / "config.json").write_text(json.dumps(config_lib.flatten(phase)))
    wanted = [end_to_end.Run(start, 1e-3, seed) for start in end_to_end.STARTS for seed in (0, 1)]
    for run in wanted:
        tuned = end_to_end.squad_config("squad", "train.json", run, pretrained, 2.0)
        config_lib.check_keys(tuned)
        config_lib.check_values(tuned)
        assert (tuned.init_from == str(pretrained)) == (run.start == "pretrained")
        assert tuned.data.options.vocab.endswith("phase_2/vocab.txt")
        assert (tuned.model.vocab_size, tuned.model.hidden_size) == (8192, 128)
        folder = tmp_path / run.name
        assert not end_to_end.is_complete(tuned, folder, 2.0)
        score = 20.0 + run.seed + (run.start == "pretrained")
        _write(folder, 1.0, 9, {"exact_match": 10.0, "f1": score, "epoch": 2.0})
        (folder / "config.json").write_text(json.dumps(config_lib.flatten(tuned)))
        assert end_to_end.is_complete(tuned, folder, 2.0)
        assert not end_to_end.is_complete(tuned, folder, 3.0)
        tuned.optimizer.weight_decay = 0.5
        assert not end_to_end.is_complete(tuned, folder, 2.0)
    settings = {
        "kind": "settings", "hidden_size": 128, "vocabulary": 8192, "examples": 98_304,
        "command": "command",
    }
    tuned = end_to_end.collect(tmp_path, wanted)
    text = end_to_end.page([settings, *end_to_end.phase_records(pretrained), *tuned])
    assert "| phase_2 | 512 | 32 | 64 | 5.000 | 25.00% | 1 |" in text
    assert "4 layers, 128 units, vocabulary of 8,192," in text and "98,304 of 128 tokens" in text
    assert "was not kept" in end_to_end.page([settings, *tuned]) and "not kept" not in text
    assert "| random | 0.001 | 10.00 | 20.50 | 0: 20.00, 1: 21.00 | 9 | 1 |" in text
    assert "| pretrained | 0.001 | 10.00 | 21.50 | 0: 21.00, 1: 22.00 | 9 | 1 |" in text


def test_pod_plan_page():
    made = plan.Plan(
        topology=topology.topology("v3-8"), mesh={"data": 8}, hosts=1, batch_size=64,
        backend="shard_map", compile_seconds=1.0, fits=True, needed=2.0**30,
        cycles=94_000_000, collectives=(),
    )
    records = [pod_plan.record(made, 600, 128), pod_plan.record(made, 1200, 512)]
    text = pod_plan.page(json.loads(json.dumps(records)))
    assert "| 1 | 64 x 128 | yes | 1.0 | 100 | 600 | 1.0 | 0 MB |" in text
    assert "| both | | | | | 1,800 | 3.0 | |" in text


def test_updates_of_bert_large(tmp_path):
    config = large_steps.make_config("text")
    config_lib.check_keys(config)
    config_lib.check_values(config)
    recipe = resolve(config, 10**6)
    assert (recipe.total_steps, recipe.peak_learning_rate) == (8, 0.002)
    assert (config.model.hidden_size, config.model.num_layers) == (1024, 24)
    lines = [
        {"step": step, "kind": "train", "learning_rate": 1e-3 * step, "loss": 11.0,
         "mlm_loss": 10.0, "nsp_loss": 1.0, "grad_norm": 5.0, "seconds": 60.0 * step,
         "tokens_per_second": 100.0}
        for step in (1, 2)
    ]
    del lines[0]["tokens_per_second"]
    lines.append({"step": 2, "kind": "eval", "mlm_loss": 9.0, "nsp_loss": 0.7})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.json").write_text(json.dumps(config_lib.flatten(config)))
    receipt = {"device": "cpu", "devices": 1, "cores": 2, "jax": "0.10", "commit": "abc"}
    (tmp_path / "run.jsonl").write_text(json.dumps(receipt) + "\n")
    text = large_steps.page(large_steps.collect(tmp_path))
    assert "| 1 | 0.001000 | 11.000 | 10.000 | 1.000 | 5.00 | - |" in text
    assert "| 2 | 0.002000 | 11.000 | 10.000 | 1.000 | 5.00 | 100 |" in text
    assert "ln 30,522 + ln 2 = 11.02" in text and "128 tokens, batch 16 in 4 micro" in text
    assert "end at 9.000 and the next sentence at 0.700" in text and "; 2 minutes of" in text
