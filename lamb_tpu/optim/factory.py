"""An optimizer from a config: `{'name': 'lamb', 'weight_decay': 0.01, 'rules': ...}`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, clipping, leafwise, parameters, presets, rounding, trust_ratio
from lamb_tpu.optim.adagrad_norm import adagrad_norm
from lamb_tpu.optim.apollo import apollo
from lamb_tpu.optim.diffgrad import diffgrad
from lamb_tpu.optim.lamb import lamb
from lamb_tpu.optim.lars import lars
from lamb_tpu.optim.novograd import novograd
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.rmsprop_tf import rmsprop_tf


def make_optimizer(
    config: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    params: optax.Params | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that `config['name']` names, with the other entries as its arguments.

    >>> tx = make_optimizer({'name': 'lamb', 'b2': 0.98, 'rules': 'no_bias_no_norm'}, 1e-3)
    >>> tx = make_optimizer({'name': 'lars', 'preset': 'lamb_paper', 'weight_decay': 0.1}, 1e-3)

    Args:
      config: 'name', one of `OPTIMIZERS`, and arguments of that function. Every optimizer takes:
        'rules': the name of a preset in `parameters.RULES` or a list of
          (regex, {'decay': ..., 'adapt': ..., 'layer_axes': ...}), so that one table serves all.
        'clip_global_norm': the l2 norm of all gradients together above which they are scaled down
          to it before anything else; the LAMB authors' code has 1.0. None for none.
        'axis_name': the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
          `trust_ratio.scale_by_trust_ratio`.
        'stochastic_rounding': a seed, or True for 0, for bfloat16 parameters, see `rounding`.
        'preset': the name of arguments in `presets.PRESETS` to begin with; others override them.
      learning_rate: a number, or a schedule of the count of completed updates.
      params: arrays or `jax.ShapeDtypeStruct`s; with them, rules that do not fit fail here and not
        in `init`.

    Raises:
      ValueError: an unknown name or argument, or a value that the optimizer refuses.
    """
    arguments = dict(config.items())
    name = arguments.pop("name", None)
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"the optimizer's name {name!r} is unknown; known: {known}")
    preset = arguments.pop("preset", None)
    if preset is not None:
        arguments = presets.preset(name, preset) | arguments
    build = OPTIMIZERS[name]
    known = [key for key in inspect.signature(build).parameters if key != "learning_rate"]
    common = {
        key: arguments.get(key) if key in known else arguments.pop(key, None)
        for key in ("clip_global_norm", "axis_name", "stochastic_rounding")
    }
    for key in arguments:
        if key not in known:
            every = ", ".join(dict.fromkeys([*known, *common, "preset"]))
            raise ValueError(f"{name} has no argument {key!r}; known: {every}")
    tx = build(learning_rate, **arguments)
    if params is not None:
        parameters.resolve(params, arguments.get("rules", parameters.DEFAULT_RULES))
    if common["clip_global_norm"] is not None and "clip_global_norm" not in known:
        clip = clipping.clip_global_norm(common["clip_global_norm"], common["axis_name"])
        tx = optax.chain(clip, tx)
    seed = common["stochastic_rounding"]
    if seed is None or seed is False:
        return tx
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(
            f"stochastic_rounding must be True, False or a seed of at least 0, not {seed!r}"
        )
    if params is not None and not any(
        jnp.result_type(leaf) == jnp.bfloat16 for leaf in jax.tree.leaves(params)
    ):
        raise ValueError("stochastic_rounding has no use here: no parameter is bfloat16")
    return rounding.stochastic_rounding(tx, 0 if seed is True else seed, common["axis_name"])


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Plain SGD; the decay is added to the gradient where the rules say so."""
    _check(learning_rate)
    return _with_l2(optax.sgd(learning_rate), weight_decay, rules)


def momentum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with momentum, the learning rate outside the buffer; decay as in `sgd`."""
    _check(learning_rate, below_one={"momentum": momentum})
    return _with_l2(optax.sgd(learning_rate, momentum), weight_decay, rules)


def nesterov(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum; decay as in `sgd`."""
    _check(learning_rate, below_one={"momentum": momentum})
    return _with_l2(optax.sgd(learning_rate, momentum, nesterov=True), weight_decay, rules)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adam; decay as in `sgd`, that is L2 regularisation."""
    _check(learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps)
    return _with_l2(optax.adam(learning_rate, b1, b2, eps), weight_decay, rules)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adam with decay outside the moments, times the learning rate, where the rules say so."""
    _check(learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    return _in_float32(
        optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=_decays(rules))
    )


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adagrad; decay as in `sgd`."""
    _check(learning_rate, initial_accumulator_value=initial_accumulator_value, eps=eps)
    inner = optax.adagrad(learning_rate, initial_accumulator_value, eps)
    return _with_l2(inner, weight_decay, rules)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "lamb": lamb,
    "lars": lars,
    "novograd": novograd,
    "diffgrad": diffgrad,
    "rmsprop_tf": rmsprop_tf,
    "adagrad_norm": adagrad_norm,
    "apollo": apollo,
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
    "adagrad": adagrad,
}


def _check(
    learning_rate: optax.ScalarOrSchedule,
    below_one: Mapping[str, Any] | None = None,
    **at_least_zero: Any,
) -> None:
    """What Optax lets through: a decay rate of 1.5, a negative learning rate."""
    if not callable(learning_rate):
        checks.check_range("learning_rate", learning_rate)
    for name, value in (below_one or {}).items():
        checks.check_range(name, value, upper=1.0)
    for name, value in at_least_zero.items():
        checks.check_range(name, value)


def _with_l2(
    inner: optax.GradientTransformation, weight_decay: float, rules: Rules
) -> optax.GradientTransformation:
    checks.check_range("weight_decay", weight_decay)
    decay = optax.add_decayed_weights(weight_decay, mask=_decays(rules))
    return _in_float32(optax.chain(decay, inner))


def _decays(rules: Rules) -> Callable[[Any], Any]:
    parameters.check_rules(rules)
    return lambda params: jax.tree.map(lambda facts: facts.decay, parameters.resolve(params, rules))


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on float32 copies of narrower leaves, so that its moments are float32."""
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        return inner.init(leafwise.widen(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params = None,
        **extra_args: Any,
    ):
        trust_ratio.require_params(params)
        updates, state = inner.update(
            leafwise.widen(updates), state, leafwise.widen(params), **extra_args
        )
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
