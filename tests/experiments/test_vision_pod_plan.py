"""The pods' plans for images: the page, the shares by kind, the recipes; nothing is compiled."""

import pytest

from experiments.vision import pod_plan
from lamb_tpu import config as config_lib
from lamb_tpu.cost import topology
from lamb_tpu.plan.report import Plan
from lamb_tpu.run.recipe import resolve

TWICE = 'backend_config={"known_trip_count":{"n":"2"}}'


def kernel(name: str, operand: str, cycles: int, path: str) -> str:
    return (
        f'%{name} = f32[8]{{0}} fusion(%{operand}), calls=%g, metadata={{op_name="jit(f)/{path}"}}'
        f', backend_config={{"estimated_cycles":"{cycles}"}}'
    )


PROGRAM = f"""
%body (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT {kernel("c", "p", 250, "head_conv/conv_general_dilated")}
}}

%condition (p: f32[8]) -> pred[] {{
  ROOT %p = pred[] parameter(0)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  {kernel("a", "x", 100, "add")}
  {kernel("b", "a", 300, "jvp(N)/stage1_block1/depthwise/conv_general_dilated")}
  %w = f32[8]{{0}} while(%b), body=%body, condition=%condition, {TWICE}
  ROOT {kernel("d", "w", 100, "stage1_block1/expand_norm/reduce_sum")}
}}
"""


def made(**fields: object) -> Plan:
    return Plan(
        topology=topology.topology("v3-1024"), mesh={"data": 1024}, hosts=128, batch_size=32_768,
        backend="shard_map", compile_seconds=12.3, fits=True, needed=2.0**31, **fields,
    )


def test_shares() -> None:
    assert pod_plan.shares(PROGRAM) == pytest.approx({
        "depthwise convolutions": 0.3, "other convolutions": 0.5, "BatchNorm, activations": 0.1,
        "squeeze-excite": 0.0, "the rest": 0.1,
    })


def test_page() -> None:
    plans = (
        made(cycles=94_000_000, collectives=(), program=PROGRAM),  # 0.1 s at 940 MHz
        made(cycles=None),
    )
    rows = pod_plan.ROWS[0], pod_plan.ROWS[3]
    text = pod_plan.page([pod_plan.record(row, each) for row, each in zip(rows, plans)])
    assert (
        "| EfficientNet-B2 | 32,768 | yes | 2.0 | 100.0 | 327.7 | 451.35 | 0 MB | 12 s |" in text
    )
    assert "| ResNet-50 | 32,768 | yes | 2.0 | - | - | at most 717 | 0 MB | 12 s |" in text
    assert "| EfficientNet-B2 | 32,768 | 30% | 50% | 10% | 0% | 10% |" in text


def test_recipes_are_complete() -> None:
    for row, size, batch in zip(
        pod_plan.ROWS, (260, 456, 456, 224), (32_768, 32_768, 65_536, 32_768), strict=True
    ):
        config = pod_plan.config_of(row)
        config_lib.check_keys(config)
        config_lib.check_values(config)
        assert config.batch_size == batch and config.optimizer.name == "lars"
        assert resolve(config, 1_281_167).total_steps > 100
        assert config.parallel.backend == "shard_map"
        assert config.data.options.size == size and config.model.num_classes == 1000
