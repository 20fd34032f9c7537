"""Mistakes a user can make: each is one sentence, told before anything compiles or changes."""

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.data import FieldSpec
from lamb_tpu.errors import UserError
from lamb_tpu.run import build as run_lib
from lamb_tpu.run.build import prepare
from lamb_tpu.run.describe import describe
from tests import tiny
from tests.shared import shared

MISTAKES = [
    # key with '.', value, what the sentence must say
    ("optimiser", 3, r"config\.optimiser is unknown; config has: .*optimizer"),
    ("eval.evry", "1 epochs", r"config\.eval\.evry is unknown; config\.eval has: .*every"),
    ("batch_size", 60, r"config\.batch_size is 60, .*8 devices.*56 or 64 would"),
    ("batch_size", 4, r"config\.batch_size is 4, .*; 8 would"),
    ("batch_size", 0, r"config\.batch_size is 0; it must be at least 1"),
    ("batch_size", -8, r"config\.batch_size is -8; it must be at least 1"),
    ("batch_size", "abc", r"config\.batch_size is 'abc'; it must be a whole number"),
    ("batch_size", True, r"config\.batch_size is True; it must be a whole number"),
    ("eval.batch_size", 0, r"config\.eval\.batch_size is 0; it must be at least 1"),
    ("guards.desync_every", "10", r"config\.guards\.desync_every: '10' is not a duration"),
    ("guards.max_skipped", -1, r"config\.guards\.max_skipped is -1; .*at least 0"),
    ("guards.spike_factor", float("nan"), r"config\.guards\.spike_factor is nan; .*at least 0"),
    ("eval", None, r"config\.eval is None; it must be a ConfigDict"),
    ("init_from", "", r"config\.init_from is empty; give a path, or leave it out for none"),
    ("data.dir", "", r"config\.data\.dir is empty; give a path"),
    ("data.prepared_dir", "", r"config\.data\.prepared_dir is empty; give a path"),
    ("seed", -1, r"config\.seed is -1; it must lie in 0\.\.4294967295"),
    ("seed", 2**32, r"config\.seed is 4294967296; it must lie in"),
    ("seed", 1.5, r"config\.seed is 1\.5; it must be a whole number"),
    ("duration", "30 epochs 100 steps", r"config\.duration: '30 epochs 100 steps' is not a dura"),
    ("duration", "3 fortnights", r"config\.duration: .*unknown unit 'fortnights'.*epochs"),
    ("duration", "0 steps", r"config\.duration is '0 steps'"),
    ("duration", "50 percent", r"config\.duration: '50 percent'"),
    ("schedule.warmup", "200 percent", r"config\.schedule\.warmup: 200 percent.*at most 100"),
    ("schedule.scaling", "legww", r"config\.schedule\.scaling is 'legww'; known: .*legw"),
    ("schedule.decay", "poly", r"config\.schedule\.decay is 'poly'; known: .*polynomial"),
    ("schedule.decay_from", "end", r"decay_from must be 'warmup' or 'zero', not 'end'"),
    ("schedule.power", "a", r"config\.schedule\.power is 'a'; it must be a number"),
    ("schedule.base_batch_size", 0, r"config\.schedule\.base_batch_size is 0; .*at least 1"),
    ("eval.every", "10", r"config\.eval\.every: '10' is not a duration"),
    ("eval.every", "0 epochs", r"config\.eval\.every .*must be positive"),
    ("log.every", "0 steps", r"config\.log\.every .*must be positive"),
    ("log.tensorboard", "yes", r"config\.log\.tensorboard is 'yes'; it must be True or False"),
    ("checkpoint.keep", 0, r"config\.checkpoint\.keep is 0; it must be at least 1"),
    ("optimizer.learning_rate", -1.0, r"config\.optimizer\.learning_rate is -1\.0; .*at least 0"),
    ("optimizer.learning_rate", "0.1", r"config\.optimizer\.learning_rate is '0\.1'; .*a number"),
    ("optimizer.learning_rate", float("nan"), r"config\.optimizer\.learning_rate is nan"),
    ("optimizer.name", "lambb", r"config\.optimizer: .*'lambb' is unknown; known: lamb, "),
    ("optimizer.lr", 0.1, r"config\.optimizer: lamb has no argument 'lr'; known: b1, b2"),
    ("optimizer.b1", 2.0, r"config\.optimizer: b1 must be at least 0 and below 1, not 2\.0"),
    ("optimizer.b1", "x", r"config\.optimizer: b1 must be at least 0 and below 1, not 'x'"),
    ("optimizer.axis_name", "data", r"config\.optimizer: axis_name has no meaning in a config"),
    ("optimizer.stochastic_rounding", True, r"config\.optimizer: .*no parameter is bfloat16"),
    ("optimizer.nu_dtype", "float16", r"config\.optimizer: nu_dtype must have the range"),
    ("optimizer.collect", "yes", r"config\.optimizer: collect must be True or False, not 'yes'"),
    ("optimizer.mu_dtype", "bflt", r"config\.optimizer: mu_dtype must be a floating.*'bflt'"),
    ("optimizer.mu_dtype", jax.numpy.bfloat16, r"config\.optimizer\.mu_dtype .*'bfloat16'"),
    ("optimizer.rules", "none", r"config\.optimizer: rules 'none' are unknown; the named rules"),
    ("optimizer.rules", [("foo$", {}), ("", {})], r"config\.optimizer: .*'foo\$' matches no"),
    ("optimizer.rules", [("bias", {})], r"config\.optimizer: no rule matches .*hidden0/kernel"),
    ("optimizer", None, r"config\.optimizer is None; it must be a ConfigDict"),
    ("optimizer", ConfigDict({"name": "lamb"}), r"config\.optimizer\.learning_rate is missing"),
    ("model.name", "mlpp", r"config\.model\.name is 'mlpp'; known models: .*mlp"),
    ("model.hidden", (3,), r"config\.model\.hidden is not a field of model 'mlp'; known"),
    ("model.hidden_sizes", (0,), r"config\.model: hidden_sizes .*at least 1, not \(0,\)"),
    ("model.hidden_sizes", "abc", r"config\.model: hidden_sizes .* not 'abc'"),
    ("model.hidden_sizes", 5, r"config\.model: .*'int'"),
    ("model.num_classes", 3, r"config\.model: .*3 classes.* set config\.model\.num_classes=10"),
    ("model.num_classes", 0, r"config\.model\.num_classes is 0; it must be"),
    ("model", ConfigDict(), r"config\.model has no name; give config\.model\.name"),
    ("model", ConfigDict({"name": "lenet5"}), r"config\.model: LeNet-5 needs .*12x12.*\(8, 8,"),
    ("model", ConfigDict({"name": "lenet", "dropout_rate": 2.0}), r"in \[0, 1\), not 2\.0"),
    ("task.name", "classify", r"config\.task\.name is 'classify'; known tasks: classification"),
    ("task.smooth", 0.1, r"config\.task\.smooth is not a field .*known: label_smoothing"),
    ("task.label_smoothing", 1.0, r"config\.task\.label_smoothing is 1\.0; it must be in \[0, 1\)"),
    ("task.label_smoothing", "x", r"config\.task\.label_smoothing is 'x'; it must be a number"),
    ("task.input_std", 0.0, r"config\.task\.input_std is 0\.0; it must be positive"),
    ("data.name", "digitss", r"config\.data\.name is 'digitss', .*known are .*digits"),
    ("data.name", None, r"config\.data\.name is None; it must be text"),
    ("data.dirr", "x", r"config\.data\.dirr is unknown; config\.data has: .*dir"),
    ("data.train_split", "trainn", r"config\.data: .*split 'trainn'.*train \(1,437\)"),
    ("data.eval_split", "test[:0]", r"config\.data: .*'test\[:0\]' holds no example"),
    ("mesh.data", 3, r"config\.mesh is data=3, .* there are 8 device\(s\); the sizes must"),
    ("mesh.data", "x", r"config\.mesh\.data is 'x'; it must be a whole number"),
    ("mesh.model", 3, r"config\.mesh is data=-1, .*model=3, .* and there are 8 device"),
    ("mesh.model", 2, r"config\.mesh\.model is 2, but nothing is split over that axis"),
    ("mesh", ConfigDict({"model": 2}), r"config\.mesh has the axes model; it must have data"),
    ("mesh.tensor", 2, r"config\.mesh has the axes .*tensor; it .* may have fsdp, model, seq"),
    ("accumulation_steps", 0, r"config\.accumulation_steps is 0; it must be at least 1"),
    ("accumulation_steps", 3, r"batch_size is 64, .* 8 devices .*steps=3 .*; 48 or 72 would"),
    ("parallel.backend", "pmap", r"config\.parallel\.backend is 'pmap'; known: jit, shard_map"),
    ("parallel.optimizer_state", "zero3", r"optimizer_state is 'zero3'; known: replicated, zero1"),
    ("parallel.exchange.name", "float16", r"exchange\.name is 'float16'; known: float32, bfl"),
    ("parallel.exchange.name", "bfloat16", r"'bfloat16'; under .*backend='jit' .*'shard_map'"),
    ("parallel.exchange.bits", 3, r"parallel\.exchange\.bits is not a field of exchange 'float32'"),
    ("parallel.rules", "fsdp", r"config\.parallel\.rules is 'fsdp'; it must be a tuple"),
    ("parallel.rules", (("out", "fsdp"), ("k",)), r"parallel\.rules\[1\] is \('k',\); .*a pair"),
    ("parallel.rules", (("(", "fsdp"),), r"parallel\.rules\[0\] is not a valid regular expression"),
    ("parallel.rules", (("kernel", "zero"),), r"rules\[0\] splits by 'zero'; it must be one of"),
    ("parallel.rules", (("kernel", ("x",)),), r"rules\[0\] names the mesh axis 'x'; known: data"),
    ("parallel.rules", (("conv", "fsdp"),), r"rules\[0\] with the regex 'conv' matches nothing"),
    ("parallel.rules", (("output/bias", "fsdp"),), r"rules\[0\] splits 'output/bias' of shape"),
    ("ema.decay", 1.0, r"config\.ema\.decay is 1\.0; it must be in \[0, 1\)"),
    ("schedule.staircase", 1, r"config\.schedule\.staircase is 1; it must be True or False"),
    ("schedule.boundaries", 3, r"config\.schedule\.boundaries is 3; it must be text"),
    ("schedule.first_step", 0.5, r"config\.schedule\.first_step is 0\.5; .*a whole number"),
    ("schedule.start_factor", -1, r"config\.schedule\.start_factor is -1\.0; .*lie in 0\.\.1"),
    ("schedule.min_factor", 2.0, r"config\.schedule\.min_factor is 2\.0; .*lie in 0\.\.1"),
    ("schedule.end_factor", 1.5, r"config\.schedule\.end_factor is 1\.5; it must lie in 0\.\.1"),
]


@pytest.mark.parametrize(
    "key, value, message", MISTAKES, ids=[f"{key}={str(v)[:20]!r}" for key, v, _ in MISTAKES]
)
def test_mistake_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    config = tiny.change(tiny.digits(), {key: value})
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # nothing gets as far
    with pytest.raises(UserError, match=message) as error:
        prepare(config, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_shard_map_splits_the_batch_alone(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(mesh__model=2, parallel__backend="shard_map")
    with pytest.raises(UserError, match="backend is 'shard_map', .* config.mesh.model .* 'jit'"):
        prepare(config, tmp_path)


def test_devices_may_be_given_and_no_folder() -> None:
    config = tiny.digits(batch_size=48, eval__batch_size=100, parallel__optimizer_state="zero1")
    run = prepare(config, None, jax.devices()[:3])
    assert run.mesh.size == 3 and run.folder is None
    assert run.eval_batch_size == 102 and "batches of 102" in describe(run)
    # 64 x 16 and 16 x 10, of which 3 divides nothing
    assert "optimizer state: 9.457 KiB, 9.457 KiB a device" in describe(run)
    batch = run.abstract_batch()
    assert batch["image"].shape == (48, 8, 8, 1) and batch["image"].sharding.mesh == run.mesh


def test_evaluation_needs_no_training_batch() -> None:
    with pytest.raises(UserError, match="batch_size is 64, .* over the 3 devices"):
        prepare(tiny.digits(), None, jax.devices()[:3])
    run = prepare(tiny.digits(), None, jax.devices()[:3], training=False)
    assert run.eval_batch_size == 129


def test_settings_need_no_data() -> None:
    nowhere = {"data__name": "mnist", "data__dir": "/nowhere"}
    made = run_lib.settings(tiny.digits(**nowhere))
    assert made.mesh.size == 8 and made.task.input_std == 16.0
    with pytest.raises(UserError, match="b2"):
        run_lib.settings(tiny.digits(**nowhere, optimizer__b2=1.5))


def test_constant_decay_has_no_end(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(schedule__decay="constant", schedule__end_factor=0.5)
    with pytest.raises(UserError, match=r"config\.schedule\.end_factor is 0\.5, .*'constant'"):
        prepare(config, tmp_path)


def test_preparing_compiles_nothing(tmp_path: pathlib.Path) -> None:
    compiled = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = prepare(tiny.digits(model__hidden_sizes=(17,)), tmp_path)
        assert not compiled
        jax.jit(run.init)(jax.random.key(0))
        assert compiled
    finally:
        jax.monitoring.clear_event_listeners()
    assert run.abstract_state.params["hidden0"]["kernel"].shape == (64, 17)
    assert run.mesh.shape == {"data": 8} and run.recipe.total_steps == 12


def test_evaluation_batches_are_no_larger_than_the_set() -> None:
    run = prepare(tiny.digits(eval__batch_size=1024), None, jax.devices()[:7], training=False)
    assert len(run.eval_set) == 360 and run.eval_batch_size == 364
    assert "config.eval.batch_size" not in describe(run)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation_steps": 4},
        {"parallel__optimizer_state": "zero1"},
        # Whose BatchNorm names the axes of the mesh.
        {"parallel__backend": "shard_map", "model__batch_norm": True, "model__group_size": 16},
    ],
    ids=str,
)
def test_model_flops_are_of_the_model_and_the_batch(changes: dict[str, Any]) -> None:
    run = prepare(tiny.digits(**changes), None)
    assert run.model_flops == 3 * 2 * 64 * (64 * 16 + 16 * 10)
    assert "arithmetic: 4.547e+05 model FLOPs an update; a cpu device has no known peak" in (
        tiny.unbroken(describe(run))
    )
    assert run.peak_flops is None and run.amounts() == {"examples_per_second": 64}


def test_what_an_update_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(tiny.digits(), None)
    monkeypatch.setattr(run_lib.topology, "peak_flops", {"cpu": 1e6}.get)
    # 8 devices could do the products of an update 8e6 / 454,656 times a second.
    assert run.amounts() == pytest.approx({"examples_per_second": 64, "mfu": 454_656 / 8e6})
    assert "a cpu device does at most 1e+06 a second" in tiny.unbroken(describe(run))
    spec = {"input_ids": FieldSpec((128,), np.dtype(np.int32))}
    text = dataclasses.replace(run, train_set=SimpleNamespace(element_spec=spec))
    text.__dict__["model_flops"] = None  # as of a loop of unknown length
    assert text.amounts() == {"examples_per_second": 64, "tokens_per_second": 64 * 128}


@pytest.mark.parametrize(
    "path, reason",
    [("file/run", "Not a directory"), ("file", "File exists"), ("/proc/run", "No such file")],
)
def test_unwritable_workdir(tmp_path: pathlib.Path, path: str, reason: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=f"--workdir .*{path} cannot be written .{reason}"):
        prepare(tiny.digits(), tmp_path / path)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.long
def test_workdir_of_another_config(copy: pathlib.Path) -> None:
    before = tiny.fingerprint(copy)
    config = tiny.digits(optimizer__learning_rate=0.5, seed=7)
    with pytest.raises(UserError) as error:
        prepare(config, copy)
    text = str(error.value)
    assert f"--workdir {copy} holds a run of another config" in text
    assert "optimizer.learning_rate: 0.02 there, 0.5 now" in text and "seed: 0 there, 7 now" in text
    assert "batch_size" not in text
    assert tiny.fingerprint(copy) == before


def test_table_of_other_parameters(copy: pathlib.Path) -> None:
    table = copy / "parameters.txt"
    table.write_bytes(table.read_bytes() + b"\xff")
    before = tiny.fingerprint(copy)
    with pytest.raises(UserError, match="the parameter table differs from .*parameters.txt"):
        prepare(tiny.digits(), copy)
    assert tiny.fingerprint(copy) == before


def test_table_of_an_older_version(copy: pathlib.Path) -> None:
    run = prepare(tiny.digits(), copy)
    (copy / "parameters.txt").write_text(run.table)  # without update, state and bytes
    prepare(tiny.digits(), copy)
    changed = run.table.replace("no ", "yes", 1)
    (copy / "parameters.txt").write_text(changed)
    with pytest.raises(UserError, match="'hidden0/bias' has decay yes there and no here"):
        prepare(tiny.digits(), copy)


def test_original_files_missing_or_damaged(tmp_path: pathlib.Path) -> None:
    originals = shared("data", "mnist")
    config = tiny.recipe_file(tiny.ROOT / "configs" / "mnist_lenet.py").get_config()
    folder = tmp_path / "originals"
    folder.mkdir()
    config.data.dir, config.data.prepared_dir = str(folder), str(tmp_path / "prepared")
    with pytest.raises(UserError, match=f"-ubyte.gz is missing in {folder}; get it from http"):
        prepare(config, tmp_path / "run")
    for path in originals.glob("*.gz"):
        (folder / path.name).write_bytes(path.read_bytes())
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-9] + b"damaged!!")
    with pytest.raises(UserError, match=f"{labels} is not the original file: .*sha256 [0-9a-f]+"):
        prepare(config, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir()) and not (tmp_path / "prepared").exists()
