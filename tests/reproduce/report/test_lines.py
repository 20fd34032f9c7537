"""Lines are split among axes by the first word of their names, and have their optimizer's style."""

import pytest

from lamb_tpu.reproduce.report import lines


@pytest.mark.parametrize(
    "names, expected",
    [
        ([f"sgd-{n}" for n in range(8)], {"": 8}),
        ([f"{o}-{n}" for o in ("sgd", "adam") for n in range(7)], {"sgd": 7, "Adam": 7}),
        (
            [f"lars-{n}" for n in range(18)],
            {"LARS, 1 of 3": 6, "LARS, 2 of 3": 6, "LARS, 3 of 3": 6},
        ),
        ([f"cell{n}" for n in range(9)], {"cells, 1 of 2": 4, "cells, 2 of 2": 5}),
    ],
)
def test_panels(names: list[str], expected: dict[str, int]) -> None:
    actual = lines.panels(dict.fromkeys(names, 0))
    assert {title: len(part) for title, part in actual.items()} == expected
    assert [name for part in actual.values() for name in part] == names


def test_a_variant_of_tensorflow_looks_like_its_optimizer() -> None:
    assert lines.looks({"a": "rmsprop_tf"}) == lines.looks({"a": "rmsprop"})
    assert lines.optimizer_name("rmsprop_tf") == "RMSProp"
    assert lines.optimizer_name("my.own:rule") == "my.own:rule"
