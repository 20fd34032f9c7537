"""Tests the page of all config keys."""

from lamb_tpu import keys, spec_keys
from tests import tiny


def test_the_page_has_every_key() -> None:
    text = keys.page()
    assert (tiny.ROOT / "configs" / "keys.md").read_text() == text
    for key in spec_keys.keys():
        assert f"\n| `{key.path}` | " in text
