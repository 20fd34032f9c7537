"""Options that say what is planned: each mistake is one sentence, before anything compiles."""

from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.options import Request, check
from tests import tiny

TWO = {"phases": {"phase_1": {"duration": "1 steps"}, "phase_2": {"duration": "2 steps"}}}


def asked(**options: Any) -> Request:
    config = tiny.digits()
    return check(tiny.change(config, options.pop("config", {})), **options)


def test_what_is_asked() -> None:
    assert asked(topology="v3-8") == Request("plan", ("v3-8",))
    assert asked(topology="v3-8", html="a.html").kind == "plan"
    assert asked(topology="v3-8", find="batch").kind == "batch"


@pytest.mark.parametrize("options, message", [
    ({}, "--topology is missing; see --help"),
    ({"topology": "v3-9", "find": "batch"}, "--topology is 'v3-9', and no slice of v3 has 9 cores"),
    ({"topology": "v3-8", "find": "batch", "html": "a.html"},
     "--html is 'a.html', and --find=batch writes no page; leave one of them out"),
    ({"topology": "v3-8", "find": "batch", "config": TWO},
     "--find=batch is for one run, and config.phases has phase_1, phase_2; give one of them, often "
     "by the config's argument phase=1"),
])
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        asked(**options)
    assert str(error.value).startswith(message)
