"""Tests the defaults of an exchange: one stage, and an empty residual."""

from lamb_tpu.parallel.exchange import EXCHANGES, Cast, Residual
from tests.parallel.exchange.spread import Spread


def test_one_stage_unless_an_exchange_has_more() -> None:
    exchange = Cast(("data",), 8)
    assert exchange.at(0) is exchange.at(10) is exchange
    spread = Spread(("data",), 8, start=3)
    assert spread.at(0) == spread.at(2) != spread.at(3) == spread.at(9)
    assert hash(spread.at(3)) == hash(spread.at(4))


def test_residual_is_empty_unless_given() -> None:
    assert Cast(("data",), 8).init({}) == Residual() == ((), (), ())


def test_every_exchange_has_axes_and_options_with_defaults() -> None:
    for made in EXCHANGES.values():
        exchange = made(("data",), 8)
        assert exchange.axes == ("data",) and exchange.num_devices == 8
        assert hash(exchange) == hash(made(("data",), 8))
