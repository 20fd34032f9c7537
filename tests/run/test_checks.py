"""Checks across sections of a config; those within one are in test_build.py."""

from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.models.bert_rules import PARAMETERS, PARAMETERS_SCANNED
from lamb_tpu.run.build import prepare
from tests import tiny


@pytest.mark.long
def test_stacked_layers_need_rules_that_say_so() -> None:
    def by_override(rules: Any) -> ConfigDict:
        changes = {"model.scan_layers": True, "optimizer.rules": rules}
        return tiny.change(tiny.bert(), changes)

    for rules, path in (
        ("bert", "attention/key/kernel"),
        ("all", "attention/key/bias"),
        (PARAMETERS, "attention"),
        # No axis of layers, or only some of the stacks.
        ([("^encoder/", {"layer_axes": (1,)}), ("", {})], "attention/key/bias"),
        ([("output/kernel", {"layer_axes": (0,)}), ("", {})], "attention/key/bias"),
    ):
        with pytest.raises(
            UserError,
            match=(
                f"^config.model stacks .* axis 0 of 'encoder/layers/{path}.*config.optimizer.rules "
                r"give it no layer_axes.* give rules with layer_axes=\(0,\) .*PARAMETERS_SCANNED"
            ),
        ) as error:
            prepare(by_override(rules), None)
        assert "\n" not in str(error.value)
    # What does not adapt has no ratio to share.
    own = [("(bias|scale)$", {"adapt": False}), ("^encoder/layers", {"layer_axes": (0,)}), ("", {})]
    for rules in (PARAMETERS_SCANNED, own):
        assert prepare(by_override(rules), None).task.model.stacked
