"""Muon, Optax's own: momentum of a matrix with its singular values brought near 1."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from optax.contrib._muon import scale_by_shape  # not among what optax.contrib gives

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.chains import add_decayed_weights, check_numbers, refuse_leaves, under_rules
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.trust_ratio import AxisName


def muon(
    learning_rate: optax.ScalarOrSchedule,
    beta: float = 0.95,
    ns_steps: int = 5,
    eps: float = 1e-8,
    nesterov: bool = True,
    consistent_rms: float | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon on matrix parameters, Adam on the rest; decoupled decay scaled by the learning rate.

    A matrix is a leaf that adapts by the rules and whose `matrix_axes` they give. Where they do
    not, names decide as Muon's authors do, see `matrices`: kernels of hidden layers, convolutions
    as (spatial axes x inputs) x outputs, and attention kernels with axes of heads are matrices;
    tables, positions and the output layer are not. An output layer that has no name to be known by,
    such as 'Dense_3' or 'layers/2', needs a rule with `matrix_axes=()`, and a `rate_factor` gives
    the leaves of Adam another rate. Matrices that are stacked along layer axes are orthogonalised
    one by one, and a kernel of more axes as the matrix that its rows and columns make.

    A matrix's rows are its inputs, as in Flax, which matters for the factor
    sqrt(max(1, outputs / inputs)) of a step. Optax corrects the momentum for its start at 0; the
    authors' code does not. Inside `shard_map` and on an Explicit mesh matrices must be whole;
    under `jit` on an Auto mesh they may be split in any way.

    Args:
      learning_rate: a number, or a schedule of the count of completed updates; 0.02 in the
        authors' code.
      beta: of the momentum, in [0, 1).
      ns_steps: Newton-Schulz iterations, at least 1.
      eps: added to a matrix's norm, and to Adam's root.
      nesterov: Nesterov's momentum, in Adam too, as in Optax.
      consistent_rms: in place of the factor above, this times sqrt(max(inputs, outputs)), so that
        steps have the same root mean square; 0.2 makes it about Adam's. None for the factor.
      adam_b1: of Adam's first moments.
      adam_b2: of Adam's second moments.
      weight_decay: a number, or a schedule of the count of completed updates.
      rules: which leaves decay, which are orthogonalised, which axes stack layers.
      axis_name: see `trust_ratio.scale_by_trust_ratio`; None for matrices that adapt.

    Raises:
      ValueError: for an argument that is out of range; from `update`, for a matrix that is split.
    References:
      Jordan et al., Muon, github.com/KellerJordan/Muon; Liu et al., Muon is Scalable for LLM
      Training, arXiv:2502.16982, for `consistent_rms`.
    """
    check_numbers(
        learning_rate, weight_decay, {"beta": beta, "adam_b1": adam_b1, "adam_b2": adam_b2}, eps=eps
    )
    checks.check_whole("ns_steps", ns_steps, lowest=1)
    checks.check_axis_name(axis_name)
    checks.check_flag("nesterov", nesterov)
    if consistent_rms is not None:
        checks.check_range("consistent_rms", consistent_rms)
    parameters.check_rules(rules)

    # Functions of a tree: Optax calls them with parameters or with updates, and inside
    # `optax.partition` that tree holds the matrices only.
    def of_matrices(tree: Any) -> Any:
        facts = parameters.resolve(tree, rules)
        return jax.tree.map(lambda x, fact: MuonDimensionNumbers(*_sides(x, fact)), tree, facts)

    def labels(tree: Any) -> Any:
        facts = parameters.resolve(tree, rules)
        return jax.tree.map(lambda x, fact: "muon" if _sides(x, fact) else "adam", tree, facts)

    # `optax.contrib.muon` knows no factors of rate and decay, so its links are put together here.
    orthogonal = optax.chain(
        scale_by_muon(
            ns_steps=ns_steps,
            beta=beta,
            eps=eps,
            nesterov=nesterov,
            weight_dimension_numbers=of_matrices,
        ),
        scale_by_shape(of_matrices, consistent_rms),
    )
    adam = optax.scale_by_adam(adam_b1, adam_b2, eps, nesterov=nesterov)
    inner = under_rules(
        optax.chain(
            optax.partition({"muon": orthogonal, "adam": adam}, labels),
            # Behind the partition: decay and rate are the same for both kinds.
            add_decayed_weights(weight_decay, rules),
            optax.scale_by_learning_rate(learning_rate),
        ),
        rules,
    )

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        refuse_leaves(
            params,
            rules,
            lambda path, leaf, facts: bool(
                _sides(leaf, facts) and trust_ratio.axes_of(axis_name, path)
            ),
            "muon needs whole matrices: axis_name must be None for {path!r}",
        )
        refuse_leaves(
            params,
            rules,
            lambda path, leaf, facts: any(
                jax.typeof(leaf).sharding.spec[axis]
                for side in _sides(leaf, facts)
                for axis in side
            ),
            "muon needs whole matrices on an Explicit mesh: {path!r} is split",
        )
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _sides(leaf: Any, facts: ParameterFacts) -> parameters.MatrixAxes | tuple[()]:
    """The rows and the columns of a matrix that adapts; nothing for any other leaf."""
    return facts.matrix(leaf.ndim) or () if facts.adapt and leaf.size else ()
