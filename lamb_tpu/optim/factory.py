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
    modules,
    parameters,
    presets,
    readings,
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

# Arguments of every optimizer in a config.
# They are `inspect.Parameter`s, as in a function's signature, so that a command line can read the
# types and defaults of both kinds alike.
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
# Arguments of `agvm` in a config, beside those that other names take the place of.
_AGVM = ("interval", "start", "stop", "momentum", "bounds", "eps", "eps_root")


def make_optimizer(
    config: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    params: optax.Params | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that `config['name']` names, with the other entries as its arguments.

    >>> tx = make_optimizer({'name': 'lamb', 'b2': 0.98, 'rules': 'no_bias_no_norm'}, 1e-3)
    >>> tx = make_optimizer({'name': 'lars', 'preset': 'lamb_paper', 'weight_decay': 0.1}, 1e-3)

    Args:
      config: 'name', one of `OPTIMIZERS` or a function like them, such as those of Optax, and
        arguments of that function. Every optimizer takes:
        'rules': a name in `parameters.RULES` or a list of
          (regex, {'decay': ..., 'adapt': ..., 'layer_axes': ...}), so that one table serves all.
        'clip_global_norm': the l2 norm of all gradients together above which they are scaled down
          to it before anything else; the LAMB authors' code has 1.0. None for none.
        'axis_name': the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
          `trust_ratio.scale_by_trust_ratio`.
        'l2': the factor of an L2 term of the loss, beside the optimizer's own decay and before all
          else, see `l2.add_l2`; 'l2_rules' say by `decay` which leaves are in it, without them
          'rules'.
        'agvm': {'modules': pairs (name, regex over paths), 'anchor': the name of one of them, by
          default the first, 'second_moment': True to divide by the optimizer's second moments, and
          other arguments of `agvm.agvm`}. The update takes `halves`, of gradients without the L2
          term and before clipping.
        'stochastic_rounding': a seed, or True for 0, for bfloat16 parameters, see `rounding`.
        'preset': the name of arguments in `presets.PRESETS` to begin with; others override them.
          None or '' for none.
      learning_rate: a number, or a schedule of the count of completed updates.
      params: arrays or `jax.ShapeDtypeStruct`s; with them, rules that do not fit fail here and not
        in `init`.

    Raises:
      ValueError: an unknown name or argument, or a value that the optimizer refuses.
    """
    arguments = _entries(config)
    name = arguments.pop("name", None)
    every = own_arguments(name)
    preset = arguments.pop("preset", None)
    if preset not in (None, ""):
        # Given arguments override those of the preset.
        arguments = presets.preset(name, preset) | arguments
    build = name if callable(name) else OPTIMIZERS[name]
    known = {key: value for key, value in _parameters(build).items() if key != "learning_rate"}
    # An optimizer with an argument of this name gets it; for the others it is taken out here, and a
    # transform around the optimizer does the work.
    common = {
        key: arguments.get(key) if key in known else arguments.pop(key, None) for key in _COMMON
    }
    for key in arguments:
        if key not in known:
            raise ValueError(f"{_title(name)} has no argument {key!r}; known: {', '.join(every)}")
    tx = build(learning_rate=learning_rate, **arguments)
    if isinstance(tx, Reducing):
        for key in ("clip_global_norm", "l2", "agvm", "stochastic_rounding"):
            if key not in known and common[key] not in (None, False):
                raise ValueError(
                    f"{key} is a transform around the optimizer, and {_title(name)} sums over "
                    "devices by itself, which needs the outermost place; leave it out"
                )
    if callable(name):
        checks.check_transform(f"what {_title(name)} returns", tx)
        # A function of a user's own may return a transform without extra arguments, which the
        # wrappers below pass on.
        tx = optax.with_extra_args_support(tx)
    if params is not None:
        parameters.resolve(params, arguments.get("rules", parameters.DEFAULT_RULES))
    if common["clip_global_norm"] is not None and "clip_global_norm" not in known:
        clip = clipping.clip_global_norm(common["clip_global_norm"], common["axis_name"])
        # The order of the wrappers: the L2 term is part of the loss, so it is added before
        # gradients are clipped; rounding needs the very last update, so it is outermost.
        tx = optax.chain(clip, tx)
    rules = common["l2_rules"]
    if common["l2"] is not None:
        rules = arguments.get("rules", parameters.DEFAULT_RULES) if rules is None else rules
        tx = add_l2(tx, common["l2"], rules)
        if params is not None:
            parameters.resolve(params, rules)
    elif rules is not None:
        raise ValueError("l2_rules say which leaves are in the term l2, which is missing")
    if common["agvm"] is not None:
        b2 = arguments.get("b2", known["b2"].default) if "b2" in known else None
        tx = _under_agvm(tx, common["agvm"], b2, common["axis_name"], params)
    seed = common["stochastic_rounding"]
    # False is the number 0 to Python and here means no rounding, whereas 0 is a seed.
    if seed is None or seed is False:
        return tx
    if (type(seed) is not int and seed is not True) or seed < 0:
        raise ValueError(
            f"stochastic_rounding must be True, False or a seed of at least 0, not {seed!r}"
        )
    if params is not None and not any(
        jnp.result_type(leaf) == jnp.bfloat16 for leaf in jax.tree.leaves(params)
    ):
        raise ValueError("stochastic_rounding has no use here: no parameter is bfloat16")
    return rounding.stochastic_rounding(tx, 0 if seed is True else seed, common["axis_name"])


def _under_agvm(
    tx: optax.GradientTransformation,
    fields: Any,
    b2: float | None,
    axis_name: AxisName,
    params: Any,
) -> optax.GradientTransformationExtraArgs:
    """Returns `agvm` around an optimizer, by the entry 'agvm' of a config."""
    if not hasattr(fields, "items"):
        raise ValueError(f"agvm must be a mapping with the key 'modules', not {fields!r}")
    given = dict(fields.items())
    known = ("modules", "anchor", "second_moment", *_AGVM)
    for key in given:
        if key not in known:
            raise ValueError(f"agvm.{key} is unknown; agvm has: {', '.join(known)}")
    pairs = given.pop("modules", ())
    modules.check_pairs("agvm.modules", pairs)
    names, patterns = [name for name, _ in pairs], [pattern for _, pattern in pairs]
    if len(names) < 2:
        raise ValueError(
            f"agvm.modules is {pairs!r}; agvm compares modules, of which there must be at least two"
        )
    modules.check("agvm.modules", patterns)
    anchor = given.pop("anchor", names[0])
    if anchor not in names:
        raise ValueError(f"agvm.anchor is {anchor!r}; the modules are: {', '.join(names)}")
    preconditions = given.pop("second_moment", False)
    checks.check_flag("agvm.second_moment", preconditions)
    if preconditions:
        if b2 is None:
            raise ValueError(
                "agvm.second_moment is True, and the optimizer has no argument b2, the decay of "
                "second moments; it must be False"
            )
        given |= {"second_moment": readings.second_moments, "b2": b2}
    try:
        tx = agvm(tx, patterns, anchor=names.index(anchor), axis_name=axis_name, **given)
        if params is not None:
            jax.eval_shape(tx.init, params)  # every leaf belongs to a module
    except ValueError as error:
        raise ValueError(f"agvm: {error}") from error
    return tx


def own_arguments(name: Any) -> dict[str, inspect.Parameter]:
    """Returns the arguments of an optimizer, a name or a function, with types and defaults.

    First those of its function, without the learning rate, then those that all optimizers take.

    >>> own_arguments("sgd")["weight_decay"].default
    0.0
    >>> [key for key in own_arguments("sgd") if key not in ("weight_decay", "rules")]
    ['clip_global_norm', 'axis_name', 'l2', 'l2_rules', 'agvm', 'stochastic_rounding', 'preset']

    Raises:
      ValueError: an unknown name, or a function without the argument `learning_rate`.
    """
    if not callable(name) and (not isinstance(name, str) or name not in OPTIMIZERS):
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"the optimizer's name {name!r} is unknown; known: {known}")
    own = _parameters(name if callable(name) else OPTIMIZERS[name])
    if "learning_rate" not in own:
        raise ValueError(f"{_title(name)} has no argument 'learning_rate'; it must take one")
    del own["learning_rate"]
    return own | {key: value for key, value in _COMMON.items() if key not in own}


def _entries(config: Any) -> dict[str, Any]:
    """Returns the entries of an optimizer's config."""
    if not hasattr(config, "items"):
        raise ValueError(f"config must be a mapping with the key 'name', not {config!r}")
    return dict(config.items())


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of `make_optimizer`'s config; those left out have their defaults.

    >>> arguments_of({"name": "lars", "preset": "optax", "momentum": 0.8})["denominator"]
    'decayed'
    >>> arguments_of({"name": "momentum"})["momentum"]
    0.9

    Raises:
      ValueError: as `own_arguments`, or for an unknown preset.
    """
    given = _entries(config)
    name = given.pop("name", None)
    found = {key: parameter.default for key, parameter in own_arguments(name).items()}
    if (preset := given.pop("preset", None)) not in (None, ""):
        found |= presets.preset(name, preset)
    return found | given


def _parameters(build: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The function's named parameters, their annotations as types where these can be resolved."""
    try:
        # Annotations of a user's own function may name what is imported for type checkers only.
        signature = inspect.signature(build, eval_str=True)
    except (AttributeError, NameError, SyntaxError, TypeError):
        signature = inspect.signature(build)
    return {
        key: parameter
        for key, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _title(name: Any) -> str:
    """The name of an optimizer, or of a function in its module."""
    if not callable(name):
        return str(name)
    return f"{name.__module__}:{getattr(name, '__qualname__', type(name).__name__)}"


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "lamb": lamb,
    "lars": lars,
    "novograd": novograd,
    "diffgrad": diffgrad,
    "rmsprop_tf": rmsprop_tf,
    "adagrad_norm": adagrad_norm,
    "apollo": apollo,
    "sgd": baselines.sgd,
    "momentum": baselines.momentum,
    "nesterov": baselines.nesterov,
    "adam": baselines.adam,
    "adamw": baselines.adamw,
    "adagrad": baselines.adagrad,
    "lion": baselines.lion,
    "adafactor": baselines.adafactor,
    "muon": muon,
    "schedule_free_adamw": schedule_free_adamw,
    "onebit_adam": onebit_adam,
    "onebit_lamb": onebit_lamb,
    "zero_one_adam": zero_one_adam,
}
