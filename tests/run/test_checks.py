"""Checks that involve several sections of a config; test_build.py tests checks within one section."""

from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu.models.bert_rules import PARAMETERS, PARAMETERS_SCANNED
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.raising import rejected


@pytest.mark.long
def test_stacked_layers_need_rules_that_say_so() -> None:
    def by_override(rules: Any) -> ConfigDict:
        changes = {"model.scan_layers": True, "optimizer.rules": rules}
        return tiny.change(tiny.bert(), changes)

    for rules, path in (
        ("bert", "attention/key/kernel"),
        ("all", "attention/key/bias"),
        (PARAMETERS, "attention"),
        # Rules with the wrong axis, or for only some of the stacked parameters.
        ([("^encoder/", {"layer_axes": (1,)}), ("", {})], "attention/key/bias"),
        ([("output/kernel", {"layer_axes": (0,)}), ("", {})], "attention/key/bias"),
    ):
        problem = f"give no layer_axes to 'encoder/layers/{path}"
        remedy = "use rules with layer_axes=(0,) for these layers, such as lamb_tpu.models.bert_rules.PARA"
        with rejected("config.optimizer.rules", problem=problem, remedy=remedy):
            prepare(by_override(rules), None)
    # Parameters that do not adapt have no trust ratio that layers could share.
    custom = [
        ("(bias|scale)$", {"adapt": False}),
        ("^encoder/layers", {"layer_axes": (0,)}),
        ("", {}),
    ]
    for rules in (PARAMETERS_SCANNED, custom):
        assert prepare(by_override(rules), None).task.model.stacked
