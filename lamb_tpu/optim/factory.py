"""Builds an optimizer from a config: `{'name': 'lamb', 'weight_decay': 0.01, 'rules': ...}`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import (
    baselines,
    checks,
    clipping,
    diagnostics,
    modules,
    parameters,
    presets,
    rounding,
)
from lamb_tpu.optim.adagrad_norm import adagrad_norm
from lamb_tpu.optim.agvm import agvm
from lamb_tpu.optim.apollo import apollo
from lamb_tpu.optim.diffgrad import diffgrad
from lamb_tpu.optim.l2 import add_l2
from lamb_tpu.optim.lamb import lamb
from lamb_tpu.optim.lars import lars
from lamb_tpu.optim.muon import muon
from lamb_tpu.optim.novograd import novograd
from lamb_tpu.optim.onebit_adam import onebit_adam
from lamb_tpu.optim.onebit_lamb import onebit_lamb
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.optim.rmsprop_tf import rmsprop_tf
from lamb_tpu.optim.schedule_free import schedule_free_adamw
from lamb_tpu.optim.trust_ratio import AxisName
from lamb_tpu.optim.zero_one_adam import zero_one_adam

# Arguments that every optimizer has in a config. They are `inspect.Parameter`s, so code can treat
# them like the arguments in the signature of an optimizer.
_COMMON = {
    key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    for key, kind in (
        ("clip_global_norm", float | None),
        ("axis_name", AxisName),
        ("l2", float | None),
        ("l2_rules", Rules | None),
        ("agvm", Mapping[str, Any] | None),
        ("stochastic_rounding", bool | int | None),
        ("preset", str | None),
    )
}
# Arguments of `agvm` that have the same name in a config.
_AGVM = ("interval", "start", "stop", "momentum", "bounds", "eps", "eps_root")


def make_optimizer(
    config: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    params: optax.Params | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds the optimizer `config['name']` with the other entries as its arguments.

    >>> tx = make_optimizer({'name': 'lamb', 'b2': 0.98, 'rules': 'no_bias_no_norm'}, 1e-3)
    >>> tx = make_optimizer({'name': 'lars', 'preset': 'lamb_paper', 'weight_decay': 0.1}, 1e-3)

    Args:
      config: a mapping. Its entry 'name' is a name in `OPTIMIZERS`, or a function that takes
        `learning_rate` and returns a transform, such as Optax's. The other entries are arguments of
        this optimizer, or one of these:

        - 'rules': a name in `parameters.RULES`, or a list of
          (regex, {'decay': ..., 'adapt': ..., 'layer_axes': ...}).
        - 'clip_global_norm' and 'axis_name', see `lamb_tpu.optim`.
        - 'l2': the factor of an L2 term in the loss, see `l2.add_l2`. The gradient of the term is
          added before clipping, and in addition to the optimizer's decay. The term covers the
          leaves that decay by 'l2_rules' or, without 'l2_rules', by 'rules'.
        - 'agvm': a mapping. 'modules' has pairs (name, regex over paths). 'anchor' is the name of a
          module, by default the first. 'second_moment' is True to divide gradients by the root of the
          optimizer's second moments. The other keys are arguments of `agvm.agvm`. `update` then
          takes `halves`, gradients without the L2 term and before clipping.
        - 'stochastic_rounding': the seed of stochastic rounding for bfloat16 parameters, see
          `rounding`. True for the seed 0; None or False for no stochastic rounding.
        - 'preset': the name of a preset in `presets.PRESETS`; other entries override the preset's
          arguments. None or '' for no preset.

      learning_rate: a number, or a schedule, a function of the number of completed updates.
      params: arrays or `jax.ShapeDtypeStruct`s. If given, the rules are checked against `params` here,
        not only in `init`.

    Raises:
      ValueError: the name, an argument or a rule is unknown or invalid, an argument has no effect,
        or two arguments are incompatible.
    """
    arguments = _entries(config)
    name = arguments.pop("name", None)
    every = custom_arguments(name)
    preset = arguments.pop("preset", None)
    if preset not in (None, ""):
        arguments = presets.preset(name, preset) | arguments
    build = name if callable(name) else OPTIMIZERS[name]
    known = {key: value for key, value in _parameters(build).items() if key != "learning_rate"}
    # Common arguments that the optimizer's function takes stay in `arguments`. The others are removed,
    # and further transforms implement them below.
    common = {
        key: arguments.get(key) if key in known else arguments.pop(key, None) for key in _COMMON
    }
    for key in arguments:
        if key not in known:
            raise ValueError(
                f"{_title(name)} has no argument {key!r}; use one of {', '.join(every)}"
            )
    tx = _built(name, build(learning_rate=learning_rate, **arguments), known, common)
    if params is not None:
        parameters.resolve(params, arguments.get("rules", parameters.DEFAULT_RULES))
    if common["clip_global_norm"] is not None and "clip_global_norm" not in known:
        clip = clipping.clip_global_norm(common["clip_global_norm"], common["axis_name"])
        # The L2 term is part of the loss, so it is added before clipping. Rounding needs the final
        # update, so it is the outermost wrapper.
        tx = optax.chain(clip, tx)
    rules = common["l2_rules"]
    if common["l2"] is not None:
        rules = arguments.get("rules", parameters.DEFAULT_RULES) if rules is None else rules
        tx = add_l2(tx, common["l2"], rules)
        if params is not None:
            parameters.resolve(params, rules)
    elif rules is not None:
        raise ValueError(f"l2_rules={rules!r} has no effect without l2; set l2 or omit l2_rules")
    if common["agvm"] is not None:
        b2 = arguments.get("b2", known["b2"].default) if "b2" in known else None
        tx = _under_agvm(tx, common["agvm"], b2, common["axis_name"], params)
    return _rounded(tx, common["stochastic_rounding"], common["axis_name"], params)


def _built(
    name: Any, tx: Any, known: Mapping[str, Any], common: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Checks that `tx` is a transform that the requested wrappers can contain, and returns it."""
    if isinstance(tx, Reducing):
        for key in ("clip_global_norm", "l2", "agvm", "stochastic_rounding"):
            if key not in known and common[key] not in (None, False):
                raise ValueError(
                    f"{key}={common[key]!r} would wrap {_title(name)}, which sums over devices "
                    "itself and must be the outermost transform; leave out this argument"
                )
    if callable(name):
        checks.check_transform(f"{_title(name)}()", tx)
        # The wrappers pass extra arguments, which the `update` of a custom transform might reject.
        tx = optax.with_extra_args_support(tx)
    return tx


def _rounded(
    tx: optax.GradientTransformationExtraArgs, seed: Any, axis_name: AxisName, params: optax.Params
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer in `stochastic_rounding` unless `seed` is None or False."""
    # 0 is a seed, although False == 0 in Python.
    if seed is None or seed is False:
        return tx
    if (type(seed) is not int and seed is not True) or seed < 0:
        raise ValueError(
            f"stochastic_rounding={seed!r} must be True, False or a seed of at least 0"
        )
    if params is not None and not any(
        jnp.result_type(leaf) == jnp.bfloat16 for leaf in jax.tree.leaves(params)
    ):
        raise ValueError(
            f"stochastic_rounding={seed!r} has no effect, because no parameter is bfloat16; "
            "leave it out"
        )
    return rounding.stochastic_rounding(tx, 0 if seed is True else seed, axis_name)


def _under_agvm(
    tx: optax.GradientTransformation,
    fields: Any,
    b2: float | None,
    axis_name: AxisName,
    params: optax.Params,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer in `agvm`, configured by the entry 'agvm' of a config."""
    if not hasattr(fields, "items"):
        raise ValueError(f"agvm={fields!r} must be a mapping with the key 'modules'")
    given = dict(fields.items())
    known = ("modules", "anchor", "second_moment", *_AGVM)
    for key in given:
        if key not in known:
            raise ValueError(f"agvm.{key} is unknown; use one of {', '.join(known)}")
    pairs = given.pop("modules", ())
    modules.check_pairs("agvm.modules", pairs)
    names, patterns = [name for name, _ in pairs], [pattern for _, pattern in pairs]
    if len(names) < 2:
        raise ValueError(
            f"agvm.modules={pairs!r} must have at least two modules, because agvm compares modules"
        )
    modules.check("agvm.modules", patterns)
    anchor = given.pop("anchor", names[0])
    if anchor not in names:
        raise ValueError(f"agvm.anchor={anchor!r} must be one of {', '.join(names)}")
    preconditions = given.pop("second_moment", False)
    checks.check_flag("agvm.second_moment", preconditions)
    if preconditions:
        if b2 is None:
            raise ValueError(
                "agvm.second_moment=True needs an optimizer with the argument b2, the decay of "
                "second moments; use False"
            )
        given |= {"second_moment": diagnostics.second_moments, "b2": b2}
    try:
        tx = agvm(tx, patterns, anchor=names.index(anchor), axis_name=axis_name, **given)
        if params is not None:
            jax.eval_shape(tx.init, params)  # raises if a leaf belongs to no module
    except ValueError as error:
        raise ValueError(f"agvm: {error}") from error
    return tx


def custom_arguments(name: Any) -> dict[str, inspect.Parameter]:
    """Returns the arguments of an optimizer, given by name or as a function.

    Arguments in the function's signature, except the learning rate, precede the common arguments.

    >>> custom_arguments("sgd")["weight_decay"].default
    0.0
    >>> [key for key in custom_arguments("sgd") if key not in ("weight_decay", "rules")]
    ['clip_global_norm', 'axis_name', 'l2', 'l2_rules', 'agvm', 'stochastic_rounding', 'preset']
    """
    if not callable(name) and (not isinstance(name, str) or name not in OPTIMIZERS):
        raise ValueError(f"name={name!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    specific = _parameters(name if callable(name) else OPTIMIZERS[name])
    if "learning_rate" not in specific:
        raise ValueError(f"{_title(name)} has no argument 'learning_rate'; add it to the function")
    del specific["learning_rate"]
    return specific | {key: value for key, value in _COMMON.items() if key not in specific}


def _entries(config: Any) -> dict[str, Any]:
    if not hasattr(config, "items"):
        raise ValueError(f"config={config!r} must be a mapping with the key 'name'")
    return dict(config.items())


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments that follow from a config of `make_optimizer`, including defaults.

    >>> arguments_of({"name": "lars", "preset": "optax", "momentum": 0.8})["denominator"]
    'decayed'
    >>> arguments_of({"name": "momentum"})["momentum"]
    0.9
    """
    given = _entries(config)
    name = given.pop("name", None)
    defaults = {key: parameter.default for key, parameter in custom_arguments(name).items()}
    if (preset := given.pop("preset", None)) not in (None, ""):
        defaults |= presets.preset(name, preset)
    return defaults | given


def _parameters(build: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a function, with annotations evaluated if possible."""
    try:
        # Annotations of a custom function may use names that only type checkers import.
        signature = inspect.signature(build, eval_str=True)
    except (AttributeError, NameError, SyntaxError, TypeError):
        signature = inspect.signature(build)
    return {
        key: parameter
        for key, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _title(name: Any) -> str:
    """Returns the name of an optimizer for messages; 'module:function' for a function."""
    if not callable(name):
        return str(name)
    return f"{name.__module__}:{getattr(name, '__qualname__', type(name).__name__)}"


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    made.__name__: made
    for made in (
        *(lamb, lars, novograd, diffgrad, rmsprop_tf, adagrad_norm, apollo),
        *(baselines.sgd, baselines.momentum, baselines.nesterov, baselines.adam, baselines.adamw),
        *(baselines.adagrad, baselines.lion, baselines.adafactor, muon, schedule_free_adamw),
        *(onebit_adam, onebit_lamb, zero_one_adam),
    )
}
