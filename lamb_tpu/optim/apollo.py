r"""APOLLO: a step length for each channel or matrix, learnt in a random subspace of low rank.

Adam's moments are kept for a random projection of a matrix's gradient only. All that is taken from
them is by how much Adam would lengthen each channel, or the matrix; the raw gradient, so scaled, is
the update. State shrinks from 2 m n to 2 r max(m, n) numbers for an (m, n) matrix.

References:
  Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance, arXiv:2412.05270; the authors'
  package apollo-torch 1.0.3, apollo.py and random_projector.py.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, leafwise, parameters, trust_ratio
from lamb_tpu.optim.leafwise import Leaf, Step, one_minus_power
from lamb_tpu.optim.parameters import ParameterFacts, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Readings

SCALINGS = ("channel", "tensor")


class ApolloState(NamedTuple):
    """State of `apollo`. Projected moments have the matrix's shape, but a short side of `rank`."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments of the projected gradients; of the gradient where AdamW is taken
    nu: Any  # second moments, of the same shapes
    norms: Any  # l2 norms of the last scaled gradients, size 1 on the sides; 0 before the first
    readings: Readings | None


def apollo(
    learning_rate: optax.ScalarOrSchedule,
    rank: int = 256,
    scale: float = 1.0,
    scaling: str = "channel",
    update_gap: int = 200,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    growth_limit: float | None = 1.01,
    scale_front: bool = False,
    seed: int = 0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
    collect: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The APOLLO optimizer; with `presets.PRESETS['apollo']['apollo_mini']`, APOLLO-Mini.

    For each matrix, with the gradient :math:`G_t` turned so that its shape is :math:`m \times n`,
    :math:`m \le n`, and :math:`P` a Gaussian matrix of shape :math:`m \times r` and variance
    :math:`1 / r`, drawn anew every `update_gap` updates:

    .. math::
      R_t &= P^\top G_t, \quad M_t = \beta_1 M_{t-1} + (1 - \beta_1) R_t, \quad
      V_t = \beta_2 V_{t-1} + (1 - \beta_2) R_t^2 \\
      \tilde R_t &= \frac{M_t}{\sqrt{V_t} + \epsilon}, \quad
      s_j = \frac{\|\tilde R_{t,:j}\|}{\|R_{t,:j}\| + 10^{-8}} \quad\text{or}\quad
      s = \frac{\|\tilde R_t\|}{\|R_t\| + 10^{-8}} \\
      U_t &= \frac{s \, G_t}{l_t}, \quad
      l_t = \frac{1}{\gamma} \max\Big(\frac{\|s \, G_t\|}{\|U_{t-1}\| + 10^{-8}}, \gamma\Big) \\
      w' &= w_{t-1} - \eta_{t-1} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \sqrt{\alpha} \, U_t,
      \qquad w_t = w' - \eta_{t-1} \lambda w'

    so that a norm grows by :math:`\gamma - 1` an update at most. There is no limit after a
    :math:`U` of zeros, hence none at the first update; the authors' code skips the first only, and
    a matrix whose first gradient is 0, as below a layer initialised to zeros, then starts from
    :math:`10^{-8}`. Moments are kept when :math:`P` changes, as in the authors' code.

    Every other leaf takes AdamW, as it is in that code: :math:`\tilde R_t` with :math:`P` the
    identity, in place of :math:`\sqrt\alpha U_t`. Those are leaves that are no matrix, have
    a side of at most `rank`, or do not adapt by the rules; the authors' code projects the
    matrices that it is told to. What is a matrix is a fact of the rules, `matrix_axes`: without it
    a kernel of three axes, such as Flax's attention has, is none unless one of them is a layer
    axis. Matrices stacked along layer axes are each projected, scaled and limited on their own.

    Projections are made again at every update from `seed`, the leaf's place in the tree, and the
    count; they are in no state. They are the same whatever the shardings, but stacked layers draw
    others than layers on their own would. Inside `shard_map` a matrix that adapts may be split
    along any of its axes where `axis_name` gives its `PartitionSpec`: every device draws the whole
    projection and takes its part. A mere name does not tell which side is split, and is refused.

    >>> tx = apollo(0.01, rank=1, scale=128.0, scaling='tensor')
    >>> params = {'kernel': jnp.ones((4, 8)), 'bias': jnp.ones(8)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> print(state.mu['kernel'].shape, updates['kernel'].shape, updates['bias'][0].round(4))
    (1, 8) (4, 8) -0.01

    Args:
      learning_rate: a number, or a schedule of the count of completed updates; the authors train
        with 0.01.
      rank: :math:`r`, at least 1; the authors have 256 for models of 1B and 7B parameters, a
        quarter of the width for smaller ones, and 1 for APOLLO-Mini.
      scale: :math:`\alpha`; 1 in APOLLO, 128 in APOLLO-Mini.
      scaling: 'channel' for a factor :math:`s_j` for each of the :math:`n` columns, 'tensor' for
        one. Of a square matrix the rows are projected, that is the first axis unless
        `matrix_axes` says otherwise: in PyTorch, where weights are the transposes of Flax's
        kernels, the authors project the second.
      update_gap: updates for which a projection is kept, at least 1; 200 in the authors' examples.
      b1: :math:`\beta_1`; 0.9 in the authors' code.
      b2: :math:`\beta_2`; 0.999 in the authors' code.
      eps: :math:`\epsilon`, beside the root of moments without bias correction; 1e-6 in the
        authors' code.
      weight_decay: :math:`\lambda`, a number or a schedule of the count of completed updates,
        applied to the new weights; 0 in the authors' code.
      growth_limit: :math:`\gamma`, at least 1; 1.01 in the authors' code. None for no limit.
      scale_front: multiply by :math:`\sqrt\alpha` before the norms are compared. By the formula it
        matters only where they are so small that the 1e-8 counts.
      seed: of the projections.
      rules: which leaves decay, which are projected, which axes stack layers, see
        `parameters.resolve`.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; for matrices that adapt a `PartitionSpec`. None under
        `jit`.
      collect: keep `trust_ratio.Readings` in the state; there is no trust ratio, so ratios are 1.

    Returns:
      A transform whose `update` needs `params`; updates have the parameters' dtypes. Under
      `optax.inject_hyperparams`, `rank` must be among the `static_args`.

    Raises:
      ValueError: for an argument that is out of range, naming it; from `update`, for a matrix that
        adapts and is split over mesh axes that are given without a `PartitionSpec`.
    """
    checks.check_choice("scaling", scaling, SCALINGS)
    checks.check_flag("scale_front", scale_front)
    for name, value, lowest in (
        ("rank", rank, 1),
        ("update_gap", update_gap, 1),
        ("seed", seed, 0),
    ):
        checks.check_whole(name, value, lowest)
    checks.check_static(rank=rank)  # shapes depend on it
    for name, size in (("scale", scale), ("eps", eps)):
        checks.check_range(name, size)
    checks.check_schedule("weight_decay", weight_decay)
    checks.check_range("b1", b1, upper=1.0)
    checks.check_range("b2", b2, upper=1.0)
    if growth_limit is not None:
        checks.check_range("growth_limit", growth_limit)
        if not isinstance(growth_limit, jax.core.Tracer) and growth_limit < 1.0:
            raise ValueError(f"growth_limit must be at least 1, or None, not {growth_limit!r}")

    def init_leaf(param: jax.Array, facts: ParameterFacts, split: Split) -> tuple[Any, ...]:
        zeros, real = leafwise.zeros_like(param), trust_ratio.real_dtype(param)
        norm = trust_ratio.leaf_norm(zeros, facts, axis_name=split.axis_name)
        side = projected_side(split.shape or zeros.shape, facts, rank)
        if side is not None:
            # The zeros go through a projection to be placed as projected gradients will be.
            shape = projection_shape(zeros.shape, facts, side, rank)
            zeros = project(zeros, jnp.zeros(shape, real), facts, side, split)
        # Two arrays: a state in which one stands twice cannot be donated.
        return zeros, jnp.copy(zeros.real), norm

    def step_leaf(leaf: Leaf, mu: jax.Array, nu: jax.Array, norm: jax.Array) -> Step:
        grad, facts, split, real = leaf.grad, leaf.facts, leaf.split, leaf.rate.dtype
        if split.shape is None and facts.adapt and facts.matrix(grad.ndim, by_name=False):
            raise ValueError(
                f"apollo must know along which axis the matrix {leaf.path!r} is split: axis_name "
                f"must give a PartitionSpec for it, not {leaf.axis_name!r}"
            )
        whole = split.shape or grad.shape
        side = projected_side(whole, facts, rank)
        low = grad
        if side is not None:
            # The key depends on nothing but the seed, the leaf and the count, so every device draws
            # the same projection, and it need not be stored.
            key = jax.random.fold_in(jax.random.key(seed), leaf.index)
            key = jax.random.fold_in(key, leaf.completed // update_gap)
            if whole[side[-1]] == rank and split.names(side[-1:]):
                raise ValueError(
                    f"apollo cannot place the moments of {leaf.path!r}, which is split along an "
                    f"axis as long as its rank {rank}: give another rank"
                )
            # R_t = P^T G_t. Inside shard_map a device multiplies its part of G by its part of P.
            drawn = projection(key, projection_shape(whole, facts, side, rank), real)
            low = project(grad, split.part(drawn, (*facts.layer_axes, *side)), facts, side, split)
        # M_t, V_t and their quotient, of the projected gradient; of the gradient itself where the
        # leaf takes AdamW.
        mu = b1 * mu + (1 - b1) * low
        nu = b2 * nu + trust_ratio.real_product((1 - b2) * low, low)
        direction = mu / (trust_ratio.root(nu) + eps)
        if side is not None:
            # Of the projected quotient only the lengths s are kept; they scale the raw gradient.
            scaled = grad * factor(direction, low, facts, side, split)
            direction, norm = limited(scaled, norm, facts, split)
        count = leaf.count
        # The bias corrections are a factor of the step and not in the quotient, so eps is added
        # before them.
        step_size = leaf.rate * (
            jnp.sqrt(one_minus_power(b2, count, real)) / one_minus_power(b1, count, real)
        )
        change = -step_size * direction
        if facts.decay:
            # The decay applies to the new weights w', which are the old ones plus the change.
            decay = leafwise.decay_at(weight_decay, facts, leaf.completed, real)
            change = change - leaf.rate * decay * (leaf.weights + change)
        return change, (mu, nu, norm), None

    def factor(
        direction: jax.Array,
        low: jax.Array,
        facts: ParameterFacts,
        side: tuple[int, ...],
        split: Split,
    ) -> jax.Array:
        others = tuple(axis for axis in range(low.ndim) if axis not in side)
        # What is projected is whole on every device; the other side may be split.
        axes = split.names(tuple(axis for axis in others if axis not in facts.layer_axes))
        # A factor for each column: the norm reduces over the projected side only, which every
        # device holds whole, so no mesh axis is summed over.
        if scaling == "channel":
            facts, axes = ParameterFacts(layer_axes=others), ()
        norm = trust_ratio.leaf_norm(low, facts, axis_name=axes)
        return trust_ratio.leaf_norm(direction, facts, axis_name=axes) / (norm + 1e-8)

    def limited(
        scaled: jax.Array, previous: jax.Array, facts: ParameterFacts, split: Split
    ) -> tuple[jax.Array, jax.Array]:
        root = jnp.sqrt(jnp.asarray(scale, trust_ratio.real_dtype(scaled)))
        if scale_front:
            scaled = root * scaled
        norm = trust_ratio.leaf_norm(scaled, facts, axis_name=split.axis_name)
        if growth_limit is not None:
            # l_t: 1 while the norm grows by no more than the limit.
            growth = jnp.maximum(norm / (previous + 1e-8), growth_limit) / growth_limit
            growth = jnp.where(previous > 0.0, growth, 1.0)
            scaled, norm = scaled / growth, norm / growth
        # The norm that is kept is that of U_t, after the limit.
        return (scaled if scale_front else root * scaled), norm

    return leafwise.transform(
        ApolloState,
        init_leaf,
        step_leaf,
        learning_rate,
        rules,
        axis_name=axis_name,
        collect=collect,
    )


def projected_side(
    shape: tuple[int, ...], facts: ParameterFacts, rank: int
) -> tuple[int, ...] | None:
    """The axes of a matrix's short side, which is projected; None for a leaf that takes AdamW.

    The last one is to hold the rank. `sharding.state_sharding` knows an axis by its size, so it is
    one of another size than the rank where there is any.
    """
    sides = facts.matrix(len(shape), by_name=False) if facts.adapt else None
    if sides is None:
        return None
    lengths = [math.prod(shape[axis] for axis in side) for side in sides]
    if min(lengths) <= rank:
        return None
    side = sides[lengths.index(min(lengths))]
    return tuple(sorted(side, key=lambda axis: shape[axis] != rank))


def projection_shape(
    shape: tuple[int, ...], facts: ParameterFacts, side: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """(*layers, *short side, rank): a projection for each stacked matrix."""
    return (*(shape[axis] for axis in (*facts.layer_axes, *side)), rank)


def projection(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Gaussian of variance 1 / rank, so that projecting keeps squared norms on average."""
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-1])


def project(
    grad: jax.Array, matrix: jax.Array, facts: ParameterFacts, side: tuple[int, ...], split: Split
) -> jax.Array:
    """The gradient with the side's last axis replaced by the rank and its others of size 1.

    Full float32: an accelerator's default product would round both factors to bfloat16.
    """
    # einsum by axis numbers: `grad.ndim` stands for the new axis of size rank. Layer axes are in
    # both factors and in the result, so each stacked matrix has its own product.
    axes = list(range(grad.ndim))
    drawn = [*facts.layer_axes, *side, grad.ndim]
    kept = [grad.ndim if a == side[-1] else a for a in axes if a not in side[:-1]]
    low = jnp.einsum(grad, axes, matrix, drawn, kept, precision=jax.lax.Precision.HIGHEST)
    low = jnp.expand_dims(low, side[:-1])
    return trust_ratio.over(jax.lax.psum, low, split.names(side))
