"""Tests that every family of recorded runs rejects unknown settings and unsupported values."""

from typing import Any

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.optim import goldens
from tests.optim.golden_common import Settings

# One entry for each implementation and set of names of settings.
ENTRIES = {
    (entry["family"], entry["implementation"], tuple(entry["hyper"])): entry
    for entry in goldens.entries()
    if entry["family"] in FAMILIES
}
PER_IMPLEMENTATION = {key[:2]: entry for key, entry in ENTRIES.items()}


def _repeat(entry: dict[str, Any], **changes: Any) -> Any:
    hyper = entry["hyper"]
    hyper = {"text": hyper, **changes} if isinstance(hyper, str) else hyper | changes
    inputs = goldens.inputs()
    return FAMILIES[entry["family"]](dict(entry, hyper=hyper), goldens.record(entry), inputs)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=goldens.label)
def test_a_setting_without_a_meaning_is_an_error(entry: dict[str, Any]) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        _repeat(entry, warp_factor=9)
    # An entry that we cannot reproduce may report the reason for this first.
    if isinstance(caught.value, ValueError):
        assert "warp_factor" in str(caught.value)
    else:
        with pytest.raises(NotImplementedError):
            _repeat(entry)


# Settings with values that our code does not support, by family and implementation.
ASSUMED: list[tuple[str, str, dict[str, Any]]] = [
    ("onebit", "onebit_adam", {"gradients": "summed"}),
    ("lamb", "apex_fusedlamb", {"amsgrad": True}),
    ("lamb", "apex_fusedlamb", {"set_grad_none": "maybe"}),
    ("lamb", "deepspeed_fusedlamb", {"amsgrad": True}),
    ("lamb", "deepspeed_fusedlamb", {"scale": 0.0}),
    ("lamb", "nvidia_dle_txl_jitlamb", {"adam": True}),
    ("lamb", "timm_lamb", {"foreach": 2}),
    ("novograd", "apex_fusednovograd", {"amsgrad": True}),
    ("novograd", "nvidia_openseq2seq_novograd", {"beta2": "adaptive"}),
    ("lion", "lucidrains_lion", {"cautious_factor": 0.5}),
    ("muon", "optax_muon", {"adaptive": True}),
    ("dgc", "synxlin_dgc", {"gradients": "summed"}),
    ("econtrol", "efface_ef14", {"objective": "logistic"}),
    ("econtrol", "efface_ef14", {"rows": 31}),
    ("econtrol", "efface_econtrol", {"dimension": 25}),
    ("powersgd", "torch_powersgd_hook", {"orthogonalization_epsilon": 0.1}),
    ("powersgd", "torch_powersgd_hook", {"bucket_order": "as given"}),
    ("noise_scale", "gptneox_gns", {"gradients_with_inf_at": [3]}),
    ("legw_lstm", "label_smoothing", {"rows": 999}),
    ("legw_lstm", "label_smoothing", {"reduction": "none"}),
    ("legw_lstm", "ptb_batching", {"tokens": 3}),
    ("legw_lstm", "torch_lstm_lm", {"num_steps": 99}),
    ("legw_lstm", "mlperf_gnmt", {"special": {"PAD": 1, "UNK": 0, "BOS": 2, "EOS": 3}}),
    ("legw_lstm", "mlperf_gnmt", {"searches": [{"beam": 2, "diversity": 0.5}]}),
    ("schedules", "mlperf_resnet_jax_poly", {"n": 1000}),
    (
        "schedules",
        "legw_modelled",
        {
            "small": {
                "base_batch": 128,
                "base_lr": 0.1,
                "base_warmup_epochs": 0.5,
                "epochs": 10,
                "n": 60000,
                "momentum": 0.9,
            }
        },
    ),
]


@pytest.mark.parametrize("family, implementation, changes", ASSUMED, ids=str)
def test_a_value_that_the_mapping_does_not_have_is_an_error(
    family: str, implementation: str, changes: dict[str, Any]
) -> None:
    key = family, implementation
    goldens.need(1, [each for each in PER_IMPLEMENTATION if each == key], " ".join(key))
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        _repeat(PER_IMPLEMENTATION[key], **changes)
    assert str(caught.value)


def test_assumed_settings() -> None:
    settings = Settings(a=1, b=True, c=None, d="text", e=7)
    settings.assume("a", 1)
    settings.assume("absent", 1)
    settings.same_numbers("b")
    settings.same_numbers("c")
    settings.legend("d")
    with pytest.raises(NotImplementedError, match="e must be a text"):
        settings.legend("e")
    settings.check_empty("nothing")
    for value in (True, 2, "1", np.float32(2)):
        with pytest.raises(NotImplementedError, match="a is .*: it is not one here"):
            Settings(a=value).assume("a", 1, why="it is not one here")
