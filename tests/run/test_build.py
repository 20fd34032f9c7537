"""Errors in configs, workdirs and data: one sentence, before anything is compiled or written."""

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu.data import FieldSpec
from lamb_tpu.errors import UserError
from lamb_tpu.run import build as run_lib
from lamb_tpu.run.build import prepare
from lamb_tpu.run.describe import describe
from tests import tiny
from tests.raising import rejected
from tests.run.test_batches import ramp
from tests.shared import shared

ERRORS = [
    # key, value, pattern of the message after the key
    ("optimiser", 3, " is unknown; config has: .*optimizer"),
    ("eval.evry", "1 epochs", " is unknown; config.eval has: .*every"),
    ("batch_size", 60, "=60 .*8 devices.*use 56 or 64"),
    ("batch_size", 4, "=4 .*; use 8"),
    ("batch_size", 0, "=0 is out of range; use at least 1"),
    ("batch_size", -8, "=-8 is out of range; use at least 1"),
    ("batch_size", "abc", "='abc' has the wrong type; use a whole number"),
    ("batch_size", True, "=True has the wrong type; use a whole number"),
    ("eval.batch_size", 0, "=0 is out of range; use at least 1"),
    ("guards.desync_every", "10", ": '10' is not a duration"),
    ("guards.max_skipped", -1, "=-1 is out of range; .*at least 0"),
    ("guards.spike_factor", float("nan"), "=nan is out of range; .*at least 0"),
    ("eval", None, "=None is not a section; use a ConfigDict"),
    ("init_from", "", " is empty; give a path, or None"),
    ("data.dir", "", " is empty; give a path"),
    ("data.prepared_dir", "", " is empty; give a path"),
    ("seed", -1, "=-1 is out of range; use 0 to 4294967295"),
    ("seed", 2**32, "=4294967296 is out of range; use 0 to "),
    ("seed", 1.5, "=1.5 has the wrong type; use a whole number"),
    ("duration", "30 epochs 100 steps", ": '30 epochs 100 steps' is not a dura"),
    ("duration", "3 fortnights", ": .*unknown unit 'fortnights'.*epochs"),
    ("duration", "0 steps", "='0 steps' is less than one update"),
    ("duration", "50 percent", ": '50 percent' needs a finite number above 0"),
    ("schedule.warmup", "200 percent", ": 200 percent.*at most 100"),
    ("schedule.scaling", "legww", "='legww' is unknown; use .*legw"),
    (
        "schedule.decay",
        "cosin",
        "='cosin' is unknown; use constant, polynomial, cosine, exponential, step or "
        "'package.module:Name' for a custom decay; did you mean config.schedule.decay=cosine",
    ),
    ("schedule.decay_from", "end", "config.schedule.decay_from='end' must be 'warmup' or 'zero'"),
    ("schedule.power", "a", "='a' has the wrong type; use a number"),
    ("schedule.base_batch_size", 0, "=0 is out of range; .*at least 1"),
    ("eval.every", "10", ": '10' is not a duration"),
    ("eval.every", "0 epochs", "='0 epochs' is out of range; use a positive"),
    ("log.every", "0 steps", "='0 steps' is out of range; use a positive"),
    ("log.tensorboard", "yes", "='yes' has the wrong type; use True or False"),
    ("checkpoint.keep", 0, "=0 is out of range; use at least 1"),
    ("optimizer.learning_rate", -1.0, "=-1.0 is out of range; .*at least 0"),
    ("optimizer.learning_rate", "0.1", "='0.1' is out of range; .*a number"),
    ("optimizer.learning_rate", float("nan"), "=nan is out of range"),
    ("optimizer.name", "lambb", "='lambb' is unknown; use lamb, lars, novograd,"),
    ("optimizer.lr", 0.1, " is unknown; optimizer 'lamb' has: name, learning_rate, b1"),
    ("optimizer.b1", 2.0, "config.optimizer.b1=2.0 must be at least 0 and below 1"),
    ("optimizer.b1", "x", "='x' has the wrong type; use a number"),
    ("optimizer.axis_name", "data", " is unknown"),
    ("optimizer.stochastic_rounding", True, "config.optimizer.stochastic_rounding=.*no parameter"),
    ("optimizer.nu_dtype", "float16", "config.optimizer.nu_dtype='float16' must have the range"),
    ("optimizer.collect", "yes", "='yes' has the wrong type; use True or False"),
    ("optimizer.mu_dtype", "bflt", "config.optimizer.mu_dtype='bflt' must be a floating"),
    ("optimizer.mu_dtype", jax.numpy.bfloat16, "=.*'bfloat16'"),
    ("optimizer.rules", "none", "config.optimizer.rules='none' is unknown; use one of all"),
    ("optimizer.rules", [("foo$", {}), ("", {})], r"config.optimizer: .*'foo\$' matches no"),
    ("optimizer.rules", [("bias", {})], "config.optimizer: no rule matches .*hidden0/kernel"),
    ("optimizer", None, "=None is not a section; use a ConfigDict"),
    ("optimizer", {"name": "lamb"}, ".learning_rate is missing"),
    ("model.name", "mlpp", "='mlpp' is unknown; use bert, davidnet,"),
    ("model.hidden", (3,), r" is unknown; model 'mlp' has: .*\?$"),
    ("model.hidden_sizes", (0,), r"=\(0,\) has an invalid layer size; use whole"),
    ("model.hidden_sizes", "abc", "='abc' has the wrong type; use a tuple"),
    ("model.hidden_sizes", 5, "=5 has the wrong type; use a tuple"),
    ("model.num_classes", 3, "config.model: .*3 classes.* set config.model.num_classes=10"),
    ("model.num_classes", 0, "=0 is out of range; use at least 1"),
    ("model", {}, ".name is missing; set it"),
    ("model", {"name": "lenet5"}, r": the network LeNet-5 cannot process .* shape \(8, 8, 1\);"),
    (
        "model",
        {"name": "lenet", "dropout_rate": 2.0},
        ".dropout_rate=2.0 is out of range; use at least 0 and",
    ),
    ("task.name", "classify", "='classify' is unknown; use classification,"),
    ("task.smooth", 0.1, " is unknown; task .*has: name, label_smoothing"),
    ("task.label_smoothing", 1.0, "=1.0 is out of range; use at least 0 and"),
    ("task.label_smoothing", "x", "='x' has the wrong type; use a number"),
    ("task.input_std", 0.0, "=0.0 is out of range; use a number above 0"),
    ("data.name", "digitss", "='digitss' is unknown; use digits, mnist,"),
    ("data.name", None, "=None has the wrong type; use text"),
    ("data.dirr", "x", " is unknown; config.data has: .*dir"),
    ("data.train_split", "trainn", r"config.data: .*split 'trainn'.*train \(1,437 examples\)"),
    ("data.eval_split", "test[:0]", r"config.data: .*'test\[:0\]' .* holds no example"),
    ("mesh.data", 3, r"config.mesh=\{'data': 3, .* does not fit the 8 device\(s\); use"),
    ("mesh.data", "x", "='x' is out of range; use a whole number of at"),
    ("mesh.model", 3, "config.mesh=.*'model': 3.* does not fit the 8 device"),
    ("mesh.model", 2, "=2 splits nothing; use 1,"),
    ("mesh", {"model": 2}, r"=\{'model': 2\} has an unknown axis or lacks 'data'"),
    ("mesh.tensor", 2, "config.mesh=.* has an unknown axis or lacks 'data'; use data .*sequence"),
    ("accumulation_steps", 0, "=0 is out of range; use at least 1"),
    ("accumulation_steps", 3, "config.batch_size=64 .* 8 devices .*steps=3; use 48 or 72"),
    ("parallel.backend", "pmap", "='pmap' is unknown; use jit or shard_map"),
    ("parallel.optimizer_state", "zero3", "='zero3' is unknown; use replicated or zero1"),
    ("parallel.exchange.name", "float16", "='float16' is unknown; use float32,"),
    ("parallel.exchange.name", "bfloat16", "='bfloat16' has .*'jit'.*use config.*='shard_map'"),
    ("parallel.exchange.bits", 3, " is unknown; exchange 'float32' has: name$"),
    ("parallel.rules", "fsdp", "='fsdp' has the wrong type; use a tuple"),
    ("parallel.rules", (("out", "fsdp"), ("k",)), r"\[1\]=\('k',\) is not a pair"),
    ("parallel.rules", (("(", "fsdp"),), r"\[0\]='\(' is not a valid reg"),
    ("parallel.rules", (("kernel", "zero"),), r"\[0\]='zero' is not a way to split"),
    (
        "parallel.rules",
        (("kernel", ("x",)),),
        r"\[0\]=\['x'\] has the unknown mesh axis 'x'; use data",
    ),
    ("parallel.rules", (("conv", "fsdp"),), r"\[0\]='conv' matches nothing"),
    ("parallel.rules", (("output/bias", "fsdp"),), r"\[0\]='fsdp' cannot split 'output/bias' of"),
    ("parallel.exchange", {}, ".name is missing; use float32"),
    ("loop.updates_per_call", 0, "=0 is out of range"),
    ("loop.held_share", 1.5, "=1.5 is out of range"),
    ("ema.decay", 1.0, "=1.0 is out of range; use at least 0 and below 1$"),
    ("schedule.staircase", 1, "=1 has the wrong type; use True or False"),
    ("schedule.boundaries", 3, "=3 has the wrong type; use text"),
    ("schedule.first_step", 0.5, "=0.5 has the wrong type; use a whole"),
    ("schedule.start_factor", -1, "=-1.0 is out of range; use 0 to 1"),
    ("schedule.min_factor", 2.0, "=2.0 is out of range; use 0 to 1"),
    ("schedule.end_factor", 1.5, "=1.5 is out of range; use 0 to 1"),
]


@pytest.mark.parametrize(
    "key, value, message", ERRORS, ids=[f"{key}={str(v)[:20]!r}" for key, v, _ in ERRORS]
)
def test_error_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    """The error begins with the row's key, unless the row's message begins with another key."""
    config = tiny.change(tiny.digits(), {key: value})
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    start = "" if message.startswith("config.") else f"config.{key}"
    with pytest.raises(UserError, match=f"^{start}{message}") as error:
        prepare(config, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_devices_may_be_given_and_no_folder() -> None:
    config = tiny.digits(batch_size=48, eval__batch_size=100, parallel__optimizer_state="zero1")
    run = prepare(config, None, jax.devices()[:3])
    assert run.mesh.size == 3 and run.folder is None
    assert run.eval_batch_size == 102 and "batches of 102" in describe(run)
    # ZeRO-1 shards nothing, because 3 divides no dimension of the 64 x 16 and 16 x 10 matrices.
    assert "optimizer state: 9.457 KiB, 9.457 KiB a device" in describe(run)
    batch = run.abstract_batch()
    assert batch["image"].shape == (48, 8, 8, 1) and batch["image"].sharding.mesh == run.mesh


def test_evaluation_needs_no_training_batch() -> None:
    with pytest.raises(
        UserError, match=r"config\.batch_size=64 is not divisible by the 3 devices of"
    ):
        prepare(tiny.digits(), None, jax.devices()[:3])
    run = prepare(tiny.digits(), None, jax.devices()[:3], training=False)
    assert run.eval_batch_size == 129
    # Evaluation batches are no larger than the set, rounded up to a multiple of the 7 devices.
    run = prepare(tiny.digits(eval__batch_size=1024), None, jax.devices()[:7], training=False)
    assert len(run.eval_set) == 360 and run.eval_batch_size == 364
    assert "config.eval.batch_size" not in describe(run)


def test_settings_need_no_data() -> None:
    nowhere = {"data__name": "mnist", "data__dir": "/nowhere"}
    made = run_lib.settings(tiny.digits(**nowhere))
    assert made.mesh.size == 8 and made.task.input_std == 16.0
    with pytest.raises(UserError, match="b2"):
        run_lib.settings(tiny.digits(**nowhere, optimizer__b2=1.5))


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation_steps": 4},
        {"parallel__optimizer_state": "zero1"},
        # Under shard_map the BatchNorm of this model names the mesh axes.
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
    # 8 devices with 1e6 FLOP/s each; an update has 454,656 FLOPs.
    assert run.amounts() == pytest.approx({"examples_per_second": 64, "mfu": 454_656 / 8e6})
    assert "a cpu device does at most 1e+06 a second" in tiny.unbroken(describe(run))
    spec = {"input_ids": FieldSpec((128,), np.dtype(np.int32))}
    text = dataclasses.replace(run, train_set=SimpleNamespace(element_spec=spec))
    text.__dict__["model_flops"] = None  # unknown FLOPs
    assert text.amounts() == {"examples_per_second": 64, "tokens_per_second": 64 * 128}


@pytest.mark.parametrize(
    "path, reason",
    [("file/run", "Not a directory"), ("file", "File exists"), ("/proc/run", "No such file")],
)
def test_unwritable_workdir(tmp_path: pathlib.Path, path: str, reason: str) -> None:
    (tmp_path / "file").write_text("kept")
    with rejected(f"--workdir {tmp_path / path}", problem=f"cannot be written ({reason}"):
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
    with rejected("the parameter table", problem=f"differs from {table}"):
        prepare(tiny.digits(), copy)
    assert tiny.fingerprint(copy) == before


def test_table_of_an_older_version(copy: pathlib.Path) -> None:
    run = prepare(tiny.digits(), copy)
    (copy / "parameters.txt").write_text(run.table)  # lacks the columns update, state and bytes
    prepare(tiny.digits(), copy)
    changed = run.table.replace("no ", "yes", 1)
    (copy / "parameters.txt").write_text(changed)
    with rejected(
        "the parameter table", problem="'hidden0/bias' has decay yes in the file and no in this run"
    ):
        prepare(tiny.digits(), copy)


def test_original_files_missing_or_damaged(tmp_path: pathlib.Path) -> None:
    originals = shared("data", "mnist")
    config = tiny.recipe_file(tiny.ROOT / "configs" / "mnist_lenet.py").get_config()
    folder = tmp_path / "originals"
    folder.mkdir()
    config.data.dir, config.data.prepared_dir = str(folder), str(tmp_path / "prepared")
    with pytest.raises(UserError, match=f"{folder}/.*-ubyte.gz is missing, .*; get it from http"):
        prepare(config, tmp_path / "run")
    for path in originals.glob("*.gz"):
        (folder / path.name).write_bytes(path.read_bytes())
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-9] + b"damaged!!")
    with pytest.raises(UserError, match=f"{labels} has sha256 [0-9a-f]+ .*, not [0-9a-f]+"):
        prepare(config, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir()) and not (tmp_path / "prepared").exists()


def test_the_rate_of_a_changing_batch_is_an_argument_of_the_optimizer() -> None:
    constant = prepare(tiny.digits(), None)
    assert constant.optimizer_at(jnp.float32(0.5)) is constant.tx
    run = prepare(ramp(optimizer={"name": "sgd", "learning_rate": 0.1}), None)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), run.abstract_state.params)

    def moved(tx: optax.GradientTransformation) -> float:
        updates, _ = tx.update(params, tx.init(params), params)
        return float(jax.tree.leaves(updates)[0].ravel()[0])

    assert moved(run.optimizer_at(jnp.float32(0.5))) == -0.5
    assert moved(run.optimizer_at(jnp.float32(0.25))) == -0.25
    assert np.isnan(moved(run.tx))  # a forgotten rate is visible
