"""Features that can or cannot be combined with exchanges, and errors in the options of exchanges."""

import re
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import overrides
from lamb_tpu.config import flatten, unflatten
from lamb_tpu.errors import UserError
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.parallel.exchange import spread
from tests.raising import rejected
from tests.run import exchange_table
from tests.shared import ROOT

PAGE = ROOT / "lamb_tpu" / "parallel" / "README.md"


def message_of(**changes: Any) -> str:
    changes = dict(changes)
    options = {"name": spread.NAME, **changes.pop("options", {})}
    config = tiny.digits(
        **{"parallel__backend": "shard_map", "parallel__exchange": ConfigDict(options), **changes}
    )
    with pytest.raises(UserError) as error:
        prepare(config, None)
    assert "\n" not in str(error.value)
    return str(error.value)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4}, ".bits is unknown; exchange 'tests.*' has: name, start, late, full_"),
    ({"start": -1}, ".start=-1 must be at least 0$"),
    ({"start": "x"}, ".start='x' has the wrong type; use a whole number, such as 2$"),
    ({"name": "float16"}, ".name='float16' is unknown; use float32, bfloat16"),
    ({"name": "float32", "full_precision": ("a",)}, r".full_precision is unknown; exchange "),
    (
        {"full_precision": "bias"},
        r".full_precision='bias' has the wrong type; use a tuple of texts",
    ),
    ({"full_precision": ("(",)}, r".full_precision has '\(', which is not a valid regular expres"),
    ({"full_precision": ("conv",)}, r".full_precision has the regex 'conv', which matches no para"),
    ({"full_precision": ("",)}, r".full_precision=\('',\) matches every parameter; use"),
]


@pytest.mark.parametrize("options, message", ERRORS, ids=[str(o) for o, _ in ERRORS])
def test_error_is_named(options: dict[str, Any], message: str) -> None:
    assert re.match(f"config.parallel.exchange{message}", message_of(options=options))


def test_one_device_has_nothing_to_exchange() -> None:
    config = tiny.digits(
        parallel__backend="shard_map", parallel__exchange=ConfigDict({"name": spread.NAME})
    )
    problem = "has nothing to exchange: config.mesh splits the batch over 1 device"
    with rejected("config.parallel.exchange.name", spread.NAME, problem):
        prepare(config, None, jax.devices()[:1])
    # An evaluation exchanges nothing.
    assert prepare(config, None, jax.devices()[:1], training=False).exchange.sizes == (1, 1)


def test_options_are_flags() -> None:
    config = tiny.digits()
    flags = [
        "--config.parallel.exchange.name=bfloat16",
        "--config.parallel.exchange.full_precision=('bias',)",
    ]
    actual, rest = overrides.take(flags)
    assert not rest
    overrides.apply(config, actual)
    assert config.parallel.exchange.to_dict() == {"name": "bfloat16", "full_precision": ("bias",)}
    # Lists from JSON become tuples.
    config = unflatten(flatten(config) | {"parallel.backend": "shard_map"})
    run = prepare(config, None)
    assert run.exchange is not None and run.exchange.full_precision == ("bias",)
    assert hash(run.stage(0)) == hash(run.stage(3))
    with pytest.raises(UserError, match=r"exchange\.rank is unknown; exchange 'float32'"):
        overrides.apply(tiny.digits(), overrides.take(["--config.parallel.exchange.rank=4"])[0])


def test_every_exchange_has_its_options_as_fields() -> None:
    for name in EXCHANGES:
        fields = EXCHANGES.fields(name)
        assert not {"axes", "num_devices"} & fields.keys()
        assert ("full_precision" in fields) == (name != "float32")


def test_optimizers_that_sum_by_themselves_stand_alone() -> None:
    name = "tests.parallel.exchange.spread:momentum"
    optimizer = {"name": name, "learning_rate": 0.1}
    run = prepare(tiny.digits(parallel__backend="shard_map", optimizer=ConfigDict(optimizer)), None)
    assert isinstance(run.tx, Reducing)
    momentum = ConfigDict(optimizer)
    for changes, message in (
        ({"parallel__optimizer_state": "zero1"}, "optimizer_state='replicated'$"),
        ({"parallel__rules": (("output/kernel", "fsdp"),)}, r"leave config\.parallel\.rules empty"),
        ({"statistics__noise_scale": True, "options": {"name": "float32"}}, "no gradient of the"),
        ({"parallel__backend": "jit", "options": {"name": "float32"}}, "backend='shard_map'$"),
    ):
        text = message_of(optimizer=momentum, **changes)
        assert text.startswith(f"config.optimizer.name={name!r} itself sums over devices")
        assert re.search(message, text)
    assert re.search(
        "clip_global_norm=1.0 would wrap .*, which sums over devices itself",
        message_of(optimizer=ConfigDict({**optimizer, "clip_global_norm": 1.0})),
    )


@pytest.mark.parametrize(
    "optimizer, key",
    [
        ({"name": "momentum"}, "momentum"),
        ({"name": "lars", "preset": "optax"}, "momentum"),
        ({"name": "lamb"}, "b1"),
    ],
)
def test_a_second_momentum_is_rejected(optimizer: dict[str, Any], key: str) -> None:
    dgc = {"name": "dgc", "ratio": 0.1}
    given = ConfigDict({"learning_rate": 0.1, **optimizer})
    assert message_of(optimizer=given, options=dgc) == (
        f"config.parallel.exchange.name='dgc' applies a momentum, and config.optimizer.{key}=0.9 of "
        f"{optimizer['name']!r} adds a second one; set config.optimizer.{key} or "
        "config.parallel.exchange.momentum to 0, or use config.optimizer.name='sgd'"
    )
    for changes in (
        {"optimizer": ConfigDict({**given, key: 0.0}), "options": dgc},
        {"optimizer": given, "options": {**dgc, "momentum": 0.0}},
    ):
        options = ConfigDict(changes.pop("options"))
        run = prepare(
            tiny.digits(parallel__backend="shard_map", parallel__exchange=options, **changes), None
        )
        assert run.exchange is not None


def test_statistics_of_the_sums_need_them_exact() -> None:
    for key in ("noise_scale", "halves"):
        message = f"changes the sum with which config.statistics.{key} compares parts of the batch"
        assert message in message_of(**{f"statistics__{key}": True})
    rule = ConfigDict({"name": "noise_scale", "interval": 2, "upper": 128})
    assert "with which config.batch_rule.name='noise_scale' compares" in message_of(
        batch_rule=rule, accumulation_steps=2
    )


@pytest.mark.long
def test_table_on_the_page_matches_the_checks() -> None:
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
