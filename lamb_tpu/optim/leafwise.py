"""Builds the optimizers of this package from functions of one leaf.

An optimizer consists of two functions of one leaf. One returns the leaf's initial buffers, and the
other returns the leaf's step in float32. This module clips by the global norm, assigns metadata and the
learning rate to each leaf, widens narrow dtypes and narrows the update again, counts updates and
can collect norms. If an optimizer has stages, see `staged`, its step is a function of all leaves.

Complex leaves work as in Optax: second moments and norms use |g|^2 and are real, and everything
linear is complex. The gradient of a complex leaf must be the direction of steepest ascent;
`jax.grad` of a real loss returns the conjugate of this direction.
"""

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.optim import checks, clipping, parameters, splits, staged, trust_ratio
from lamb_tpu.optim.parameters import ParameterMetadata, PyTree, Rules
from lamb_tpu.optim.reducing import Apply
from lamb_tpu.optim.splits import Split
from lamb_tpu.optim.staged import Stage, Staged, Stages
from lamb_tpu.optim.trust_ratio import AxisName, Diagnostics, MeshAxes


class Leaf(NamedTuple):
    """The input of the step for one leaf, in float32 (float64 for float64 leaves).

    If the leaf is complex, its gradient and weights are complex. All other arrays are always real.
    """

    grad: jax.Array
    weights: jax.Array
    metadata: ParameterMetadata
    rate: jax.Array  # (): the learning rate of this update, times the leaf's rate factor
    completed: jax.Array  # int32, (): the number of updates before this update
    index: int  # type: ignore[assignment]  # the leaf's index in jax.tree.leaves(params)
    count: jax.Array  # type: ignore[assignment]  # int32, (): `completed` plus this update
    path: str  # the leaf's keys in the tree, joined by '/'
    split: Split  # the leaf's full shape, and the mesh axes that split each of its axes

    @property
    def axis_name(self) -> MeshAxes:
        """The mesh axes over which the leaf is split, for norms and means."""
        return self.split.axis_name


# (leaf, its metadata, its split over bound mesh axes) -> buffers
InitLeaf = Callable[[jax.Array, ParameterMetadata, Split], tuple[Any, ...]]
# (update, buffers, the trust ratio or None)
Step = tuple[jax.Array, tuple[Any, ...], jax.Array | None]
StepLeaf = Callable[..., Step]  # (leaf, *buffers) -> step


class Message(NamedTuple):
    """The message that this device sends in place of its gradient."""

    values: list[jax.Array]  # one array per leaf
    apply: Callable[[list[jax.Array]], list[Step]]  # (means of the arrays over devices) -> steps


# (stage, leaves, buffers of each leaf) -> the step of each leaf, or, if the stage `reduces`, the
# message. In a local stage, gradients are this device's share times the number of devices.
StepLeaves = Callable[[Stage, list[Leaf], list[tuple[Any, ...]]], list[Step] | Message]


class Arguments(types.SimpleNamespace):
    """An optimizer's arguments as attributes, for the functions of one leaf."""


def transform(
    state_type: type[NamedTuple],
    init_leaf: InitLeaf,
    step: StepLeaf | StepLeaves,
    learning_rate: optax.ScalarOrSchedule,
    rules: Rules,
    *,
    stages: Stages | None = None,
    clip_global_norm: float | None = None,
    axis_name: AxisName = None,
    collect: bool = False,
    cautious: bool = False,
) -> Any:
    """Returns a transform that loops over the leaves; `update` ignores unknown extra arguments.

    With `stages`, the signature is `update(grads, state, params, *, stage, num_devices=1)`.
    `update` assumes one device, so nothing is compressed in a stage that sends a message. With
    several devices, call `message` and then the function that `message` returns. In a local stage
    `grads` are this device's share of the gradient. With `stage=None` the count selects among
    the stages whose gradients are summed before the update. Without the argument `stage` the count
    selects among all stages.

    Args:
      state_type: a NamedTuple with the field `count`, one field per buffer in the order of
        `init_leaf`, and optionally `diagnostics` as the last field.
      init_leaf: returns the buffers of a leaf before the first update, see `InitLeaf`.
      step: returns the update of a leaf, its new buffers with unchanged shapes and dtypes, and its
        trust ratio, see `StepLeaf`. With `stages` it returns a list of these, one for each leaf, or
        a `Message`, see `StepLeaves`.
      stages: None for an optimizer without stages.
      clip_global_norm: in a local stage, limits the norm of this device's gradient, as in
        DeepSpeed. `lamb_tpu.optim` describes all arguments that are not listed here.
      cautious: whether the step compares signs; if so, complex leaves are rejected.

    Returns:
      An `optax.GradientTransformationExtraArgs`; with `stages` a `staged.Staged`.

    Raises:
      ValueError: the learning rate is negative, a rule is invalid, or clip_global_norm is not above
        0; from `init`, a leaf is complex although `cautious` is True; from `message`, the stage
        sends no message.
    """
    walk = _Walk(**checks.checked(transform, locals()))
    parameters.check_rules(rules)
    if clip_global_norm is not None:
        clipping.check_max_norm(clip_global_norm)
    if stages is None:
        return optax.GradientTransformationExtraArgs(walk.init, walk.update)
    return Staged(walk.init, walk.update, walk.message, stages)


class _Walk(Arguments):
    """Implementation of `transform`; attributes are its arguments."""

    def init(self, params: optax.Params) -> Any:
        rows = []
        for path, param, meta in parameters.rows(params, self.rules):
            if self.cautious and jnp.iscomplexobj(param):
                raise ValueError(
                    f"cautious=True compares signs, but the parameter {path!r} is "
                    f"{jnp.result_type(param)}, and complex numbers have no sign; use cautious=False"
                )
            axes = trust_ratio.axes_of(self.axis_name, path)
            # `sharding.state_sharding` calls `init` outside shard_map, where mesh axes are not
            # bound.
            split = splits.unsplit(jnp.shape(param))
            if axes and trust_ratio.is_bound(axes):
                split = splits.split_of(self.axis_name, path, jnp.shape(param), meta)
            rows.append(self.init_leaf(param, meta, split))
        diagnostics = None
        if self.collect:
            diagnostics = trust_ratio.initial_diagnostics(params, self.rules)
        buffers = trust_ratio.columns(jax.tree.structure(params), rows, self._num_buffers)
        return self._state(jnp.zeros((), jnp.int32), buffers, diagnostics)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params = None,
        *,
        stage: Any = staged.BY_COUNT,
        num_devices: int = 1,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        grads, old = self._checked(updates, state, params)
        # A schedule takes the number of completed updates, which is 0 in the first update.
        step_size = value_at(self.learning_rate, state.count)

        def run(stage: Stage | None) -> tuple[list[tuple], list[tuple]]:
            shares = num_devices if stage is not None and stage.local else None
            leaves = self._leaves(grads, params, step_size, state.count, shares)
            return self._narrowed(params, self._steps(stage, leaves, old))

        result = run(None) if self.stages is None else self.stages.choose(stage, state.count, run)
        return self._made(params, state, *result)

    def message(
        self,
        grads: optax.Updates,
        state: Any,
        params: optax.Params,
        *,
        stage: Any,
        num_devices: int = 1,
    ) -> tuple[Any, Apply]:
        """Returns this device's message, and a function for the update's second phase, see `Reducing`."""
        if not isinstance(stage, Stage) or not stage.reduces:
            raise ValueError(f"stage={stage!r} must be a stage that sends a message")
        grad_leaves, old = self._checked(grads, state, params)
        step_size = value_at(self.learning_rate, state.count)
        shares = num_devices if stage.local else None
        leaves = list(self._leaves(grad_leaves, params, step_size, state.count, shares))
        message, treedef = self.step(stage, leaves, old), jax.tree.structure(params)

        def apply(sums: PyTree) -> tuple[optax.Updates, Any]:
            steps = message.apply(treedef.flatten_up_to(sums))
            result = self._narrowed(params, zip(leaves, steps, strict=True))
            return self._made(params, state, *result)

        return treedef.unflatten([value / num_devices for value in message.values]), apply

    def _checked(
        self, updates: optax.Updates, state: Any, params: optax.Params
    ) -> tuple[list[jax.Array], list[tuple]]:
        """Returns the gradient and the buffers of each leaf."""
        grads = checks.gradient_leaves(updates, params)
        checks.check_state(state, self.state_type)
        treedef = jax.tree.structure(params)
        try:
            # `jax.tree.leaves` would drop the None of a leaf without this buffer.
            buffers = [treedef.flatten_up_to(x) for x in state[1 : 1 + self._num_buffers]]
        except ValueError as error:
            raise ValueError(
                f"state must come from init with params of the same structure: {error}"
            ) from None
        return grads, list(zip(*buffers, strict=True)) if buffers else [()] * len(grads)

    def _narrowed(
        self, params: optax.Params, steps: Iterable[tuple[Leaf, Step]]
    ) -> tuple[list[tuple], list[tuple]]:
        """Returns (update, *new buffers) of each leaf, and the diagnostics of each leaf."""
        weights, rows, read = jax.tree.leaves(params), [], []
        for leaf, (step, new, ratio) in steps:
            # Cast the update to the parameter's dtype; the buffers already have their dtypes.
            rows.append((step.astype(jnp.result_type(weights[leaf.index])), *new))
            if self.collect:
                metadata, axes = leaf.metadata, leaf.axis_name
                read.append(trust_ratio.leaf_diagnostics(ratio, step, leaf.weights, metadata, axes))
        return rows, read

    def _made(
        self, params: optax.Params, state: Any, rows: list[tuple], read: list[tuple]
    ) -> tuple[optax.Updates, Any]:
        """Returns the updates and the new state from the results of `_narrowed`."""
        treedef = jax.tree.structure(params)
        steps, *new_buffers = trust_ratio.columns(treedef, rows, 1 + self._num_buffers)
        diagnostics = trust_ratio.diagnostics_of(treedef, read) if self.collect else None
        # The count stays at the largest int32 instead of wrapping around.
        return steps, self._state(optax.safe_increment(state.count), new_buffers, diagnostics)

    def _leaves(
        self,
        grads: list[jax.Array],
        params: optax.Params,
        step_size: Any,
        completed: jax.Array,
        shares: int | None,
    ) -> Iterator[Leaf]:
        """Yields the input of each leaf's step.

        If `grads` are the share of one device, `shares` is the number of devices, else None.
        """
        if shares is not None:
            grads = [
                shares * g.astype(trust_ratio.compute_dtype(w))
                for g, w in zip(grads, jax.tree.leaves(params), strict=True)
            ]
        # The global norm needs all gradients, so compute it before the loop over the leaves.
        scale = None
        if self.clip_global_norm is not None:
            tree = jax.tree.unflatten(jax.tree.structure(params), grads)
            scale = clipping.global_scale(tree, self.clip_global_norm, self.axis_name)
        # Bias corrections use the new count as t.
        count = optax.safe_increment(completed)
        for index, (path, param, metadata) in enumerate(parameters.rows(params, self.rules)):
            dtype, real = trust_ratio.compute_dtype(param), trust_ratio.real_dtype(param)
            grad = grads[index].astype(dtype)
            if scale is not None:
                grad = grad * scale.astype(real)
            rate = jnp.asarray(step_size, real)
            if metadata.rate_factor != 1.0:
                rate = rate * metadata.rate_factor
            yield Leaf(
                grad=grad,
                weights=jnp.asarray(param, dtype),
                metadata=metadata,
                rate=rate,
                completed=completed,
                index=index,
                count=count,
                path=path,
                split=splits.split_of(self.axis_name, path, jnp.shape(param), metadata),
            )

    def _steps(
        self, stage: Stage | None, leaves: Iterator[Leaf], old: list[tuple]
    ) -> Iterator[tuple[Leaf, Step]]:
        """Yields the leaves with their steps; `old` has the buffers of each leaf."""
        if stage is None:
            # Compute one leaf at a time, so that outside jit only one leaf has float32 copies in
            # memory.
            for leaf, buffers in zip(leaves, old, strict=True):
                yield leaf, self.step(leaf, *buffers)
        elif stage == staged.FIRST:
            for leaf, buffers in zip(leaves, old, strict=True):
                yield leaf, (jnp.zeros_like(leaf.weights), buffers, None)
        else:
            every = list(leaves)
            steps = self.step(stage, every, old)
            if isinstance(steps, Message):  # this device is the only one
                steps = steps.apply(steps.values)
            yield from zip(every, steps, strict=True)

    @property
    def _reads(self) -> bool:
        """True if the state has the field `diagnostics`, which the states of `directions` lack."""
        return self.state_type._fields[-1] == "diagnostics"

    @property
    def _num_buffers(self) -> int:
        """The number of buffers per leaf: all fields but the count and the diagnostics."""
        return len(self.state_type._fields) - 1 - self._reads

    def _state(self, count: jax.Array, buffers: list[Any], diagnostics: Diagnostics | None) -> Any:
        return self.state_type._make((count, *buffers, *((diagnostics,) if self._reads else ())))


def common(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the subset of an optimizer's arguments that `transform` takes."""
    keys = ("learning_rate", "rules", "clip_global_norm", "axis_name", "collect", "cautious")
    return {key: given[key] for key in keys if key in given}


def value_at(value: optax.ScalarOrSchedule, completed: jax.Array) -> Any:
    """Returns the value of a hyper-parameter (a number or a schedule) for an update."""
    return value(completed) if callable(value) else value


def decay_of(leaf: Leaf, weight_decay: optax.ScalarOrSchedule) -> jax.Array:
    """Returns a leaf's weight decay for an update, including the leaf's decay factor."""
    return decay_at(weight_decay, leaf.metadata, leaf.completed, leaf.rate.dtype)


def decay_at(
    weight_decay: optax.ScalarOrSchedule, metadata: ParameterMetadata, completed: Any, dtype: Any
) -> jax.Array:
    """Returns the same as `decay_of`, for callers without a `Leaf`."""
    decay = jnp.asarray(value_at(weight_decay, completed), dtype)
    return decay if metadata.decay_factor == 1.0 else decay * metadata.decay_factor


def initial_moments(
    param: jax.Array, mu_dtype: Any = None, nu_dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns Adam's first and second moment before the first update."""
    return zeros_like(param, mu_dtype), zero_squares(param, nu_dtype)


def moments(
    leaf: Leaf, grad: jax.Array, mu: jax.Array, nu: jax.Array, b1: Any, b2: Any, newest: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns Adam's moments, updated with a gradient.

    `newest` is the factor of the gradient in the first moment, by default 1 - b1.
    """
    newest = 1 - b1 if newest is None else newest
    mu = (b1 * mu.astype(leaf.weights.dtype) + newest * grad).astype(mu.dtype)
    square = trust_ratio.real_product((1 - b2) * grad, grad)
    return mu, (b2 * nu.astype(leaf.rate.dtype) + square).astype(nu.dtype)


def correction(leaf: Leaf, base: float | jax.Array) -> jax.Array:
    """Returns 1 - base ** t, the bias correction of a moving average that starts at 0."""
    return one_minus_power(base, leaf.count, leaf.rate.dtype)


def step_correction(leaf: Leaf, b1: float | jax.Array, b2: float | jax.Array) -> jax.Array:
    """Returns Adam's bias corrections as a factor of the step, so that eps is added before them."""
    return jnp.sqrt(correction(leaf, b2)) / correction(leaf, b1)


def zeros_like(param: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns a zero buffer with the leaf's sharding, by default in the dtype of the leaf's arithmetic.

    If the leaf is complex, so is the buffer, and its dtype is complex64 or wider.
    """
    if dtype is not None and jnp.iscomplexobj(param):
        dtype = jnp.promote_types(dtype, jnp.complex64)
    return jnp.zeros_like(param, dtype=dtype or trust_ratio.compute_dtype(param))


def zero_squares(param: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns a real zero buffer for second moments, see `zeros_like`."""
    return jnp.zeros_like(param, dtype=dtype or trust_ratio.real_dtype(param))


def widen(tree: parameters.PyTree) -> parameters.PyTree:
    """Casts each leaf to the dtype of its arithmetic, which is at least float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, trust_ratio.compute_dtype(x)), tree)


def one_minus_power(base: float | jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
    """Returns 1 - base ** count without cancellation.

    For the base 0.999, the relative error of the plain form in float32 is 2e-5.
    """
    log: jax.Array | np.ndarray
    # `optax.inject_hyperparams` passes arrays. For a Python number, take the logarithm in float64
    # and then round it to `dtype`.
    if isinstance(base, jax.Array):
        log = jnp.log(base.astype(dtype))
    else:
        # For base 0, expm1(-inf) is -1, so the result is 1.
        log = np.asarray(math.log(base) if base else -math.inf, dtype)
    return _one_minus_exp(log, count)


@jax.jit  # traced once instead of once per leaf
def _one_minus_exp(log: jax.Array | np.ndarray, count: jax.Array) -> jax.Array:
    return -jnp.expm1(log * count.astype(log.dtype))
