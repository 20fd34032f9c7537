"""What exchanges combine with, and config mistakes, each refused by one sentence."""

import re
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu.config import flatten, unflatten
from lamb_tpu.errors import UserError
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.run import exchanges, overrides
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.parallel.exchange import spread
from tests.run import exchange_table
from tests.shared import ROOT

PAGE = ROOT / "lamb_tpu" / "parallel" / "README.md"


def refused(**changes: Any) -> str:
    changes = dict(changes)
    options = {"name": spread.NAME, **changes.pop("options", {})}
    config = tiny.digits(
        **{"parallel__backend": "shard_map", "parallel__exchange": ConfigDict(options), **changes}
    )
    with pytest.raises(UserError) as error:
        prepare(config, None)
    assert "\n" not in str(error.value)
    return str(error.value)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4}, r"exchange\.bits is not a field of exchange 'tests.*; known: start, late, full_"),
    ({"start": -1}, r"^config\.parallel\.exchange\.start must be at least 0, not -1$"),
    ({"start": "x"}, r"^config\.parallel\.exchange\.start is 'x'; it must be a whole number$"),
    ({"name": "float16"}, r"exchange\.name is 'float16'; known: float32, bfloat16"),
    ({"name": "float32", "full_precision": ("a",)}, r"full_precision is not a field of exchange "),
    ({"full_precision": "bias"}, r"full_precision is 'bias'; it must be a tuple of regular expr"),
    ({"full_precision": ("(",)}, r"full_precision has '\(', which is not a valid regular expres"),
    ({"full_precision": ("conv",)}, r"full_precision has the regex 'conv', which matches no para"),
    ({"full_precision": ("",)}, r"full_precision is \('',\), which matches every parameter; tak"),
]


@pytest.mark.parametrize("options, message", MISTAKES, ids=[str(o) for o, _ in MISTAKES])
def test_mistake_is_named(options: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(options=options))


def test_name_is_needed() -> None:
    config = tiny.digits(parallel__exchange=ConfigDict())
    with pytest.raises(UserError, match=r"config\.parallel\.exchange has no name; known: float32"):
        prepare(config, None)


def test_one_device_has_nothing_to_exchange() -> None:
    config = tiny.digits(
        parallel__backend="shard_map", parallel__exchange=ConfigDict({"name": spread.NAME})
    )
    with pytest.raises(UserError, match="splits the batch over 1 device, which has nothing to exc"):
        prepare(config, None, jax.devices()[:1])
    # An evaluation exchanges nothing.
    assert prepare(config, None, jax.devices()[:1], training=False).exchange.sizes == (1, 1)


def test_options_are_flags() -> None:
    config = tiny.digits()
    flags = [
        "--config.parallel.exchange.name=bfloat16",
        "--config.parallel.exchange.full_precision=('bias',)",
    ]
    found, rest = overrides.take(flags)
    assert not rest
    overrides.apply(config, found)
    assert config.parallel.exchange.to_dict() == {"name": "bfloat16", "full_precision": ("bias",)}
    # Lists of JSON are tuples again.
    config = unflatten(flatten(config) | {"parallel.backend": "shard_map"})
    run = prepare(config, None)
    assert run.exchange is not None and run.exchange.full_precision == ("bias",)
    assert hash(run.stage(0)) == hash(run.stage(3))
    with pytest.raises(UserError, match=r"exchange\.rank is unknown; parallel\.exchange 'float32'"):
        overrides.apply(tiny.digits(), overrides.take(["--config.parallel.exchange.rank=4"])[0])


def test_every_exchange_has_its_options_as_fields() -> None:
    for name in EXCHANGES:
        fields = exchanges.exchange_fields(name)
        assert not {"axes", "num_devices"} & fields.keys()
        assert ("full_precision" in fields) == (name != "float32")


def test_optimizers_that_sum_by_themselves_stand_alone() -> None:
    name = "tests.parallel.exchange.spread:momentum"
    optimizer = {"name": name, "learning_rate": 0.1}
    run = prepare(tiny.digits(parallel__backend="shard_map", optimizer=ConfigDict(optimizer)), None)
    assert isinstance(run.tx, Reducing)
    momentum = ConfigDict(optimizer)
    for changes, message in (
        ({"parallel__optimizer_state": "zero1"}, "optimizer_state must be 'replicated'$"),
        ({"parallel__rules": (("output/kernel", "fsdp"),)}, r"config\.parallel\.rules must be emp"),
        ({"statistics__noise_scale": True, "options": {"name": "float32"}}, "no gradient of the"),
        ({"parallel__backend": "jit", "options": {"name": "float32"}}, "backend='shard_map'$"),
    ):
        text = refused(optimizer=momentum, **changes)
        assert text.startswith(f"config.optimizer.name is {name!r}, which sums over devices")
        assert re.search(message, text)
    assert re.search(
        "clip_global_norm is a transform around the optimizer, and .* by itself",
        refused(optimizer=ConfigDict({**optimizer, "clip_global_norm": 1.0})),
    )


@pytest.mark.parametrize(
    "optimizer, key",
    [
        ({"name": "momentum"}, "momentum of 'momentum' is 0.9"),
        ({"name": "lars", "preset": "optax"}, "momentum of 'lars' is 0.9"),
        ({"name": "lamb"}, "b1 of 'lamb' is 0.9"),
    ],
)
def test_a_second_momentum_is_refused(optimizer: dict[str, Any], key: str) -> None:
    dgc = {"name": "dgc", "ratio": 0.1}
    given = ConfigDict({"learning_rate": 0.1, **optimizer})
    assert refused(optimizer=given, options=dgc) == (
        "config.parallel.exchange.name is 'dgc', which has the momentum, and "
        f"config.optimizer.{key}, a second one; it must be 0, or config.optimizer.name 'sgd', or "
        "config.parallel.exchange.momentum 0"
    )
    name = key.split()[0]
    for changes in (
        {"optimizer": ConfigDict({**given, name: 0.0}), "options": dgc},
        {"optimizer": given, "options": {**dgc, "momentum": 0.0}},
    ):
        options = ConfigDict(changes.pop("options"))
        run = prepare(
            tiny.digits(parallel__backend="shard_map", parallel__exchange=options, **changes), None
        )
        assert run.exchange is not None


def test_old_name_of_the_dtype() -> None:
    old = flatten(tiny.digits())
    del old["parallel.exchange.name"]
    config = unflatten({**old, "parallel.gradient_dtype": "bfloat16"})
    assert config.parallel.exchange.to_dict() == {"name": "bfloat16"}
    # Also in a phase.
    key = "phases.a.parallel.gradient_dtype"
    assert config_lib.renamed({key: "x"}) == {"phases.a.parallel.exchange.name": "x"}


def test_statistics_of_the_sums_need_them_exact() -> None:
    for key in ("noise_scale", "halves"):
        message = f"config.statistics.{key} compares parts of the batch with their sum, which"
        assert message in refused(**{f"statistics__{key}": True})
    rule = ConfigDict({"name": "noise_scale", "interval": 2, "upper": 128})
    assert "the rule config.batch_rule.name='noise_scale' compares" in refused(
        batch_rule=rule, accumulation_steps=2
    )


@pytest.mark.long
def test_table_on_the_page_is_that_of_the_checks() -> None:
    text = PAGE.read_text()
    table = exchange_table.table()
    assert table in text, f"the table is now:\n{table}"
    assert "| no" in table and "| yes" in table


def test_layers_in_a_loop_are_matrices_of_their_own() -> None:
    exchange = {
        "parallel__backend": "shard_map",
        "parallel__exchange": ConfigDict({"name": "powersgd", "rank": 2}),
    }
    made = [
        prepare(tiny.bert(**exchange, model__scan_layers=scan), None).exchange
        for scan in (False, True)
    ]
    assert [each.exchange.stacked for each in made] == [(), ("^encoder/layers/",)]
    given = ConfigDict({"name": "powersgd", "rank": 2, "stacked": ("kernel$",)})
    run = prepare(
        tiny.bert(**{**exchange, "parallel__exchange": given}, model__scan_layers=True), None
    )
    assert run.exchange.exchange.stacked == ("kernel$",)
