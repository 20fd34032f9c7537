"""One command trains and resumes the phases of a config, each from the weights of the previous phase."""

import functools
import json
import pathlib
import shutil
import types
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu.config import flatten
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.plan import __main__ as plan
from lamb_tpu.run import phases
from lamb_tpu.run.weights import open_weights
from lamb_tpu.spec import Spec
from lamb_tpu.store import checksums
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected
from tests.test_train import Interrupted, interrupt_at

SECOND = {
    "duration": "8 steps",
    "batch_size": 32,
    "seed": 1,
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup": "2 steps"},
    "init": {"optimizer_state": "keep"},
}


def two(first: Any = None, second: Any = None, **changes: Any) -> ConfigDict:
    """Returns a config of two phases: 6 updates, then 8 updates with half the batch and another rate.

    The second phase continues the moments of the first phase.
    """
    values = {"checkpoint__every": "2 steps", "eval__every": "3 steps", "ema__decay": 0.5}
    config = tiny.digits(**values | changes)
    config.phases = ConfigDict(
        {
            "phase_1": {"duration": "6 steps"} if first is None else first,
            "phase_2": SECOND if second is None else second,
        }
    )
    return config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("whole")
    train(two(), workdir, quiet=True)
    return workdir


def states(workdir: pathlib.Path) -> list[Any]:
    return [tiny.restored(phase.config, phase.folder) for phase in phases.split(two(), workdir)]


def records(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [
        tiny.untimed(record)
        for name in ("phase_1", "phase_2")
        for record in read_records(workdir / name / "metrics.jsonl")
    ]


def assert_same(workdir: pathlib.Path, uninterrupted: pathlib.Path) -> None:
    for (actual, where), (expected, position) in zip(
        states(workdir), states(uninterrupted), strict=True
    ):
        tiny.assert_equal(actual, expected)
        assert where["loader"] == position["loader"] and where["best"] == position["best"]
    assert records(workdir) == records(uninterrupted)


@pytest.mark.long
def test_phases_are_separate_runs(uninterrupted: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = {"checkpoint__every": "2 steps", "eval__every": "3 steps", "ema__decay": 0.5}
    train(tiny.digits(duration="6 steps", **common), first, quiet=True)
    config = tiny.digits(
        duration="8 steps",
        batch_size=32,
        seed=1,
        optimizer__learning_rate=0.01,
        schedule__warmup="2 steps",
        init__optimizer_state="keep",
        init_from=str(first),
        **common,
    )
    train(config, second, quiet=True)
    for name, folder in (("phase_1", first), ("phase_2", second)):
        files = {path.name for path in (uninterrupted / name).iterdir()}
        assert files == {path.name for path in folder.iterdir()}
        actual, expected = (
            json.loads((path / "config.json").read_text())
            for path in (uninterrupted / name, folder)
        )
        actual.pop("init_from"), expected.pop("init_from")
        assert actual == expected
    state, _ = tiny.restored(config, second)
    assert int(state.step) == 8 and int(state.opt_state.count) == 14
    tiny.assert_equal(states(uninterrupted)[1][0], state)
    assert Workdir(uninterrupted).read_config() == flatten(two())
    assert open_weights(str(uninterrupted), "--checkpoint").folder == uninterrupted / "phase_2"


def test_complete_phases_are_skipped(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(uninterrupted, workdir)
    # The first phase's checkpoints are not needed any more.
    shutil.rmtree(workdir / "phase_1" / "checkpoints" / "6")
    before = tiny.fingerprint(workdir)
    metrics = train(two(log__every="2 steps"), workdir)
    assert capsys.readouterr().out.startswith(
        "phase_1: complete, skipped\nphase_2 (phases: phase_1, phase_2)\n"
    )
    last = read_records(uninterrupted / "phase_2" / "metrics.jsonl", "eval")[-1]
    assert metrics == {name: last[name] for name in metrics} and "ema_accuracy" in metrics
    after = tiny.fingerprint(workdir)
    assert before.pop("config.json") != after.pop(
        "config.json"
    )  # the config, which is written at each start
    assert after == before


@pytest.mark.long
def test_interrupted_repeatedly(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase 1 polls before each of 6 updates, and 3 times in each of 2 evaluations."""
    crash_at = functools.partial(interrupt_at, kind="train")
    for end, number, message, there in [
        (tiny.preempt_at, 4, "^preempted at update 3, saved; start", ("phase_1", {"2", "3"})),
        (crash_at, 5, None, ("phase_1", {"2", "3", "4"})),
        (
            tiny.preempt_at,
            4,
            "^preempted at update 6, saved; start",
            ("phase_1", {"2", "3", "4", "6"}),
        ),
        (tiny.preempt_at, 3 + 4, "^preempted at update 3, saved", ("phase_2", {"2", "3"})),
        (crash_at, 6, None, ("phase_2", {"2", "3", "4"})),
        (tiny.preempt_at, 1, "^preempted at update 4, saved", ("phase_2", {"2", "3", "4"})),
    ]:
        with monkeypatch.context() as patch:
            end(patch, number)
            with pytest.raises((Preempted, Interrupted), match=message):
                train(two(), tmp_path, quiet=True)
        name, saved = there
        assert {path.name for path in (tmp_path / name / "checkpoints").iterdir()} == saved, there
    train(two(), tmp_path, quiet=True)
    assert_same(tmp_path, uninterrupted)


def test_last_checkpoint_of_the_previous_phase_is_damaged(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(uninterrupted, workdir)
    shutil.rmtree(workdir / "phase_2")
    (workdir / "phase_1" / "checkpoints" / "6" / checksums.NAME).unlink()
    train(two(), workdir, quiet=True)
    assert_same(workdir, uninterrupted)


@pytest.mark.long
def test_first_phase_starts_as_the_config_says(
    trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = two(second={"duration": "1 steps"}, first={"duration": "1 steps"})
    config.init_from, config.init.optimizer_state = str(trained), "keep"
    train(config, tmp_path, quiet=True)
    before = [
        json.loads((tmp_path / name / "init.json").read_text()) for name in ("phase_1", "phase_2")
    ]
    assert [(r["init_from"], r["update"], r["updates_before"]) for r in before] == [
        (str(trained), 12, 12),
        (str(tmp_path / "phase_1"), 1, 13),
    ]


def test_error_in_the_initial_weights_leaves_no_files(
    trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for weights, message in (
        (tmp_path, f"config.init_from {tmp_path} holds no run"),
        (
            trained,
            "config.init_from: .* has hidden0/bias of shape .16,., but this model needs .8,.",
        ),
    ):
        config = two(model__hidden_sizes=(8,), init_from=str(weights))
        with pytest.raises(UserError, match=r"^config\.phases\.phase_1: " + message):
            train(config, tmp_path / "run", quiet=True)
        assert not list((tmp_path / "run").rglob("*.json"))


# The changes of phase_2, and the message after config.phases.phase_2.
ERRORS = [
    ({"optimiser": {"b1": 0.8}}, r"\.optimiser is unknown; config has: .*opt"),
    ({"eval": {"evry": "1"}}, r"\.eval\.evry is unknown; config\.eval has: .*"),
    ({"batch_size": "many"}, r"\.batch_size='many' has the wrong type; use a whole num"),
    ({"batch_size": 0}, r"\.batch_size=0 is out of range; use at least 1"),
    ({"batch_size": 60}, r"\.batch_size=60 .*8 devices.*use 56 or 64"),
    ({"schedule": "cosine"}, r"\.schedule='cosine' is not a section; use a ConfigDict"),
    ({"schedule": {"decay": "poly"}}, r"\.schedule\.decay='poly' is unknown; use"),
    ({"optimizer": {"bb": 1}}, r"\.optimizer\.bb is unknown; optimizer 'lamb' has: name, "),
    ({"model": {"hidden_sizes": (8,)}}, r": config\.init_from: the previous phase has"),
    (
        {"optimizer": {"name": "adamw"}, "init": {"optimizer_state": "keep"}},
        r": config\.init_from: the previous phase has the state of another",
    ),
    (
        {"init_from": "x"},
        r"\.init_from cannot be set in a phase: each .* set config.init_from inst",
    ),
    ({"phases": {}}, r"\.phases cannot be set"),
    ({}, r"={} is not a ConfigDict with keys; use a ConfigDict of the keys that differ"),
    (3, r"=3 is not a ConfigDict with keys"),
]


@pytest.mark.parametrize("second, message", ERRORS, ids=[str(second) for second, _ in ERRORS])
def test_error_is_reported_before_the_first_phase_starts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, second: Any, message: str
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    with pytest.raises(UserError, match=r"^config\.phases\.phase_2" + message) as error:
        train(two(second=second), tmp_path, quiet=True)
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.mark.parametrize("name", ["checkpoints", "a.b", "a b", "-a", "logs"])
def test_names(tmp_path: pathlib.Path, name: str) -> None:
    config = tiny.digits()
    config.phases = ConfigDict({name: {"seed": 1}}, allow_dotted_keys=True)
    with rejected(f"config.phases.{name}", problem=f"'{name}' cannot be the name of a folder"):
        phases.split(config, tmp_path)


def test_fields_left_at_their_defaults_may_be_set(tmp_path: pathlib.Path) -> None:
    changes = {"optimizer": {"b2": 0.9}, "data": {"options": {"sequence_length": 512}}, "seed": 2}
    config = two(second=changes)
    before = flatten(config)
    first, second = phases.split(config, tmp_path)
    assert (first.name, first.folder) == ("phase_1", tmp_path / "phase_1")
    assert second.config.optimizer.get("b2") == 0.9
    assert "b2" not in first.config.optimizer.fields
    assert second.config.data.options == {"sequence_length": 512}
    assert second.config.init_from == str(tmp_path / "phase_1") and first.config.init_from is None
    assert not second.config.phases and flatten(config) == before
    assert phases.split(first.config)[0].name == ""


def test_changed_phase(uninterrupted: pathlib.Path, tmp_path: pathlib.Path) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(uninterrupted, workdir)
    before = tiny.fingerprint(workdir)
    with rejected(f"--workdir {workdir}", problem="phases.phase_2.seed: 1 there, 5 now"):
        train(two(second=SECOND | {"seed": 5}), workdir, quiet=True)
    with rejected("*", problem="phases.phase_1.duration: '6 steps' there, None now"):
        train(tiny.digits(), workdir, quiet=True)
    assert tiny.fingerprint(workdir) == before
    train(two(second=SECOND | {"log": {"every": "3 steps"}}), workdir, quiet=True)


def test_one_start_at_a_time(tmp_path: pathlib.Path) -> None:
    with Workdir(tmp_path).hold(), pytest.raises(UserError, match="is in use by another run"):
        train(two(), tmp_path, quiet=True)


def test_evaluation_is_of_one_phase(uninterrupted: pathlib.Path) -> None:
    with rejected("config.phases", problem="phase_1, phase_2", remedy="argument phase=N"):
        evaluate_checkpoint(two(), uninterrupted)
    phase = phases.split(two(), uninterrupted)[1]
    metrics = evaluate_checkpoint(phase.config, phase.folder)
    assert metrics["step"] == 8 and metrics == evaluate_checkpoint(None, phase.folder)


def test_a_plan_of_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Planned:
        def __init__(self, config: Spec, name: str, *others: Any, **named: Any) -> None:
            self.text = f"{name}: {config.batch_size}"

        def as_json(self) -> dict[str, Any]:
            return {"text": self.text}

        def describe(self) -> str:
            return self.text

    class Values(dict):
        config, topology, json, examples = two(), "v3-8", False, None
        cache, html = "none", None
        find = batches = topologies = workdir = measured = None

    nothing = types.SimpleNamespace(value=None)
    values = Values(
        {"price-per-device-hour": nothing, "batches-of": nothing, "network-gbps": nothing}
    )
    monkeypatch.setattr(plan, "make_plan", Planned)
    monkeypatch.setattr(plan, "decision", lambda plans: f"{len(plans)} plans")
    monkeypatch.setattr(plan.flags, "FLAGS", values)
    plan.main()
    assert capsys.readouterr().out == (
        "phase_1\nv3-8: 64\nphase_2\nv3-8: 32\nall phases: 2 plans\n"
    )
    values.json = True
    plan.main()
    actual = [{"phase": "phase_1", "text": "v3-8: 64"}, {"phase": "phase_2", "text": "v3-8: 32"}]
    assert json.loads(capsys.readouterr().out) == actual
    values.config = tiny.digits()
    plan.main()
    assert json.loads(capsys.readouterr().out) == {"text": "v3-8: 64"}
