"""Runs with models, tasks, data sets and optimizers of a user's own."""

import importlib.util
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import Preempted
from lamb_tpu.export import export
from lamb_tpu.run.build import prepare
from lamb_tpu.train import train
from lamb_tpu.watch.mlperf import hyperparameters
from tests import own_pages, tiny


def all_own(model: str, **changes: Any) -> ConfigDict:
    """The small run with four parts of a user's own; digits are its data."""
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
def test_resumed_run_is_the_uninterrupted_one(
    own_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Also where examples are drawn anew in every epoch."""
    pixels = {"pixels": 2} if "nnx" in model else {}
    config = tiny.change(
        all_own(model),
        {
            "data.name": "my_records:Rings",
            "data.train_split": "train",
            "task.scale": 1.0,
            "data.options": ConfigDict({"size": 256}),
        },
    )
    tiny.change(config, {f"model.{key}": value for key, value in pixels.items()})
    whole = train(config, own_folder / "whole", quiet=True)
    assert set(whole) == {"error", "accuracy"}
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 7)
        with pytest.raises(Preempted):
            train(config, own_folder / "parts", quiet=True)
    assert train(config, own_folder / "parts", quiet=True) == whole
    states = [tiny.restored(config, own_folder / name)[0] for name in ("whole", "parts")]
    assert int(states[0].step) == 12
    tiny.assert_equal(*states)


@pytest.mark.long
def test_any_number_of_devices_and_microbatches(own_folder: pathlib.Path) -> None:
    """Plain functions see parts of the batch as the whole, under both backends."""
    config = all_own("my_jax:two_layers", duration="4 steps")
    tiny.change(config, {"mesh.data": 1, "mesh.fsdp": 1})
    devices, found = jax.devices(), []
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
        found.append(jax.device_get((state.params, sums)))
    for other in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0], other
        )


@pytest.mark.long
def test_parameters_of_any_tree(own_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of tuples and dicts, with a count beside it: trained, resumed, read by another run."""
    config = tiny.change(
        all_own("my_jax:two_layers"),
        {
            "model": ConfigDict({"name": "my_broken:in_a_list"}),
            "ema.decay": 0.9,
            "optimizer": ConfigDict(
                {"name": "lamb", "learning_rate": 0.02, "collect": True, "rules": ((".*", {}),)}
            ),
        },
    )
    whole = train(config, own_folder / "whole", quiet=True)
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 7)
        with pytest.raises(Preempted):
            train(config, own_folder / "parts", quiet=True)
    assert train(config, own_folder / "parts", quiet=True) == whole
    state, other = (tiny.restored(config, own_folder / name)[0] for name in ("whole", "parts"))
    tiny.assert_equal(state, other)
    assert int(state.model_state["calls"]["count"]) == 12
    export(own_folder / "whole", own_folder / "out")
    for source in ("whole", "out"):
        further = tiny.change(config.copy_and_resolve_references(), {"init_from": source})
        first = prepare(further, own_folder / f"from {source}").first_state()
        tiny.assert_equal(first.params, state.params)
        assert int(first.model_state["calls"]["count"]) == 12


def test_hyperparameters_of_an_optimizer_of_ones_own(own_folder: pathlib.Path) -> None:
    run = prepare(all_own("my_jax:two_layers"), own_folder / "run")
    found = hyperparameters(run)
    assert found["opt_name"] == "my_optimizers:sign_momentum" and found["opt_weight_decay"] == 0.01


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
def test_plan(own_folder: pathlib.Path) -> None:
    (outcome,) = own_pages.run(
        [["lamb_tpu.plan", "--config=mine.py", "--topology=v2-8", "--json", "--cache=none"]],
        own_folder,
    )
    assert outcome["status"] == 0, outcome["stderr"]
    plan = json.loads(outcome["stdout"])
    assert plan["fits"] and plan["model_flops"] == 3 * 2 * 128 * (2 * 64 + 64 * 2) / 8


@pytest.mark.long
def test_commands(own_folder: pathlib.Path) -> None:
    """From the folder of the modules: every command, resuming, and errors in their code."""
    run = ["lamb_tpu.train", "--config=mine.py", "--workdir=run", "--config.model.width=16"]
    lines = [
        run,
        run,
        ["lamb_tpu.evaluate", "--workdir=run"],
        ["lamb_tpu.evaluate", "--workdir=run", "--config=mine.py", "--config.model.width=17"],
        ["lamb_tpu.export", "--workdir=run", "--output=out"],
        ["lamb_tpu.train", "--config=mine.py", "--print_config"],
        [
            "lamb_tpu.train",
            "--config=mine.py",
            "--workdir=x",
            "--config.task={'name': 'my_broken:Other'}",
        ],
        [
            "lamb_tpu.train",
            "--config=mine.py",
            "--workdir=x",
            "--config.model={'name': 'my_broken:Fails'}",
        ],
    ]
    found = own_pages.run(lines, own_folder, devices=2)
    statuses = [outcome["status"] for outcome in found]
    assert statuses == [0, 0, 0, 2, 0, 0, 2, 2], found
    assert "the run was already complete" in found[1]["stdout"]
    records = (own_folder / "run" / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in records if '"eval"' in line][-1]
    evaluated = json.loads(found[2]["stdout"])
    assert evaluated["step"] == 8 and evaluated["error"] == last["error"]
    assert "model.width: 16 there, 17 now" in found[3]["stderr"]
    receipt = json.loads((own_folder / "run" / "run.jsonl").read_text())
    assert set(receipt["own"]) == {
        "my_jax:two_layers",
        "my_tasks:SquaredError",
        "my_arrays:rings",
        "my_optimizers:sign_momentum",
    }
    settings = json.loads((own_folder / "out" / "config.json").read_text())
    assert settings["model"] == {"name": "my_jax:two_layers", "num_classes": 2, "width": 16}
    assert "config.model.width = 64  # default of my_jax:two_layers\n" in found[5]["stdout"]
    assert "config.data.name = 'my_arrays:rings'\n" in found[5]["stdout"]
    for outcome, message in zip(
        found[6:8],
        (
            "error: your own module my_broken fails at line 65 of ",
            "error: your own module my_broken fails at line 55 of ",
        ),
        strict=True,
    ):
        assert message in outcome["stderr"] and outcome["stderr"].count("\n") == 1
    assert found[6]["stderr"].endswith("my_broken.py: KeyError: 'margin'\n")
    assert "my_broken.py: AttributeError: " in found[7]["stderr"]


@pytest.mark.long
def test_several_processes(own_folder: pathlib.Path) -> None:
    """Each finds the modules in the current folder, as the launcher does."""
    (outcome,) = own_pages.run(
        [
            [
                "lamb_tpu.launch",
                "local",
                "--processes=2",
                "--",
                "--config=digits",
                "--workdir=run",
                "--config.model={'name': 'my_nnx:TwoLayers'}",
                *own_pages.SHORT,
                "--config.duration=2 steps",
            ]
        ],
        own_folder,
    )
    assert outcome["status"] == 0, outcome["stderr"]
    (record,) = (own_folder / "run" / "run.jsonl").read_text().splitlines()
    assert json.loads(record)["processes"] == 2 and "my_nnx:TwoLayers" in json.loads(record)["own"]
