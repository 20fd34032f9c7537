"""Initial states from the weights of another run: loaded arrays and optimizer states, and errors."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, optim
from lamb_tpu.errors import UserError
from lamb_tpu.models.bert import from_huggingface, to_huggingface
from lamb_tpu.models.transformer import stack_layers
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.weights import open_weights
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected
from tests.test_resume import launched


def begin(
    source: pathlib.Path, workdir: pathlib.Path, config: ConfigDict | None = None, **changes: Any
) -> TrainState:
    """Returns the first state of a run with config.init_from."""
    config = tiny.change(config or tiny.digits(), {"init_from": str(source)})
    tiny.change(config, {key.replace("__", "."): value for key, value in changes.items()})
    return prepare(config, workdir).first_state()


def state_of(workdir: pathlib.Path) -> TrainState:
    return tiny.restored(tiny.digits(), workdir)[0]


@pytest.mark.parametrize(
    "optimizer_state, changes",
    [
        ("reset", {}),
        ("keep", {}),
        ("keep", {"parallel__optimizer_state": "zero1", "parallel__backend": "shard_map"}),
        ("reset", {"parallel__rules": (("hidden0/kernel", "fsdp"),), "mesh__fsdp": 4}),
    ],
    ids=str,
)
def test_first_state(
    trained: pathlib.Path, tmp_path: pathlib.Path, optimizer_state: str, changes: dict[str, Any]
) -> None:
    changes = {"init__optimizer_state": optimizer_state, "ema__decay": 0.5, "seed": 3, **changes}
    actual = begin(trained, tmp_path, **changes)
    run = prepare(tiny.digits(**changes, init_from=str(trained)), tmp_path)
    assert jax.tree.map(lambda leaf: leaf.sharding, actual) == run.shardings
    there, random = state_of(trained), prepare(tiny.digits(**changes), None).first_state()
    tiny.assert_equal(actual.params, there.params)
    tiny.assert_equal(actual.ema, (there.params, {}))
    kept = optimizer_state == "keep"
    tiny.assert_equal(actual.opt_state, there.opt_state if kept else random.opt_state)
    assert int(actual.opt_state.count) == (12 if kept else 0)
    for name in ("step", "key", "skipped"):
        tiny.assert_equal(getattr(actual, name), getattr(random, name))
    with pytest.raises(AssertionError):
        tiny.assert_equal(random.params, there.params)


@pytest.mark.long
def test_kept_counts_continue_while_the_schedule_restarts(
    trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The run equals LAMB with the run's rates, started from the other run's moments and counts."""
    config = tiny.digits(
        duration="2 steps",
        schedule__warmup="1 steps",
        schedule__start_factor=0.5,
        init_from=str(trained),
        init__optimizer_state="keep",
        optimizer__learning_rate=0.1,
    )
    rates = [0.05, 0.1]
    train(config, tmp_path / "kept", quiet=True)
    records = read_records(tmp_path / "kept" / "metrics.jsonl", "train")
    np.testing.assert_allclose([r["learning_rate"] for r in records], rates, rtol=1e-6)
    actual, _ = tiny.restored(config, tmp_path / "kept")
    assert int(actual.opt_state.count) == 14 and int(actual.step) == 2

    run = prepare(config, tmp_path / "kept")
    there = state_of(trained)
    state = dataclasses.replace(run, start=None).first_state()
    state = dataclasses.replace(state, params=there.params, opt_state=there.opt_state)
    loader = data.TrainLoader(run.train_set, 64, config.seed, run.local_rows())
    for rate in rates:
        tx = optim.lamb(rate, weight_decay=0.01, rules=optim.parameters.RULES["no_bias_no_norm"])
        step = dataclasses.replace(run, tx=tx).make_train_step()
        state, _ = step(state, run.shard_batch(next(loader)))
    for name, value in tiny.arrays(state.params).items():
        np.testing.assert_allclose(tiny.arrays(actual.params)[name], value, rtol=1e-5, atol=1e-7)

    # A third run starts from this run, and continues the counts of both.
    again = begin(tmp_path / "kept", tmp_path / "again", init__optimizer_state="keep")
    assert int(again.opt_state.count) == 14
    assert (
        prepare(
            tiny.digits(init_from=str(tmp_path / "kept"), init__optimizer_state="keep"),
            tmp_path / "again",
        ).recipe.updates_before
        == 14
    )


@pytest.mark.long
def test_resumed_without_the_other_folder(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source, uninterrupted, cut = (tmp_path / name for name in ("source", "whole", "cut"))
    shutil.copytree(trained, source)
    config = tiny.digits(
        init_from=str(source), init__optimizer_state="keep", checkpoint__every="4 steps"
    )
    train(config, uninterrupted, quiet=True)
    record = json.loads((uninterrupted / "init.json").read_text())
    assert record == {
        "init_from": str(source),
        "update": 12,
        "optimizer_state": "keep",
        "updates_before": 12,
        "new": [],
        "left": [],
    }
    shutil.copytree(uninterrupted, cut)
    shutil.rmtree(source)
    for step in (8, 12):
        shutil.rmtree(cut / "checkpoints" / str(step))
    output = "update 12; optimizer state kept, its counts 12 ahead"
    config.init_from = str(uninterrupted)
    other = (
        f"{output}; config.init_from, now {uninterrupted}, changes nothing in a run that has begun "
    )
    assert other in tiny.unbroken(describe(prepare(config, cut)))
    config.init_from = None
    assert f"{output} path " in tiny.unbroken(describe(prepare(config, cut)))
    train(config, cut, quiet=True)
    tiny.assert_equal(tiny.restored(config, cut)[0], tiny.restored(config, uninterrupted)[0])
    rates = [
        [record["learning_rate"] for record in read_records(folder / "metrics.jsonl", "train")]
        for folder in (uninterrupted, cut)
    ]
    assert rates[0] == rates[1] and len(rates[0]) == 12

    # A run that has begun needs its own checkpoint.
    shutil.rmtree(cut / "checkpoints")
    with rejected(f"--workdir {cut}", problem=f"began from {source} and has no checkpoint yet"):
        prepare(config, cut)


def test_workdir_of_a_run_that_began_at_random(copy: pathlib.Path, trained: pathlib.Path) -> None:
    with rejected("config.init_from", str(trained), "began from random", "give another --workdir"):
        prepare(tiny.digits(init_from=str(trained)), copy)


def test_a_run_that_has_not_ended_needs_a_flag(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "12")
    config = tiny.digits(init_from=str(copy))
    key, problem = f"config.init_from: {copy}, update 8,", "has not ended (update 8 of 12)"
    with rejected(key, problem=problem, remedy="or set config.init.unfinished=True"):
        prepare(config, tmp_path / "new")
    config.init.unfinished = True
    run = prepare(config, tmp_path / "new")
    assert "; the source run has not ended (update 8 of 12)" in tiny.unbroken(describe(run))
    assert run.start.record["unfinished"] == "update 8 of 12"


def test_a_run_that_ended_at_its_target_has_ended(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(
        target__metric="accuracy", target__value=0.0, eval__every="4 steps", log__every="4 steps"
    )
    train(config, tmp_path / "there", quiet=True)
    weights = open_weights(str(tmp_path / "there"), "config.init_from")
    assert (weights.step, weights.unfinished) == (4, "")


@pytest.mark.long
def test_new_and_left_parameters_are_shown(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = tiny.digits(
        model__hidden_sizes=(16, 12),
        init_from=str(trained),
        init__new_parameters="^(hidden1|output)/",
    )
    assert "3 arrays taken; new, at random: hidden1/bias, hidden1/kernel, output/kernel; " in (
        tiny.unbroken(describe(prepare(config, tmp_path)))  # output/kernel has another shape
    )
    config.model.hidden_sizes = (16, 16)
    run = prepare(config, tmp_path)
    text = tiny.unbroken(describe(run))
    assert f"initial weights: {trained}, update 12; 4 arrays taken" in text
    assert "; new, at random: hidden1/bias, hidden1/kernel; optimizer state new" in text
    actual = begin(trained, tmp_path, config)
    random = prepare(tiny.digits(model__hidden_sizes=(16, 16)), None).first_state().params
    tiny.assert_equal(actual.params["hidden1"], random["hidden1"])
    tiny.assert_equal(actual.params["output"], state_of(trained).params["output"])

    assert run.start.record["new"] == ("params/hidden1/bias", "params/hidden1/kernel")
    tiny.save(tiny.digits(model__hidden_sizes=(16, 16)), tmp_path / "two")
    back = prepare(tiny.digits(init_from=str(tmp_path / "two")), tmp_path / "back")
    assert "4 arrays taken; not used: hidden1/bias, hidden1/kernel" in tiny.unbroken(describe(back))


ERRORS = [
    (
        {"model__hidden_sizes": (16, 16)},
        "config.init_from: .* has no hidden1/bias, hidden1/kernel; .*new_parameters, now '', m",
    ),
    (
        {"model__hidden_sizes": (16, 16), "init__new_parameters": "^hidden1/k"},
        r"has no hidden1/bias; .* now '\^hidden1/k', match",
    ),
    (
        {"model__hidden_sizes": (17,)},
        r"hidden0/bias of shape \(16,\), but this model needs \(17,\)",
    ),
    (
        {"model": {"name": "lenet"}},
        "config.init_from: .* has weights of the model 'mlp', but config.model.name is 'lenet'; use the",
    ),
    ({"init__new_parameters": "("}, r"config.init.new_parameters='\(' is not a valid"),
    ({"init__optimizer_state": "kept"}, r"optimizer_state='kept' is unknown; use reset or keep"),
    (
        {"init__optimizer_state": "keep", "optimizer": {"name": "adamw", "learning_rate": 0.1}},
        r"has the state of another optimizer .*: 0/count is missing, but in this run int32\[\]; .*'reset'",
    ),
    (
        {"init__optimizer_state": "keep", "optimizer__mu_dtype": "bfloat16"},
        r"mu/hidden0/bias is float32\[16\], but in this run bfloat16\[16\]; use the same optimizer, or",
    ),
    (
        {
            "init__optimizer_state": "keep",
            "model__hidden_sizes": (16, 16),
            "init__new_parameters": "hidden1",
        },
        r"mu/hidden1/bias is missing, but in this run float32\[16\]",
    ),
    ({"prng": "philox"}, "config.prng='philox' is unknown; use threefry2x32 or rbg"),
]


@pytest.mark.parametrize("changes, message", ERRORS, ids=[str(c) for c, _ in ERRORS])
def test_error_is_named(
    trained: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    config = tiny.digits()
    with config.unlocked():
        config.optimizer.mu_dtype = None  # so that the key can be set
    config = tiny.change(config, {k.replace("__", "."): v for k, v in changes.items()})
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    with pytest.raises(UserError, match=message) as error:
        prepare(tiny.change(config, {"init_from": str(trained)}), tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_batch_norm_statistics_are_taken(tmp_path: pathlib.Path) -> None:
    fields = {"model__batch_norm": True}
    tiny.save(tiny.digits(**fields), tmp_path / "first")
    state, _ = tiny.restored(tiny.digits(**fields), tmp_path / "first")
    actual = begin(tmp_path / "first", tmp_path / "second", **fields, ema__decay=0.5)
    tiny.assert_equal(actual.model_state, state.model_state)
    tiny.assert_equal(actual.ema, (state.params, state.model_state))
    with pytest.raises(AssertionError):
        tiny.assert_equal(
            prepare(tiny.digits(**fields), None).first_state().model_state, state.model_state
        )


@pytest.mark.long
def test_from_hugging_face(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    weights, folder = open_weights(str(pretrained), "--checkpoint"), tmp_path / "published"
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), weights.shapes["params"]
    )
    to_huggingface(weights.bert(), params, folder)
    actual = begin(folder, tmp_path / "run", tiny.bert())
    tiny.assert_equal(actual.params, params)
    tiny.assert_equal(actual.params, from_huggingface(folder)[1])

    scanned = begin(folder, tmp_path / "run", tiny.bert(model__scan_layers=True, ema__decay=0.5))
    tiny.assert_equal(scanned.params, stack_layers(params))
    tiny.assert_equal(scanned.ema[0], stack_layers(params))

    problem = f"needs an optimizer state, which {folder} does not have"
    with rejected("config.init.optimizer_state", "keep", problem, "use 'reset'"):
        begin(folder, tmp_path / "run", tiny.bert(), init__optimizer_state="keep")
    with pytest.raises(UserError, match="model.safetensors is not a complete safetensors file"):
        (folder / "model.safetensors").write_bytes(b"not it")
        begin(folder, tmp_path / "run", tiny.bert())


@pytest.mark.long
def test_layers_stacked_and_unrolled(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    params = tiny.restored(tiny.bert(), pretrained)[0].params
    stacked = tiny.bert(model__scan_layers=True, parallel__optimizer_state="zero1")
    run = prepare(tiny.change(stacked, {"init_from": str(pretrained)}), tmp_path / "stacked")
    actual = run.first_state()
    tiny.assert_equal(actual.params, stack_layers(params))
    assert jax.tree.map(lambda leaf: leaf.sharding, actual) == run.shardings
    with rejected(
        "*", problem="has its layers unrolled", remedy="set config.model.scan_layers=Fal"
    ):
        begin(pretrained, tmp_path / "x", stacked, init__optimizer_state="keep")

    tiny.save(tiny.bert(model__scan_layers=True), tmp_path / "run")
    params = open_weights(str(tmp_path / "run"), "--checkpoint").params()
    back = begin(tmp_path / "run", tmp_path / "back", tiny.bert()).params
    assert "layer_1" in back["encoder"]
    tiny.assert_equal(stack_layers(back), params)


BERT_ERRORS = [
    ({"model__num_heads": 4}, "network with num_heads=2, but this run has num_heads=4"),
    ({"model__gelu": "tanh"}, "network with gelu='erf', but this run has gelu='tanh'"),
    ({"model__num_layers": 1}, "network with num_layers=2, but this run has num_layers=1"),
    (
        {"model__vocab_size": 600, "data__options__vocab_size": 600},
        "embeddings/word of shape (512, 16), but this model needs (600, 16): its vocabulary has 512",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("changes, problem", BERT_ERRORS, ids=[str(c) for c, _ in BERT_ERRORS])
def test_another_bert(
    pretrained: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], problem: str
) -> None:
    config = tiny.bert()
    with config.unlocked():
        config.model.gelu = "erf"
    with rejected(f"config.init_from: {pretrained}", problem=problem):
        begin(pretrained, tmp_path, config, **changes)


def test_other_words_of_the_same_number(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(pretrained, tmp_path / "copy"))
    tokens = (folder / "vocab.txt").read_text().splitlines()
    tokens[-2:] = reversed(tokens[-2:])
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    problem = f": its token 510 is {tokens[510]!r} and not {tokens[511]!r}"
    with rejected(f"config.init_from: {folder}", problem=problem, remedy="the data with the vocab"):
        begin(folder, tmp_path / "run", tiny.bert())


def test_other_text_with_the_same_words(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(pretrained, tmp_path / "copy"))
    (folder / "text.json").write_text('{"cased": true}')
    key, remedy = f"config.init_from: {folder}", "prepare the text with cased=True"
    with rejected(key, problem="is for text with cased=True, but masked_lm", remedy=remedy):
        begin(folder, tmp_path / "run", tiny.bert())
    (folder / "text.json").unlink()  # like published weights
    begin(folder, tmp_path / "run", tiny.bert())


@pytest.mark.long
def test_two_processes_begin_from_one(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from tests import tiny\ndef get_config(argument=None):\n    return tiny.digits(\n"
        f"        init_from={str(trained)!r}, init__optimizer_state='keep', duration='2 steps')\n"
    )
    workdir = tmp_path / "two"
    done = launched(2, 2, f"--config={recipe}", f"--workdir={workdir}")
    assert "optimizer state kept, its counts 12 ahead" in tiny.unbroken(done.stdout)
    config = tiny.recipe_file(recipe).get_config()
    train(config, tmp_path / "one", quiet=True)
    states = []
    for folder in (workdir, tmp_path / "one"):
        with Checkpoints(folder / "checkpoints", 1, writes=False) as checkpoints:
            state, _ = checkpoints.restore(2, prepare(config, folder).abstract_state)
        states.append(tiny.arrays((state.params, state.opt_state)))
    for name, value in states[1].items():
        np.testing.assert_allclose(states[0][name], value, rtol=1e-4, atol=1e-7, err_msg=name)


def test_an_empty_vocabulary_is_that_of_the_weights(
    pretrained: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load(*arguments: Any, options: dict[str, Any], **others: Any) -> None:
        asked.append(options["vocab"])
        raise UserError("the data", problem="is loaded")

    monkeypatch.setattr(data, "load", load)
    resumed = tmp_path / "own"
    shutil.copytree(
        pretrained, resumed, ignore=shutil.ignore_patterns("config.json", "checkpoints")
    )
    for workdir, vocab in ((tmp_path / "new", ""), (resumed, ""), (resumed, "there")):
        with rejected("*the data", problem="is loaded"):
            prepare(
                tiny.digits(
                    data__name="squad",
                    data__options=ConfigDict({"vocab": vocab}),
                    init_from=str(pretrained),
                ),
                workdir,
            )
    assert asked == [str(pretrained), str(resumed), "there"]
