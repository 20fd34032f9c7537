"""`FAMILIES`: for each family of golden trajectories, the function that recomputes its entries.

`repeat(entry, recorded, inputs)` returns our values under the recorded keys. It reads all settings
from the entry, so that the same function also works for new entries of the family.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from tests.batching import golden_adadagrad, golden_noise_scale, golden_simigrad
from tests.models import golden_gnmt, golden_lstm, golden_lstm_classifier
from tests.optim import golden, golden_agvm, golden_baselines, golden_onebit, golden_schedules
from tests.optim.golden_common import Settings
from tests.parallel import golden_cpd, golden_dgc, golden_econtrol, golden_lgreco, golden_powersgd

Entry = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]
Repeat = Callable[[Entry, Arrays, Arrays], dict[str, np.ndarray]]

UPDATES = 20


def trajectory(
    tx: optax.GradientTransformation, inputs: Arrays, dtype: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns every parameter before the first and after each update, as trained and as evaluated.

    Args:
      tx: the optimizer.
      inputs: arrays `param/<name>` and `wgrad/<name>`; only the first worker's gradients are used.
      dtype: 'float32' or 'float64'.

    Returns:
      Two dictionaries from names to arrays (updates + 1, *shape). They differ if the network is
      evaluated with other parameters than the trained ones, such as averages.
    """
    with jax.enable_x64(dtype == "float64"):
        params = initial(inputs, dtype)
        grads = {name: jnp.asarray(inputs["wgrad/" + name][0], dtype) for name in params}
        state = tx.init(params)

        @jax.jit
        def update(step, state, params):
            updates, state = tx.update({k: g[step] for k, g in grads.items()}, state, params)
            params = optax.apply_updates(params, updates)
            return state, params, optim.evaluation_params(state, params)

        trained, evaluated = [params], [params]
        for step in range(UPDATES):
            state, params, average = update(step, state, params)
            trained.append(params)
            evaluated.append(average)
    return _stacked(trained), _stacked(evaluated)


def initial(inputs: Arrays, dtype: str = "float32") -> dict[str, jax.Array]:
    return {
        key.removeprefix("param/"): jnp.asarray(value, dtype)
        for key, value in inputs.items()
        if key.startswith("param/")
    }


def _stacked(trees: list[dict[str, jax.Array]]) -> dict[str, np.ndarray]:
    return {name: np.stack([tree[name] for tree in trees]) for name in trees[0]}


def _of(
    transform: Callable[[dict[str, Any], Any], optax.GradientTransformation | None],
    reason: Callable[[Entry], str],
) -> Repeat:
    """Returns the function that recomputes the entries of a family of optimizers.

    Args:
      transform: function from an entry and the parameters to the optimizer; None for an entry that is
        not repeated.
      reason: function from an entry to the reason why it is not repeated.
    """

    def repeat(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
        actual = {}
        for dtype, prefixes in {"float32": ("p32/", "eval32/"), "float64": ("p64/",)}.items():
            if not any(key.startswith(prefixes) for key in recorded):
                continue
            with jax.enable_x64(dtype == "float64"):
                tx = transform(dict(entry), initial(inputs, dtype))
            if tx is None:
                raise NotImplementedError(reason(entry))
            trained, evaluated = trajectory(tx, inputs, dtype)
            values = {f"p{dtype[-2:]}/{name}": value for name, value in trained.items()}
            values |= {f"eval32/{name}": value for name, value in evaluated.items()}
            for key in recorded:
                if key.startswith(prefixes):
                    rows = recorded["f64_steps"] if dtype == "float64" else slice(None)
                    actual[key] = values[key][rows]
        return actual

    return repeat


def _schedules(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Repeats an entry that records learning rates, in float64, which most of the sources use."""
    with jax.enable_x64(True):
        return {
            curve.name: np.asarray(jax.jit(jax.vmap(curve.schedule))(jnp.asarray(curve.steps)))
            for curve in golden_schedules.curves_for(dict(entry), recorded)
        }


# Functions that repeat the entries of the family legw_lstm, by implementation.
_LSTM: dict[str, Repeat] = {
    **golden_gnmt.REPEATS,
    **golden_lstm.REPEATS,
    "torch_lstm_classifier": golden_lstm_classifier.repeat,
}


# The settings that each implementation reads, or that follow from the recorded arrays.
_LSTM_SETTINGS: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("rows", "classes", "smoothing", "padding_index", "reduction"),
    "mlperf_gnmt": (
        "vocabulary",
        "hidden",
        "layers",
        "lengths",
        "smoothing",
        "max_seq_len",
        "searches",
        "special",
        "arrays",
    ),
    "ptb_batching": ("batch_size", "num_steps", "tokens", "arrays"),
    "torch_lstm_lm": (
        "batch",
        "num_steps",
        "hidden",
        "layers",
        "windows_per_epoch",
        "epochs",
        "clip",
        "lr",
        "lr_decay",
        "max_epoch",
        "loss",
        "arrays",
        "vocabulary",
    ),
}


# Nested settings of GNMT.
_SEARCH = {"beam", "len_norm_factor", "len_norm_const", "cov_penalty_factor"}
_SPECIAL = {"PAD": 0, "UNK": 1, "BOS": 2, "EOS": 3}


def _check_shapes(name: str, hyper: Mapping[str, Any], recorded: Arrays) -> None:
    """Raises ValueError if settings contradict the shapes of the arrays."""
    shown: list[tuple[Any, Any]] = []
    for key, known in {"reduction": ("sum", "mean"), "loss": ("sum_over_time", "mean")}.items():
        if hyper.get(key, known[0]) not in known:
            raise NotImplementedError(f"{key}={hyper[key]!r} is not supported; use one of {known}")
    if name == "label_smoothing":
        shown = [(recorded["logits"].shape, (hyper["rows"], hyper["classes"]))]
    elif name == "ptb_batching":
        shown = [(recorded["ids"].shape, (hyper["tokens"],))]
    elif name == "torch_lstm_lm":
        window = recorded["x"].shape
        shown = [
            (window, (hyper["windows_per_epoch"], hyper["batch"], hyper["num_steps"])),
            (len(recorded["lr"]), hyper["windows_per_epoch"] * hyper["epochs"]),
        ]
    elif name == "mlperf_gnmt":
        shown = [(hyper["special"], _SPECIAL)]
        for search in hyper["searches"]:
            unread = {key: value for key, value in search.items() if key not in _SEARCH}
            Settings(unread).check_empty("a search")
    for actual, expected in shown:
        if actual != expected:
            raise ValueError(f"{name}: the settings give {expected}, but the arrays give {actual}")


def _legw_lstm(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Repeats an entry of a recurrent network with the function for the entry's implementation."""
    name = entry["implementation"]
    if name not in _LSTM:
        raise ValueError(f"implementation={name!r} is unknown; use one of {', '.join(_LSTM)}")
    if name in _LSTM_SETTINGS:
        known = _LSTM_SETTINGS[name]
        unread = {key: value for key, value in entry["hyper"].items() if key not in known}
        Settings(unread).check_empty(name)
        _check_shapes(name, entry["hyper"], recorded)
    return _LSTM[name](entry, recorded, inputs)


FAMILIES: dict[str, Repeat] = {
    **dict.fromkeys(
        golden.FAMILIES,
        _of(golden.transform_for, lambda entry: golden.BUGS[entry["implementation"]]),
    ),
    **dict.fromkeys(
        golden_baselines.FAMILIES, _of(golden_baselines.transform, golden_baselines.why_not)
    ),
    "legw_lstm": _legw_lstm,
    "schedules": _schedules,
    "agvm": golden_agvm.repeat,
    "adadagrad": golden_adadagrad.repeat,
    "noise_scale": golden_noise_scale.repeat,
    "simigrad": golden_simigrad.repeat,
    "aps": golden_cpd.repeat_aps,
    "cpd_quant": golden_cpd.repeat_quant,
    "onebit": golden_onebit.repeat,
    "dgc": golden_dgc.repeat,
    "econtrol": golden_econtrol.repeat,
    "powersgd": golden_powersgd.repeat,
    "lgreco": golden_lgreco.repeat,
}
