"""Tests that our optimizers reproduce recorded runs of other implementations at every update."""

import re

import jax
import jax.numpy as jnp
import pytest

from lamb_tpu import optim
from tests.marks import some
from tests.optim import golden, golden_schedules, goldens
from tests.shared import ROOT

ENTRIES = goldens.index()
# One entry per implementation.
FIRST = list({entry["implementation"]: entry for entry in reversed(ENTRIES)}.values())
# The numbers of recorded runs in each family: (reproduced, excluded because of a bug)
COUNTS = {
    "lamb": (68, 1),
    "lars": (38, 0),
    "novograd": (19, 0),
    "diffgrad": (7, 0),
    "rmsprop_tf": (15, 0),
}


@pytest.mark.parametrize("entry", some(ENTRIES, FIRST), ids=goldens.label)
def test_trajectory(entry):
    if golden.transform_for(entry, goldens.params()) is None:
        bug = golden.BUGS[entry["implementation"]]
        with pytest.raises(NotImplementedError, match=re.escape(bug)):
            goldens.largest_differences(entry)
        return
    in_float32 = 5e-6 if (entry.get("max_abs_diff_f32_vs_f64") or 0) > 2e-6 else 2e-6
    # TensorFlow Addons has float32 hyper-parameters even for float64 weights. NovoGrad in PyTorch
    # has float32 second moments, and its square root is off by one unit in the last place for one
    # number in five.
    inexact = ("tfa_", "timm_nvnovograd", "nvidia_jasper_novograd")
    in_float64 = 1e-7 if entry["implementation"].startswith(inexact) else 1e-12
    largest = goldens.largest_differences(entry)
    assert any(key.startswith("p64/") for key in largest) == bool(entry["float64"])
    for key, difference in largest.items():
        assert difference <= (in_float64 if key.startswith("p64/") else in_float32), largest


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_counts(family):
    entries = [entry for entry in ENTRIES if entry["family"] == family]
    goldens.need(sum(COUNTS[family]), entries, family)
    repeated = [golden.transform_for(entry, goldens.params()) is not None for entry in entries]
    assert (sum(repeated), len(repeated) - sum(repeated)) == COUNTS[family]


def test_the_documentation_has_these_counts():
    text = (ROOT / "lamb_tpu" / "optim" / "README.md").read_text()
    counts = COUNTS | {"schedules": (len(golden_schedules.IMPLEMENTATIONS), 0)}
    totals = (sum(column) for column in zip(*counts.values(), strict=True))
    for family, (matched, excluded) in {**counts, "all": tuple(totals)}.items():
        assert f"| {family} | {matched} | {excluded} | {matched + excluded} |" in text


def test_few_implementations_are_excluded():
    assert len(golden.BUGS) <= 5 and all(golden.BUGS.values())


@pytest.mark.parametrize(
    "family, implementation, setting, hyper",
    [
        ("lamb", "deepspeed_fusedlamb", "clip1", {"max_grad_norm": 1.0, "grad_norms": "scalar"}),
        ("lamb", "nvidia_dle_tf_bert_lamb", "wd_step0", {"first_global_step": 0}),
        ("lamb", "flax_optim_lamb", "nowd", {"weight_decay": 0.0}),
        ("diffgrad", "author_diffgrad_v1", "nowd_reusedgrad", {}),
    ],
)
def test_bugs_and_nothing_else_of_an_implementation_are_excluded(
    family, implementation, setting, hyper
):
    params = goldens.params()
    entry = {
        "family": family,
        "implementation": implementation,
        "setting": "wd",
        "hyper": {"lr": 0.01, "lr_schedule": "const", "weight_decay": 0.01},
    }
    assert golden.transform_for(entry, params) is not None
    buggy = entry | {"setting": setting, "hyper": entry["hyper"] | hyper}
    assert golden.transform_for(buggy, params) is None
    assert implementation in golden.BUGS


@pytest.mark.parametrize("family", ["lamb", "lars"])
@pytest.mark.parametrize("always", [False, True])
def test_a_group_of_timm_may_adapt_without_decay(family, always):
    """In timm's LARS and LAMB, `always_adapt` is also an option of a parameter group."""
    params = {"kernel": jnp.full((4, 4), 3.0), "bias": jnp.full(4, 2.0)}
    entry = {
        "family": family,
        "implementation": f"timm_{family}",
        "setting": "group",
        "hyper": {
            "lr": 0.1,
            "lr_schedule": "const",
            "weight_decay": 0.01,
            "momentum": 0.9,
            "excluded_group": {"patterns": ["bias"], "weight_decay": 0.0, "always_adapt": always},
        },
    }
    if family == "lamb":
        del entry["hyper"]["momentum"]
    tx = golden.transform_for(entry, params)
    rules = [("bias", {"decay": False, "adapt": always}), ("", {})]
    reference = optim.make_optimizer(
        {"name": family, "preset": "timm", "weight_decay": 0.01, "rules": rules}, 0.1
    )
    for actual, expected in zip(
        *(jax.tree.leaves(tx.update(params, tx.init(params), params)[0]) for tx in (tx, reference)),
        strict=True,
    ):
        assert jnp.array_equal(actual, expected)


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_a_setting_that_is_not_known_is_an_error(entry):
    params = goldens.params()
    if golden.transform_for(entry, params) is None:
        return
    with pytest.raises(ValueError, match="warp_factor"):
        golden.transform_for(dict(entry, hyper=dict(entry["hyper"], warp_factor=9)), params)


def test_unknown_entries_raise():
    with pytest.raises(ValueError, match="family='lion' is unknown; use one of lamb"):
        golden.transform_for({"family": "lion"}, {})
    hyper = {"lr": 0.01, "lr_schedule": "cosine"}
    with pytest.raises(ValueError, match="lr_schedule='cosine' is unknown"):
        golden.transform_for(
            {"family": "lamb", "implementation": "tfa_lamb", "hyper": hyper}, {"w": 1.0}
        )
    with pytest.raises(ValueError, match="implementation='my_lamb' is unknown; add it"):
        golden.transform_for({"family": "lamb", "implementation": "my_lamb", "hyper": hyper}, {})
