"""Options: defaults, types, and mistakes that name what is known."""

from dataclasses import dataclass

import pytest

from lamb_tpu.data.options import NoOptions, read_options
from lamb_tpu.errors import UserError


@dataclass(frozen=True)
class Some:
    length: int = 8
    share: float = 0.5
    path: str = ""
    whole: bool = False
    seed: int = 0


def test_what_is_given_replaces_the_default() -> None:
    assert read_options("x", Some, {}) == Some()
    given = {"length": 9, "share": 1, "path": None, "whole": True}
    assert read_options("x", Some, given, seed=7) == Some(9, 1, "", True, 7)
    assert read_options("x", NoOptions, {}) == NoOptions()


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"lenght": 9},
            r"^config.data.options.lenght is unknown; x has, with these defaults: "
            r"length = 8, share = 0.5, path = '', whole = False$",
        ),
        ({"seed": 1}, "config.data.options.seed is unknown"),
        ({"length": 9.0}, "config.data.options.length is 9.0; it must be a whole number"),
        ({"length": True}, "config.data.options.length is True; it must be a whole number"),
        ({"share": "half"}, "config.data.options.share is 'half'; it must be a number"),
        ({"path": 1}, "config.data.options.path is 1; it must be text"),
        ({"whole": 1}, "config.data.options.whole is 1; it must be True or False"),
    ],
)
def test_mistakes(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options("x", Some, given, seed=7)


def test_a_set_without_options() -> None:
    with pytest.raises(UserError, match="config.data.options.length is unknown; digits has none"):
        read_options("digits", NoOptions, {"length": 3})
