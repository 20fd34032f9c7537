"""Tests that public functions reject arguments of wrong types with an error that has name and value.

The test cases follow from the signatures, so new functions and arguments are included. A function
with required arguments that `NEEDED` lacks fails `test_every_function_has_a_valid_call`.
"""

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import durations, parameters, trust_ratio
from lamb_tpu.optim.factory import OPTIMIZERS
from tests.optim.catalogue import PLAIN

WRONG = {
    "none": None,
    "string": "banana",
    "list": [1.5],
    "true": True,
    "nan": float("nan"),
    "inf": float("inf"),
    "negative": -1,
    "callable": lambda count: 0.1,
    "array": np.array([0.25, 0.5]),
}
PARAMS = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}

# Modules for internal use, and functions of arrays inside an update.
INNER = {
    "checks",
    "leafwise",
    "matrices",
    "modules",
    "reducing",
    "splits",
    "staged",
    "leaves.difference",
    "chains.reject_leaves",
    "chains.under_rules",
    "directions.AdamDirection",
    "directions.Momentum",
    "onebit_adam.OneBit",
    "trust_ratio.LayerRatio",
    "parameters.leaf_paths",
    "parameters.matches",
    "parameters.rows",
    "sharding.owner_of",
    "clipping.check_max_norm",
    "clipping.global_norm",
    "clipping.global_scale",
    "rounding.round_to_bfloat16",
    "apollo.project",
    "apollo.projected_side",
    "apollo.projection",
    "apollo.projection_shape",
    *(
        f"trust_ratio.{name}"
        for name, value in vars(trust_ratio).items()
        if inspect.isfunction(value) and name != "scale_by_trust_ratio"
    ),
}


def public_functions() -> dict[str, Callable]:
    """Returns {'module.name': value} for the public functions and dataclasses that modules define."""
    actual = {}
    for info in pkgutil.iter_modules(optim.__path__):
        module = importlib.import_module(f"{optim.__name__}.{info.name}")
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
            state = inspect.isclass(value) and issubclass(value, tuple)
            if own and (inspect.isfunction(value) or inspect.isclass(value)) and not state:
                actual[f"{info.name}.{name}"] = value
    return {
        name: value
        for name, value in actual.items()
        if name not in INNER and name.split(".")[0] not in INNER
    }


def epochs(batch_size: int, num_examples: int) -> float:
    return durations.parse("30 epochs").steps(batch_size, num_examples)


def whole_percent(total_steps: float) -> int:
    return durations.parse("30 percent").whole_steps(8, None, total_steps)


def one_phase(part: tuple[optax.Schedule, int]) -> optax.Schedule:
    return optim.phases(part)


FUNCTIONS = public_functions() | {
    "durations.Duration.steps": epochs,
    "durations.Duration.whole_steps": whole_percent,
    "schedules.phases": one_phase,
}
# Required arguments of a call, except for the learning rate.
NEEDED = {
    "adamw_timescale": dict(learning_rate=0.1, weight_decay=0.1, batch_size=8, data_size=100),
    "agvm": dict(inner=optax.sgd(0.1), module_rules=[""]),
    "add_l2": dict(inner=optax.sgd(0.1), l2=0.1, rules="all"),
    "adamw_weight_decay": dict(timescale=0.1, learning_rate=0.1, batch_size=8, data_size=100),
    "arguments_of": dict(config={"name": "lamb"}),
    "by_examples": dict(schedule=lambda seen: 0.1, batch_size=8),
    "check_rules": dict(rules="all"),
    "clip_global_norm": dict(max_norm=1.0),
    "Duration": dict(value=3, unit="epochs"),
    "epochs": dict(batch_size=8, num_examples=100),
    "evaluation_params": dict(opt_state=optax.EmptyState(), params=PARAMS),
    "exponential_decay": dict(factor=0.5, every_steps=10.0),
    "in_float32": dict(inner=optax.sgd(0.1)),
    "in_order": dict(values={"ratios/a": 1.0}, paths=["a"]),
    "keeps_evaluation_params": dict(opt_state=optax.EmptyState()),
    "legw": dict(base_learning_rate=0.1, base_warmup_epochs=1.0, base_batch_size=8, batch_size=16),
    "make_optimizer": dict(config={"name": "lamb"}),
    "custom_arguments": dict(name="lamb"),
    "one_phase": dict(part=(lambda count: 0.1, 3)),
    "optimal_timescale": dict(tokens_per_parameter=20.0, coefficient=1.0, exponent=-0.5),
    "parse": dict(text="3 epochs"),
    "preset": dict(optimizer="lamb", name="paper"),
    "random_matrix_rule": dict(optimizer="lamb"),
    "read": dict(opt_state=optax.EmptyState()),
    "refined_schedule": dict(gradient_norms=[2.0, 1.0], peak=0.1),
    "report": dict(optimizer="sgd", opt_state=optax.EmptyState(), params=PARAMS, rules="all"),
    "resolve": dict(params=PARAMS, rules="all"),
    "scalars": dict(opt_state=optax.EmptyState()),
    "second_moments": dict(opt_state=optax.EmptyState()),
    "scale_by_rate_factors": dict(rules="all"),
    "scale_learning_rate": dict(
        rule="sqrt", base_learning_rate=0.1, base_batch_size=8, batch_size=16
    ),
    "state_sharding": dict(tx=optax.sgd(0.1), params=PARAMS, params_sharding=PartitionSpec()),
    "step_decay": dict(boundaries=[1.0], factor=0.5),
    "stochastic_rounding": dict(inner=optax.sgd(0.1)),
    "summary": dict(opt_state=optax.EmptyState(), metadata=parameters.resolve(PARAMS, "all")),
    "table": dict(params=PARAMS, rules="all"),
    "warmup": dict(peak=0.1, total_steps=10),
    "whole_percent": dict(total_steps=10.0),
}
# Values that are valid although they do not match the annotation.
RIGHT = {
    ("agvm", "second_moment"): {"callable"},
    ("clip_global_norm", "max_norm"): {"inf"},  # never clips
    ("optimal_timescale", "exponent"): {"negative"},
    ("custom_arguments", "name"): {"callable"},
    ("report", "optimizer"): {"string"},  # the name of a custom transform
    ("step_decay", "boundaries"): {"list", "array"},
    ("refined_schedule", "gradient_norms"): {"array"},
    ("*", "clip_global_norm"): {"inf"},
    # A tree that is a single leaf, and a tree without leaves.
    ("*", "params"): {"array", "none", "list", "nan", "inf", "negative"},
    ("*", "opt_state"): {"list", "array"},
    ("*", "axis_name"): {"string", "callable", "none"},
}


def right_types(name: str, parameter: inspect.Parameter) -> set[str]:
    """Returns the keys of `WRONG` that are valid for a parameter by its annotation and default."""
    annotation = parameter.annotation
    categories = set(RIGHT.get((name, parameter.name), ())) | set(
        RIGHT.get(("*", parameter.name), ())
    )
    members = (
        typing.get_args(annotation)
        if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
        else ()
    )
    if parameter.default is None or type(None) in members:
        categories.add("none")
    if annotation is bool:
        categories.add("true")
    schedules = (optax.ScalarOrSchedule, optax.Schedule)
    if annotation in schedules or any(member in schedules for member in members):
        categories.add("callable")
    return categories


def call(function: Callable) -> dict:
    given = dict(NEEDED.get(function.__name__, {}))
    if "learning_rate" in inspect.signature(function).parameters:
        given.setdefault("learning_rate", 0.1)
    return given


def wrong_types(function: Callable, parameter: inspect.Parameter) -> list[str]:
    """Returns the keys of `WRONG` that the parameter must reject."""
    right = right_types(function.__name__, parameter)
    return [kind for kind in WRONG if kind not in right]


# One case per argument of a function tries every wrong value: 3,000 calls that raise take 0.3 s,
# while 3,000 tests take 15 s.
CASES = [
    pytest.param(function, parameter, id=f"{name}-{parameter.name}")
    for name, function in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters.values()
    if wrong_types(function, parameter)
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_valid_call(name):
    FUNCTIONS[name](**call(FUNCTIONS[name]))


def assert_rejected(function, name, value, pattern=None):
    with pytest.raises(ValueError) as error:
        function()
    message = str(error.value)
    assert (pattern or name) in message
    assert repr(value).strip("[]") in message


@pytest.mark.parametrize("function, parameter", CASES)
def test_a_wrong_argument_is_named_with_its_value(function, parameter):
    argument, valid = parameter.name, call(function)
    pattern = {"text": "duration", "part": "parts"}.get(argument)
    for kind in wrong_types(function, parameter):
        value = WRONG[kind]
        assert_rejected(lambda: function(**valid | {argument: value}), argument, value, pattern)


@pytest.mark.parametrize(
    "function, arguments, pattern",
    [
        (optim.lamb, {"ratio_bounds": (float("inf"), float("inf"))}, "ratio_bounds=.* must be"),
        (optim.lamb, {"phi_bounds": (0.0, True)}, "phi_bounds=.* must be"),
        (optim.lamb, {"phi_bounds": (0.0, "1")}, "phi_bounds=.* must be"),
        (optim.lars, {"phi_bounds": np.array([0.0, 1.0])}, "phi_bounds=.* must be"),
        (optim.lamb, {"axis_name": ("data", 1)}, "axis_name=.* must be"),
        (
            optim.lamb,
            {"rules": [("bias", {"layer_axes": (True,)}), ("", {})]},
            "layer_axes=.* must be",
        ),
        (optim.lamb, {"mu_dtype": np.zeros(2)}, "mu_dtype=.* must be"),
        (optim.lamb, {"b1": 0.5 + 0j}, "b1=.* must be"),
        (optim.lamb, {"b1": jnp.array([0.5, 0.6])}, "b1=.* must be"),
        (optim.lamb, {"b1": np.bool_(False)}, "b1=.* must be"),
        (optim.apollo, {"rank": 1.0}, "rank=1.0 must be a whole number"),
    ],
)
def test_wrong_values_of_other_types(function, arguments, pattern):
    with pytest.raises(ValueError, match=pattern):
        function(0.1, **arguments)


def test_a_hold_beyond_the_end():
    with pytest.raises(ValueError, match="hold_steps=6 plus warmup_steps=5 must be at most total"):
        optim.warmup(0.1, 10, 5, hold_steps=6)
    optim.warmup(0.1, 10, 5, hold_steps=5)
    optim.warmup(0.1, 10, 10)  # reaches its peak at the end


@pytest.mark.parametrize(
    "good", [0, 0.5, np.float32(0.5), np.int64(0), np.array(0.5), jnp.float32(0.5)]
)
def test_numbers_of_every_type_are_valid(good):
    optim.lamb(good, b1=good, weight_decay=good)


CHAINS = ("scale_by_trust_ratio", "clip_global_norm, lamb")  # optax.chain inspects those states


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_parameters_and_states_that_are_none(name):
    tx = PLAIN[name](0.1)
    state = tx.init(PARAMS)
    for kind, wrong in WRONG.items():
        assert_rejected(lambda w=wrong: tx.update(w, state, PARAMS), "updates", wrong)
        if kind != "array":  # rejected because of its shape, see below
            grads = PARAMS | {"kernel": wrong}
            assert_rejected(lambda g=grads: tx.update(g, state, PARAMS), "updates", wrong)
        if kind in ("string", "true", "callable"):
            for params in (wrong, PARAMS | {"kernel": wrong}):
                assert_rejected(lambda p=params: tx.update(PARAMS, state, p), "params", wrong)
                assert_rejected(lambda p=params: tx.init(p), "params", wrong)
        if name not in CHAINS:
            assert_rejected(lambda w=wrong: tx.update(PARAMS, w, PARAMS), "state", wrong)
    other = optim.lars if name == "lamb" else optim.lamb
    with pytest.raises(ValueError, match="state"):
        tx.update(PARAMS, other(0.1).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="params is None; call update"):
        tx.update(PARAMS, state)
    for updates, pattern in (
        (
            PARAMS | {"bias": jnp.ones(4)},
            r"'bias'. has the shape \(4,\), but must have its parameter's shape",
        ),
        (PARAMS | {"bias": 1j * jnp.ones(3)}, "'bias'. is complex64, but must be real like"),
        ({"kernel": PARAMS["kernel"]}, "must have the structure of params"),
    ):
        with pytest.raises(ValueError, match=pattern):
            tx.update(updates, state, PARAMS)


def test_the_state_of_another_tree():
    tx = optim.lamb(0.1)
    with pytest.raises(ValueError, match="state must come from init with params of the same"):
        tx.update(PARAMS, tx.init({"kernel": PARAMS["kernel"]}), PARAMS)


def test_every_optimizer_and_exported_function_is_covered():
    assert set(OPTIMIZERS.values()) <= set(FUNCTIONS.values())
    given = {getattr(optim, name) for name in optim.__all__ if not name.endswith("State")}
    given = {value for value in given if not inspect.ismodule(value)}
    assert given <= {*FUNCTIONS.values(), optim.phases}
