"""An optimizer from a config: `{'name': 'lamb', 'weight_decay': 0.01, 'rules': ...}`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import parameters, trust_ratio
from lamb_tpu.optim.lamb import lamb
from lamb_tpu.optim.lars import lars, lars_lamb_paper
from lamb_tpu.optim.parameters import Rules


def make_optimizer(
    config: Mapping[str, Any], learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """The optimizer that `config['name']` names, with the other entries as its arguments.

    >>> tx = make_optimizer({'name': 'lamb', 'b2': 0.98, 'rules': 'no_bias_no_norm'}, 1e-3)

    Args:
      config: 'name', one of `OPTIMIZERS`, and arguments of that function. 'rules' is the name of a
        preset or a list of (regex, {'decay': ..., 'adapt': ..., 'layer_axes': ...}); every
        optimizer takes it, so the same table serves them all. 'clip_global_norm', for every
        optimizer too, is the l2 norm of all gradients together above which they are scaled down
        to it before anything else; the LAMB authors' code has 1.0.
      learning_rate: a number, or a schedule of the count of completed updates.

    Raises:
      ValueError: an unknown name or argument, or a value that the optimizer refuses.
    """
    arguments = dict(config.items())
    name = arguments.pop("name", None)
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"the optimizer's name {name!r} is unknown; known: {known}")
    build = OPTIMIZERS[name]
    known = [key for key in inspect.signature(build).parameters if key != "learning_rate"]
    clip = arguments.pop("clip_global_norm", None)
    for key in arguments:
        if key not in known:
            raise ValueError(
                f"{name} has no argument {key!r}; known: {', '.join([*known, 'clip_global_norm'])}"
            )
    tx = build(learning_rate, **arguments)
    if clip is None:
        return tx
    if not clip > 0:
        raise ValueError(f"clip_global_norm must be above 0, or None for no clipping, not {clip!r}")
    return optax.chain(optax.clip_by_global_norm(clip), tx)


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Plain SGD; the decay is added to the gradient where the rules say so."""
    return _with_l2(optax.sgd(learning_rate), weight_decay, rules)


def momentum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with momentum, the learning rate outside the buffer; decay as in `sgd`."""
    return _with_l2(optax.sgd(learning_rate, momentum), weight_decay, rules)


def nesterov(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum; decay as in `sgd`."""
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
    _check_decay(weight_decay, rules)
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
    inner = optax.adagrad(learning_rate, initial_accumulator_value, eps)
    return _with_l2(inner, weight_decay, rules)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "lamb": lamb,
    "lars": lars,
    "lars_lamb_paper": lars_lamb_paper,
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
    "adagrad": adagrad,
}


def _with_l2(
    inner: optax.GradientTransformation, weight_decay: float, rules: Rules
) -> optax.GradientTransformation:
    _check_decay(weight_decay, rules)
    decay = optax.add_decayed_weights(weight_decay, mask=_decays(rules))
    return _in_float32(optax.chain(decay, inner))


def _check_decay(weight_decay: float, rules: Rules) -> None:
    parameters.check_rules(rules)
    trust_ratio.check_range("weight_decay", weight_decay)


def _decays(rules: Rules) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map(lambda facts: facts.decay, parameters.resolve(params, rules))


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` on float32 copies of narrower leaves, so that its moments are float32."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(x, trust_ratio.compute_dtype(x)), tree)

    def init_fn(params: optax.Params) -> optax.OptState:
        return inner.init(widen(params))

    def update_fn(updates: optax.Updates, state: optax.OptState, params: optax.Params = None):
        trust_ratio.require_params(params)
        updates, state = inner.update(widen(updates), state, widen(params))
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params), state

    return optax.GradientTransformation(init_fn, update_fn)
