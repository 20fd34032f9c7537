"""Tests runs with custom models, tasks, data sets and optimizers."""

import importlib.util
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.export import export
from lamb_tpu.run.build import prepare
from lamb_tpu.train import train
from lamb_tpu.watch.mlperf import hyperparameters
from tests import package_pages, tiny


def all_custom(model: str, **changes: Any) -> ConfigDict:
    config = tiny.digits(**changes)
    return tiny.change(
        config,
        {
            "model": ConfigDict({"name": model, "width": 16}),
            "task": ConfigDict({"name": "my_tasks:SquaredError"}),
            "optimizer": ConfigDict(
                {
                    "name": "my_optimizers:sign_momentum",
                    "learning_rate": 0.01,
                    "weight_decay": 0.01,
                    "rules": "no_bias_no_norm",
                }
            ),
        },
    )


@pytest.mark.long
@pytest.mark.parametrize("model", ["my_linen:TwoLayers", "my_nnx:TwoLayers", "my_jax:two_layers"])
def test_resumed_run_is_the_uninterrupted_one(custom_folder: pathlib.Path, model: str) -> None:
    """A resumed run equals an uninterrupted run, even if examples are drawn again in every epoch."""
    pixels = {"pixels": 2} if "nnx" in model else {}
    config = tiny.change(
        all_custom(model),
        {
            "data.name": "my_records:Rings",
            "data.train_split": "train",
            "task.scale": 1.0,
            "data.options": ConfigDict({"size": 256}),
        },
    )
    tiny.change(config, {f"model.{key}": value for key, value in pixels.items()})
    uninterrupted = train(config, custom_folder / "full", quiet=True)
    assert set(uninterrupted) == {"error", "accuracy"}
    with tiny.preempted_at(7):
        train(config, custom_folder / "resumed", quiet=True)
    assert train(config, custom_folder / "resumed", quiet=True) == uninterrupted
    state = tiny.same_state(config, custom_folder / "full", custom_folder / "resumed")
    assert int(state.step) == 12


@pytest.mark.long
def test_any_number_of_devices_and_microbatches(custom_folder: pathlib.Path) -> None:
    """A model of plain functions has the same update on any devices, in microbatches, with both backends."""
    config = all_custom("my_jax:two_layers", duration="4 steps")
    tiny.change(config, {"mesh.data": 1, "mesh.fsdp": 1})
    devices, actual = jax.devices(), []
    for count, changes in (
        (1, {}),
        (4, {}),
        (4, {"accumulation_steps": 2}),
        (
            4,
            {
                "parallel.backend": "shard_map",
                "parallel.optimizer_state": "zero1",
                "accumulation_steps": 2,
            },
        ),
    ):
        changed = config.copy_and_resolve_references()
        tiny.change(changed, {"mesh.data": count, **changes})
        run = prepare(changed, None, devices[:count])
        state, step = run.first_state(), run.make_train_step()
        example = run.train_set.gather(run.local_rows())
        state, sums = step(state, run.shard_batch(example))
        actual.append(jax.device_get((state.params, sums)))
    for other in actual[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual[0], other
        )


@pytest.mark.long
def test_any_parameter_tree(custom_folder: pathlib.Path) -> None:
    """Trains, resumes and exports parameters in a list of tuples and dicts, with a count in the state."""
    config = tiny.change(
        all_custom("my_jax:two_layers"),
        {
            "model": ConfigDict({"name": "my_broken:in_a_list"}),
            "ema.decay": 0.9,
            "optimizer": ConfigDict(
                {"name": "lamb", "learning_rate": 0.02, "collect": True, "rules": ((".*", {}),)}
            ),
        },
    )
    uninterrupted = train(config, custom_folder / "full", quiet=True)
    with tiny.preempted_at(7):
        train(config, custom_folder / "resumed", quiet=True)
    assert train(config, custom_folder / "resumed", quiet=True) == uninterrupted
    state = tiny.same_state(config, custom_folder / "full", custom_folder / "resumed")
    assert int(state.model_state["calls"]["count"]) == 12
    export(custom_folder / "full", custom_folder / "out")
    for source in ("full", "out"):
        further = tiny.change(config.copy_and_resolve_references(), {"init_from": source})
        first = prepare(further, custom_folder / f"from {source}").first_state()
        tiny.assert_equal(first.params, state.params)
        assert int(first.model_state["calls"]["count"]) == 12


def test_hyperparameters_of_a_custom_optimizer(custom_folder: pathlib.Path) -> None:
    run = prepare(all_custom("my_jax:two_layers"), custom_folder / "run")
    actual = hyperparameters(run)
    assert (
        actual["opt_name"] == "my_optimizers:sign_momentum" and actual["opt_weight_decay"] == 0.01
    )


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
def test_plan(custom_folder: pathlib.Path) -> None:
    (outcome,) = package_pages.run(
        [["lamb_tpu.plan", "--config=mine.py", "--topology=v2-8", "--json", "--cache=none"]],
        custom_folder,
    )
    assert outcome["status"] == 0, outcome["stderr"]
    plan = json.loads(outcome["stdout"])
    assert plan["fits"] and plan["model_flops"] == 3 * 2 * 128 * (2 * 64 + 64 * 2) / 8


@pytest.mark.long
def test_commands(custom_folder: pathlib.Path) -> None:
    """Runs commands in the folder of the custom modules, resumes a run, and checks errors in the modules."""
    run = ["lamb_tpu.train", "--config=mine.py", "--workdir=run", "--config.model.width=16"]
    lines = [
        run,
        run,
        ["lamb_tpu.evaluate", "--workdir=run"],
        ["lamb_tpu.evaluate", "--workdir=run", "--config=mine.py", "--config.model.width=17"],
        ["lamb_tpu.export", "--workdir=run", "--output=out"],
        ["lamb_tpu.train", "--config=mine.py", "--print-config"],
        [*run[:2], "--workdir=x", "--config.task={'name': 'my_broken:Other'}"],
        [*run[:2], "--workdir=x", "--config.model={'name': 'my_broken:Fails'}"],
    ]
    actual = package_pages.run(lines, custom_folder, devices=2)
    statuses = [outcome["status"] for outcome in actual]
    assert statuses == [0, 0, 0, 2, 0, 0, 2, 2], actual
    assert "the run was already complete" in actual[1]["stdout"]
    records = (custom_folder / "run" / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in records if '"eval"' in line][-1]
    evaluated = json.loads(actual[2]["stdout"])
    assert evaluated["step"] == 8 and evaluated["error"] == last["error"]
    assert "model.width: 16 there, 17 now" in actual[3]["stderr"]
    receipt = json.loads((custom_folder / "run" / "run.jsonl").read_text())
    assert set(receipt["own"]) == {
        "my_jax:two_layers",
        "my_tasks:SquaredError",
        "my_arrays:rings",
        "my_optimizers:sign_momentum",
    }
    settings = json.loads((custom_folder / "out" / "config.json").read_text())
    assert settings["model"] == {"name": "my_jax:two_layers", "num_classes": 2, "width": 16}
    assert "config.model.width = 64  # default of my_jax:two_layers\n" in actual[5]["stdout"]
    assert "config.data.name = 'my_arrays:rings'\n" in actual[5]["stdout"]
    for outcome, line in zip(actual[6:8], (65, 55), strict=True):
        message = f"error: custom module my_broken fails at line {line} of "
        assert message in outcome["stderr"] and outcome["stderr"].count("\n") == 1
    assert actual[6]["stderr"].endswith("my_broken.py: KeyError: 'margin'\n")
    assert "my_broken.py: AttributeError: " in actual[7]["stderr"]


@pytest.mark.long
def test_several_processes(custom_folder: pathlib.Path) -> None:
    """Each process that the launcher starts imports the modules from the current folder."""
    training = ["--config=digits", "--workdir=run", "--config.model={'name': 'my_nnx:TwoLayers'}"]
    more = [*package_pages.SHORT, "--config.duration=2 steps"]
    line = ["lamb_tpu.launch", "local", "--processes=2", "--", *training, *more]
    (outcome,) = package_pages.run([line], custom_folder)
    assert outcome["status"] == 0, outcome["stderr"]
    (record,) = (custom_folder / "run" / "run.jsonl").read_text().splitlines()
    assert json.loads(record)["processes"] == 2 and "my_nnx:TwoLayers" in json.loads(record)["own"]
