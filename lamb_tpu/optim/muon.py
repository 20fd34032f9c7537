"""Muon, built from Optax's transforms: the steps are orthogonalised momentum."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from optax.contrib._muon import scale_by_shape  # optax.contrib does not export it

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.chains import add_decayed_weights, reject_leaves, under_rules
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.trust_ratio import AxisName


def muon(
    learning_rate: optax.ScalarOrSchedule,
    beta: float = 0.95,
    ns_steps: int = 5,
    eps: float = 1e-8,
    nesterov: bool = True,
    consistent_rms: float | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon on matrix parameters, Adam on the rest; decoupled decay scaled by the learning rate.

    A matrix is a leaf that adapts by the rules and has `matrix_axes`. If the rules do not give
    `matrix_axes`, the leaf's name decides, see `matrices`. By name, matrices are kernels of hidden
    layers, kernels of convolutions as (spatial axes x inputs, outputs), and attention kernels with
    an axis of heads. Embedding tables, positions and the output layer are not matrices.
    An output layer that cannot be recognised by its name, such as 'Dense_3' or 'layers/2', needs a
    rule with `matrix_axes=()`. For a different rate of the leaves that Adam updates, set `rate_factor`
    in their rules. Matrices stacked along layer axes are orthogonalised separately; kernels with
    more axes are flattened to rows and columns.

    The rows of a matrix are its inputs, as in Flax. Each step has the factor
    sqrt(max(1, outputs / inputs)). Optax corrects the bias of the momentum; the authors' code does
    not. Inside `shard_map` and on an Explicit mesh, matrices must not be split; under `jit` on an
    Auto mesh any sharding works.

    Args:
      learning_rate: 0.02 in the authors' code. `lamb_tpu.optim` describes all arguments that are
        not listed here.
      beta: the decay of the momentum, in [0, 1).
      ns_steps: Newton-Schulz iterations, at least 1.
      eps: added to the norm of a matrix and, in Adam, to the root of the second moment.
      nesterov: whether to use Nesterov momentum, for matrices and, as in Optax, in Adam.
      consistent_rms: if given, the factor of a step is `consistent_rms` times sqrt(max(inputs,
        outputs)), so that all steps have the same root mean square. With 0.2 this is about the root
        mean square of Adam's steps. None for the factor above.
      rules: which leaves decay, which matrices are orthogonalised (those that adapt), and which
        axes stack layers.
      axis_name: must be None for matrices that adapt.

    Raises:
      ValueError: from `update`, if a matrix is split. For other errors, see `lamb_tpu.optim`.

    References:
      Jordan et al., Muon, github.com/KellerJordan/Muon; Liu et al., Muon is Scalable for LLM
      Training, arXiv:2502.16982, for `consistent_rms`.
    """
    checks.checked(muon, locals())
    if consistent_rms is not None:
        checks.check_range("consistent_rms", consistent_rms)
    parameters.check_rules(rules)

    # Optax calls the next two functions with parameters or updates. Inside `optax.partition` the
    # tree has only the matrices.
    def of_matrices(tree: parameters.PyTree) -> parameters.PyTree:
        metadata = parameters.resolve(tree, rules)
        return jax.tree.map(lambda x, meta: MuonDimensionNumbers(*_sides(x, meta)), tree, metadata)

    def labels(tree: parameters.PyTree) -> parameters.PyTree:
        metadata = parameters.resolve(tree, rules)
        return jax.tree.map(lambda x, meta: "muon" if _sides(x, meta) else "adam", tree, metadata)

    # `optax.contrib.muon` has no rate factors and decay factors, so build it from its transforms.
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
    adam = optax.scale_by_adam(eps=eps, nesterov=nesterov)
    inner = under_rules(
        optax.chain(
            optax.partition({"muon": orthogonal, "adam": adam}, labels),
            # These follow the partition, because they are the same for matrices and other leaves.
            add_decayed_weights(weight_decay, rules),
            optax.scale_by_learning_rate(learning_rate),
        ),
        rules,
    )

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        _check_unsplit(params, rules, axis_name)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _check_unsplit(params: optax.Params, rules: Rules, axis_name: AxisName) -> None:
    def problem(path: str, leaf: Any, metadata: ParameterMetadata) -> str | None:
        sides = _sides(leaf, metadata)
        if sides and trust_ratio.axes_of(axis_name, path):
            return f"muon needs full matrices; axis_name must be None for {path!r}"
        if any(jax.typeof(leaf).sharding.spec[axis] for side in sides for axis in side):
            return f"muon needs full matrices on an Explicit mesh; replicate {path!r}"
        return None

    reject_leaves(params, rules, problem)


def _sides(leaf: Any, metadata: ParameterMetadata) -> parameters.MatrixAxes | tuple[()]:
    """Returns (axes of the rows, axes of the columns) of a matrix that adapts; () for other leaves."""
    return metadata.matrix(leaf.ndim) or () if metadata.adapt and leaf.size else ()
