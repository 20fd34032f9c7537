"""Drawn cases: the same for a seed, of every family, and mostly accepted by the config's checks."""

import collections
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.spec import parse
from tests.fuzz import drawing, families, promises

CASES = [drawing.draw(seed) for seed in range(300)]


def test_a_seed_gives_one_case() -> None:
    assert [drawing.draw(seed) for seed in range(20)] == CASES[:20]
    assert len({case.to_json() for case in CASES}) == len(CASES)


def test_all_families_and_features_are_drawn() -> None:
    counts: collections.Counter[Any] = collections.Counter(case.family for case in CASES)
    assert set(counts) == set(families.FAMILIES)
    features = collections.Counter(key for case in CASES for key in case.features())
    wanted = "accumulation_steps ema.decay batch_rule parallel.exchange model.group_size prng"
    legs = "mesh.data mesh.fsdp mesh.model mesh.sequence parallel.backend parallel.rules"
    for key in [*wanted.split(), *(f"first {each}" for each in legs.split())]:
        assert features[key] >= 3, key
    names = {case.config["optimizer"]["name"] for case in CASES}
    assert names == set(drawing.NAMES)
    assert any(promises.is_lossy(case) for case in CASES)


@pytest.mark.long
def test_configs_are_valid() -> None:
    for case in CASES[:60]:
        for config in case.legs():
            try:
                parse(config)
            except UserError as error:  # no key is misspelt, and no value has a wrong type
                raise AssertionError(case.to_json()) from error
