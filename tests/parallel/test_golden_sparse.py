"""Compares DGC and error feedback with recorded runs, update by update."""

import math

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.optim import goldens
from tests.parallel import golden_dgc

# Keys of a record that are inputs of the run, for each family.
GIVEN = {"dgc": (), "econtrol": ("A", "b", "x0", "noise")}
ENTRIES = [entry for entry in goldens.entries() if entry["family"] in GIVEN]
SHORT = [
    entry
    for entry in ENTRIES
    if entry["setting"] in ("sampled_noresample_w1", "topk3_w4", "eta01_noise_layerwise_w4")
]


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_entry(entry) -> None:
    recorded = goldens.record(entry)
    actual = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    assert actual.keys() == recorded.keys() - set(GIVEN[entry["family"]])
    # One run (eta03) differs by 3e-6 from the same run in float64, because of the order of additions.
    rounding = max(1e-6, entry.get("max_abs_diff_f32_vs_f64", 0))
    for key, values in actual.items():
        expected = recorded[key]
        assert values.shape == expected.shape, key
        if expected.dtype.kind in "iu":  # which values were sent
            np.testing.assert_array_equal(values, expected, err_msg=key)
        elif key in ("p64", "x", "loss", "grad_norm_squared"):
            np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-13, err_msg=key)
        else:
            # The error accumulates the rounding errors of all gradients.
            atol = {"error32": 20, "estimate32": 2}.get(key, 1) * rounding
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=atol, err_msg=key)


@pytest.mark.parametrize(
    "entry", {entry["implementation"]: entry for entry in ENTRIES}.values(), ids=goldens.label
)
def test_unknown_settings_are_errors(entry) -> None:
    hyper = dict(entry["hyper"], iterations=1, warp_factor=9)
    if entry["family"] == "dgc":
        hyper.pop("iterations")
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES[entry["family"]](dict(entry, hyper=hyper), goldens.record(entry), goldens.inputs())


# Settings of a run of DGC that is computed here, not recorded.
HYPER = {
    "world": 2,
    "compress_ratio": 1 / 16,
    "clip": None,
    "seed": None,
    "epochs": None,
    "momentum": 0.9,
    "nesterov": False,
    "momentum_masking": True,
    "sample_ratio": 1.0,
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False},
    "compressed": ["kernel"],
    "gradients": "",
    "sent_bits": "",
}
SHAPES = {"kernel": (8, 8), "bias": (8,)}
EPOCHS = [0, 0, 1, 1, 2, 2, 3, 3]


def _by_hand(ratios: list[float], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what a run of two workers would record, by the authors' rule in float64."""
    p = {name: np.float64(inputs["param/" + name]) for name in SHAPES}
    momentum = {name: np.zeros((2, *shape)) for name, shape in SHAPES.items()}
    left, points, sent = np.zeros((2, 64)), {name: [p[name]] for name in p}, []
    for step, ratio in enumerate(ratios):
        g = {name: np.float64(inputs["wgrad/" + name][:, step]) for name in SHAPES}
        momentum["kernel"] = 0.9 * momentum["kernel"] + g["kernel"]
        left += momentum["kernel"].reshape(2, 64)
        total, bits = np.zeros(64), np.zeros(64, int)
        for worker in range(2):
            largest = np.argsort(-np.abs(left[worker]))[: math.ceil(64 * ratio)]
            total[largest] += left[worker, largest]
            bits[largest] += 1 << worker
            left[worker, largest] = 0
            momentum["kernel"].reshape(2, 64)[worker, largest] = 0
        momentum["bias"] = 0.9 * momentum["bias"] + g["bias"].mean(0)
        p["kernel"] = p["kernel"] - 0.1 * total.reshape(8, 8) / 2
        p["bias"] = p["bias"] - 0.1 * momentum["bias"][0]
        sent.append(bits)
        for name, values in p.items():
            points[name].append(values)
    return {
        "lr": np.full(len(ratios), 0.1),
        "compress_ratio": np.array(ratios),
        "sample_start_log": np.zeros(0, int),
        "sent_bits/kernel": np.array(sent),
        **{"p32/" + name: np.stack(values) for name, values in points.items()},
        "velocity_w1/kernel": left[1].reshape(8, 8),
        "momentum_w1/kernel": momentum["kernel"][1],
    }


# Two of the cases are long tests, because each ratio needs a program, which takes seconds to compile.
@pytest.mark.parametrize(
    "coeff, ratios",
    [
        pytest.param(None, [0.5, 0.25, 0.125, 0.0625], marks=pytest.mark.long),  # 1/16 ** (1/4)
        (0.3, [0.3, 0.09, 0.0625, 0.0625]),
        pytest.param([0.25, 0.5, 0.1], [0.25, 0.5, 0.1, 0.0625], marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("epochs", [EPOCHS, 4], ids=["listed", "counted"])
def test_warm_up_of_dgc(coeff, ratios, epochs) -> None:
    rng = np.random.default_rng(0)
    inputs = {}
    for name, shape in SHAPES.items():
        inputs["param/" + name] = rng.normal(size=shape).astype(np.float32)
        inputs["wgrad/" + name] = rng.normal(size=(2, 8, *shape)).astype(np.float32)
    hyper = dict(HYPER, warmup_epochs=3, warmup_coeff=coeff, epochs=epochs)
    entry = {"implementation": "synxlin_dgc", "hyper": hyper, "tree": list(SHAPES)}
    expected = _by_hand([ratios[epoch] for epoch in EPOCHS], inputs)
    actual = golden_dgc.repeat(entry, expected, inputs)
    assert actual.keys() == expected.keys()
    for key, values in actual.items():
        np.testing.assert_allclose(values, expected[key], rtol=0, atol=2e-6, err_msg=key)


@pytest.mark.parametrize(
    "settings",
    [
        {"fp16_values": True},
        {"strided_sample": False},
        {"compress_upper_bound": 2.0},
        {"compress_lower_bound": 0.5},
        {"max_adaptation_iters": 3},
        {"clip": "value 0.1"},
    ],
    ids=str,
)
def test_a_setting_that_no_option_has_is_not_repeated(settings) -> None:
    entry = {"implementation": "synxlin_dgc", "hyper": HYPER | settings, "tree": list(SHAPES)}
    with pytest.raises(NotImplementedError, match="the exchange"):
        golden_dgc.repeat(entry, {}, {})
