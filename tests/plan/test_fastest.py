"""Search for the fastest layout: dimensions, coordinate descent, and the reported gain."""

import shlex
from typing import Any

import pytest

from lamb_tpu.cost.topology import topology
from lamb_tpu.models import transformer
from lamb_tpu.plan import fastest
from lamb_tpu.plan.fastest import dimensions, find, most
from lamb_tpu.plan.trials import Answer, Trials
from lamb_tpu.plan.variants import Variants
from lamb_tpu.spec import Spec
from tests import tiny
from tests.plan import planned
from tests.plan.planned import variants
from tests.raising import rejected

V3 = topology("v3-32")


def keys(of: Variants) -> list[set[str]]:
    return [{key for value in values for key in value} for values in dimensions(of, V3)]


def actual(of: Variants) -> Answer:
    with Trials(most(of, V3)) as trials:
        return find(of, "v3-32", trials)


def test_dimensions() -> None:
    state = {"parallel.optimizer_state", "mesh.data", "mesh.fsdp"}
    ends = [state, {"parallel.exchange.name", "parallel.backend"}]
    assert keys(variants("digits.py")) == [{"parallel.backend"}, {"accumulation_steps"}, *ends]
    assert keys(variants("bert_pretrain.py:size=tiny,phase=1")) == [
        {"parallel.backend"},
        {"accumulation_steps"},
        {"model.remat"},
        {"model.scan_layers", "optimizer.rules"},
        *ends,
        {"mesh.data", "mesh.sequence", "parallel.backend"},
    ]
    # The state is sharded over all devices, the two cores of a chip, or a row of four chips.
    split = dimensions(variants("digits.py"), V3)[2]
    assert [value.get("mesh.fsdp") for value in split] == [None, None, 2, 8]
    assert most(variants("digits.py"), V3) == 1 + 2 + 5 + 4 + 2
    # The axis 'model' is tried because rules shard parameters over it.
    ruled = variants("digits.py", parallel__rules=(("kernel$", (None, "model")),))
    assert dimensions(ruled, V3)[-1] == [
        {"mesh.data": -1, "mesh.model": 1},
        # shard_map shards only the batch.
        {"mesh.data": -1, "mesh.model": 2, "parallel.backend": "jit"},
        {"mesh.data": -1, "mesh.model": 4, "parallel.backend": "jit"},
    ]
    assert fastest.REMATS == tuple(transformer.REMATS)


@pytest.mark.parametrize(
    "changes, is_tried",
    [
        ({}, True),
        ({"model__batch_norm": True}, False),
        ({"model__batch_norm": True, "model__group_size": 32}, True),
    ],
)
def test_microbatches_leave_groups_alone(changes: dict[str, Any], is_tried: bool) -> None:
    assert ({"accumulation_steps"} in keys(variants("digits.py", **changes))) == is_tried


@pytest.mark.long
def test_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dimension is searched from the best layout so far; the table has rejected layouts too."""

    def outcome(config: Spec, _: str) -> tuple[float, float] | str:
        if config.parallel.exchange.name == "bfloat16":
            return "has no bfloat16 exchange"
        time = 100.0 - 40 * (config.parallel.backend == "shard_map")
        time += 5 * config.accumulation_steps - 9 * (config.mesh["fsdp"] == 8)
        return (20 if config.mesh["fsdp"] == 2 else 4), time

    made = planned.instead(monkeypatch, outcome)
    answer = actual(variants("digits.py:batch=1024"))
    assert len(made) == 1 + 1 + 4 + 3 + 1
    assert {config.parallel.backend for config in made[1:]} == {"shard_map"}
    assert answer.json["flags"] == [
        "--config.mesh.fsdp=8",
        "--config.parallel.backend=shard_map",
        "--config.parallel.optimizer_state=zero1",
    ]
    lines = answer.text.splitlines()
    assert lines[0].split() == ["fits", "memory", "ms", "a", "step", "layout"]
    assert lines[1].split() == ["yes", "25.8", "%", "105", "(99.8", "to", "116)", "as", "given"]
    text = tiny.unbroken(answer.text)
    assert "no 129 % fsdp=2, backend=shard_map, optimizer_state=zero1" in text
    assert "exchange=bfloat16, optimizer_state=zero1: the step has no bfloat16 exchange" in text
    assert (
        "the fastest layout on v3-32: 25.8 % of memory, 56 (53.2 to 61.6) ms a step, 49 ms (47 %) "
        "less than the config as given add --config.mesh.fsdp=8 " in text
    )
    # The flags reproduce the layout that was planned.
    assert lines[-1] == "add " + " ".join(answer.json["flags"])
    assert [shlex.split(flag) for flag in answer.json["flags"]] == [
        [flag] for flag in answer.json["flags"]
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "outcome, flags, text",
    [
        (
            lambda *_: (1, 100),
            [],
            "the config as given is the fastest of the 10 layouts that were tried on v3-32: 6.46 % "
            "of memory, 100 (95 to 110) ms a step",
        ),
        (
            lambda config, _: (1, 98 if config.parallel.backend == "shard_map" else 100),
            ["--config.parallel.backend=shard_map"],
            "2 ms (2 %) less than the config as given; the two intervals overlap, but this layout is "
            "also faster at both ends",
        ),
        (
            lambda config, _: (20 / config.accumulation_steps, config.accumulation_steps),
            ["--config.accumulation_steps=2"],
            "and the config as given does not fit",
        ),
        (lambda *_: (20, 1), [], "none of the 10 layouts fits on v3-32"),
    ],
)
def test_decisions(monkeypatch: pytest.MonkeyPatch, outcome: Any, flags: list, text: str) -> None:
    planned.instead(monkeypatch, outcome)
    answer = actual(variants("digits.py:batch=1024"))
    assert answer.json["flags"] == flags and text in tiny.unbroken(answer.text)


def test_a_rejected_config(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: "fails")
    with rejected("the step", problem="fails"):
        actual(variants("digits.py"))


def test_scanned_layers_have_separate_ratios() -> None:
    of = variants("bert_pretrain.py:size=tiny,phase=1")
    scanned = dimensions(of, V3)[3][1]
    assert scanned["model.scan_layers"] is True
    assert any("layer_axes" in metadata for _, metadata in scanned["optimizer.rules"])
