r"""APOLLO: a step length per channel or matrix, from Adam in a random low-rank subspace.

For each matrix, Adam's moments are stored only for a random low-rank projection of the gradient.
These moments determine by how much Adam would scale each channel, or the full matrix. The update is
the raw gradient times this scale. At rank r, the state of an (m, n) matrix shrinks from 2 m n to
2 r max(m, n) numbers.

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
from lamb_tpu.optim.leafwise import Leaf, Step
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics

SCALINGS = ("channel", "tensor")


class ApolloState(NamedTuple):
    """State of `apollo`. The moments of a matrix have an axis of size `rank` in place of the short side."""

    count: jax.Array  # type: ignore[assignment]  # int32, (): completed updates
    mu: Any  # first moments: of projected gradients for matrices, of gradients for other leaves
    nu: Any  # second moments: the shapes of `mu`
    norms: Any  # l2 norm of each layer's last U, see `apollo`; 0 at the start
    diagnostics: Diagnostics | None


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

    For each matrix, let :math:`G_t` be the gradient, transposed so that its shape is
    :math:`m \times n` with :math:`m \le n`, and :math:`P` a Gaussian matrix of shape
    :math:`m \times r` and variance :math:`1 / r`, drawn again every `update_gap` updates:

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

    so the norm of :math:`U` grows by at most the factor :math:`\gamma` per update. If the last
    :math:`U` was 0, as before the first update, there is no limit. The authors' code skips the
    limit only at the first update: if the first gradient of a matrix is 0, for example below a
    layer initialised to zeros, the next norm is limited to about :math:`10^{-8}`. As in the
    authors' code, moments are not reset when :math:`P` changes.

    Three groups of leaves are updated by AdamW instead: leaves that are not matrices, matrices with
    a side of at most `rank`, and leaves that the rules exempt from adaptation. AdamW has the form
    of the authors' code: replace :math:`\sqrt\alpha U_t` by :math:`\tilde R_t` with the identity as
    :math:`P`. (In the authors' code the user lists the matrices to project.) `matrix_axes` of the
    rules say which leaves are matrices. Without `matrix_axes`, a leaf is a matrix if it has two
    axes besides its layer axes; Flax's attention kernels have three. Matrices stacked along layer
    axes are projected, scaled and limited separately.

    Projections are not stored: every update draws them again from `seed`, the leaf's index in the
    tree, and the count. Projections do not depend on shardings, but a stack of layers draws other
    numbers than separate layers. Inside `shard_map` a matrix that adapts may be split along any
    axis if `axis_name` gives its `PartitionSpec`: every device draws the full projection and uses
    its shard. The name of a mesh axis is rejected, because a name does not say which side is split.

    >>> tx = apollo(0.01, rank=1, scale=128.0, scaling='tensor')
    >>> params = {'kernel': jnp.ones((4, 8)), 'bias': jnp.ones(8)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> print(state.mu['kernel'].shape, updates['kernel'].shape, updates['bias'][0].round(4))
    (1, 8) (4, 8) -0.01

    Args:
      learning_rate: 0.01 in the authors' training. `lamb_tpu.optim` describes all arguments that
        are not listed here.
      rank: :math:`r`, at least 1; the authors use 256 for models with 1B and 7B parameters, a
        quarter of the width for smaller models, and 1 for APOLLO-Mini.
      scale: :math:`\alpha`; 1 in APOLLO, 128 in APOLLO-Mini.
      scaling: 'channel' for a factor :math:`s_j` for each of the :math:`n` columns, 'tensor' for a
        single factor per matrix. The rows of a square matrix are projected; the rows are the first
        axis unless `matrix_axes` says otherwise. The authors project the second axis of square matrices
        in PyTorch, where weights are the transposes of Flax's kernels.
      update_gap: updates between two draws of a projection, at least 1; 200 in the authors'
        examples.
      b1: :math:`\beta_1`; 0.9 in the authors' code.
      b2: :math:`\beta_2`; 0.999 in the authors' code.
      eps: :math:`\epsilon`, added to the root of second moments without bias correction; 1e-6 in
        the authors' code.
      weight_decay: :math:`\lambda`, applied to the new weights; 0 in the authors' code.
      growth_limit: :math:`\gamma`, at least 1; 1.01 in the authors' code. None for no limit.
      scale_front: whether to multiply by :math:`\sqrt\alpha` before the norms are compared instead
        of afterwards. This only matters if norms are so small that :math:`10^{-8}` is significant.
      seed: the seed of the projections.
      rules: which leaves decay, which matrices are projected (those that adapt), and which axes
        stack layers.
      axis_name: must be a `PartitionSpec` for matrices that adapt.
      collect: because there is no trust ratio, the stored ratios are 1.

    Under `optax.inject_hyperparams`, list `rank` in `static_args`.

    Raises:
      ValueError: from `update`, if a matrix that adapts is split and has no `PartitionSpec`. For
        other errors, see `lamb_tpu.optim`.
    """
    given = checks.checked(apollo, locals())
    checks.check_choices(scaling=(scaling, SCALINGS))
    checks.check_static(rank=rank)  # shapes depend on it
    if growth_limit is not None:
        checks.check_range("growth_limit", growth_limit)
        if not isinstance(growth_limit, jax.core.Tracer) and growth_limit < 1.0:
            raise ValueError(f"growth_limit={growth_limit!r} must be at least 1, or None")

    step = _Step(**given)
    return leafwise.transform(ApolloState, step.init_leaf, step, **leafwise.common(given))


class _Step(leafwise.Arguments):
    def init_leaf(
        self, param: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[Any, ...]:
        zeros, real = leafwise.zeros_like(param), trust_ratio.real_dtype(param)
        norm = trust_ratio.leaf_norm(zeros, metadata, axis_name=split.axis_name)
        side = projected_side(split.shape or zeros.shape, metadata, self.rank)
        if side is not None:
            # Project the zeros too, so they get the sharding of projected gradients.
            shape = projection_shape(zeros.shape, metadata, side, self.rank)
            zeros = project(zeros, jnp.zeros(shape, real), metadata, side, split)
        # Copy: a state that contains an array twice cannot be donated.
        return zeros, jnp.copy(zeros.real), norm

    def __call__(self, leaf: Leaf, mu: jax.Array, nu: jax.Array, norm: jax.Array) -> Step:
        grad, metadata, split = leaf.grad, leaf.metadata, leaf.split
        if split.shape is None and metadata.adapt and metadata.matrix(grad.ndim, by_name=False):
            raise ValueError(
                f"axis_name={leaf.axis_name!r} must be a PartitionSpec for the matrix "
                f"{leaf.path!r}, because apollo must know which axes of the matrix are split"
            )
        side = projected_side(split.shape or grad.shape, metadata, self.rank)
        low = grad if side is None else self.projected(leaf, side)
        # M_t, V_t and their quotient, for the projected gradient or (AdamW) for the full gradient.
        mu, nu = leafwise.moments(leaf, low, mu, nu, self.b1, self.b2)
        direction = mu / (trust_ratio.root(nu) + self.eps)
        if side is not None:
            # The projected quotient only determines the scales s of the raw gradient.
            scaled = grad * self.factor(direction, low, metadata, side, split)
            direction, norm = self.limited(scaled, norm, metadata, split)
        # Apply the bias corrections as a factor of the step, so that eps is added before them.
        change = -(leaf.rate * leafwise.step_correction(leaf, self.b1, self.b2)) * direction
        if metadata.decay:
            # The decay applies to the new weights w', the old weights plus the change.
            decay = leafwise.decay_of(leaf, self.weight_decay)
            change = change - leaf.rate * decay * (leaf.weights + change)
        return change, (mu, nu, norm), None

    def projected(self, leaf: Leaf, side: tuple[int, ...]) -> jax.Array:
        """Returns R_t = P^T G_t; inside shard_map each device multiplies its shards of G and P."""
        split, metadata = leaf.split, leaf.metadata
        full_shape = split.shape or leaf.grad.shape
        if full_shape[side[-1]] == self.rank and split.names(side[-1:]):
            raise ValueError(
                f"rank={self.rank} must differ from the length of the axis along which "
                f"{leaf.path!r} is split"
            )
        # The key only depends on the seed, the leaf and the count. Therefore every device draws the
        # same projection, and it is not stored.
        key = jax.random.fold_in(jax.random.key(self.seed), leaf.index)
        key = jax.random.fold_in(key, leaf.completed // self.update_gap)
        shape = projection_shape(full_shape, metadata, side, self.rank)
        drawn = split.shard(projection(key, shape, leaf.rate.dtype), (*metadata.layer_axes, *side))
        return project(leaf.grad, drawn, metadata, side, split)

    def factor(
        self,
        direction: jax.Array,
        low: jax.Array,
        metadata: ParameterMetadata,
        side: tuple[int, ...],
        split: Split,
    ) -> jax.Array:
        others = tuple(axis for axis in range(low.ndim) if axis not in side)
        # In `low`, only the side that is not projected may be split.
        axes = split.names(tuple(axis for axis in others if axis not in metadata.layer_axes))
        # With one factor per column, the norm only reduces over the projected side, which every
        # device has in full, so no sum over mesh axes is needed.
        if self.scaling == "channel":
            metadata, axes = ParameterMetadata(layer_axes=others), ()
        norm = trust_ratio.leaf_norm(low, metadata, axis_name=axes)
        return trust_ratio.leaf_norm(direction, metadata, axis_name=axes) / (norm + 1e-8)

    def limited(
        self, scaled: jax.Array, previous: jax.Array, metadata: ParameterMetadata, split: Split
    ) -> tuple[jax.Array, jax.Array]:
        root = jnp.sqrt(jnp.asarray(self.scale, trust_ratio.real_dtype(scaled)))
        if self.scale_front:
            scaled = root * scaled
        norm = trust_ratio.leaf_norm(scaled, metadata, axis_name=split.axis_name)
        if self.growth_limit is not None:
            # l_t: 1 while the norm grows by no more than the limit.
            growth = jnp.maximum(norm / (previous + 1e-8), self.growth_limit) / self.growth_limit
            growth = jnp.where(previous > 0.0, growth, 1.0)
            scaled, norm = scaled / growth, norm / growth
        # Store the norm of U_t, after the limit.
        return (scaled if self.scale_front else root * scaled), norm


def projected_side(
    shape: tuple[int, ...], metadata: ParameterMetadata, rank: int
) -> tuple[int, ...] | None:
    """Returns the axes of the short side of a matrix, which is projected; None for an AdamW leaf.

    In the projected gradient, the last of these axes has the size `rank`. If possible, this is an axis
    of another size in the leaf, because `sharding.state_sharding` recognises axes by their size.
    """
    sides = metadata.matrix(len(shape), by_name=False) if metadata.adapt else None
    if sides is None:
        return None
    lengths = [math.prod(shape[axis] for axis in side) for side in sides]
    if min(lengths) <= rank:
        return None
    side = sides[lengths.index(min(lengths))]
    return tuple(sorted(side, key=lambda axis: shape[axis] != rank))


def projection_shape(
    shape: tuple[int, ...], metadata: ParameterMetadata, side: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """Returns the shape of the projections of all stacked matrices: (*layers, *short side, rank)."""
    return (*(shape[axis] for axis in (*metadata.layer_axes, *side)), rank)


def projection(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws Gaussian matrices with elements of variance 1 / rank, which preserve squared norms on average."""
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-1])


def project(
    grad: jax.Array,
    matrix: jax.Array,
    metadata: ParameterMetadata,
    side: tuple[int, ...],
    split: Split,
) -> jax.Array:
    """Projects a gradient along `side`: the last axis of `side` gets the size rank, the others size 1.

    Computes in full float32: the default precision of an accelerator would round both factors to
    bfloat16.
    """
    # Call einsum with axis numbers; `grad.ndim` denotes the new axis of size rank. The layer axes
    # are in both factors and in the result, so each stacked matrix has a separate product.
    axes = list(range(grad.ndim))
    drawn = [*metadata.layer_axes, *side, grad.ndim]
    result = [grad.ndim if a == side[-1] else a for a in axes if a not in side[:-1]]
    low = jnp.einsum(grad, axes, matrix, drawn, result, precision=jax.lax.Precision.HIGHEST)
    low = jnp.expand_dims(low, side[:-1])
    return trust_ratio.over(jax.lax.psum, low, split.names(side))
