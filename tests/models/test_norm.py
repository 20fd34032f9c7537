"""BatchNorm over groups: the same numbers with every sharding of the batch."""

import doctest
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.errors import ArgumentError
from lamb_tpu.kernels.lanes import pack, unpack
from lamb_tpu.models import norm as norm_lib
from lamb_tpu.models.groups import groups_of
from lamb_tpu.models.norm import BatchNorm, combine_moments
from tests.marks import some
from tests.raising import rejected

BATCH, DEVICES, CHANNELS = 32, 8, 5
# Examples per group, with 4 examples per device: ghost, ghost, local, 2 devices, 4 devices, all.
GROUP_SIZES = (1, 2, 4, 8, 16, None)
KEY = jax.random.key(0)


def make_mesh(*shape: int, devices: Any = None) -> Mesh:
    names = ("data",) if len(shape) == 1 else ("group", "inner")
    devices = np.array(jax.devices()[: math.prod(shape)] if devices is None else devices)
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def make_case(mean: float = 0.0, dtype: Any = np.float32) -> dict[str, Any]:
    """Returns activations whose mean varies between examples, weights of the loss, and variables."""
    rng = np.random.default_rng(0)
    x = mean + rng.normal(size=(BATCH, 3, 2, CHANNELS)) + rng.normal(size=(BATCH, 1, 1, CHANNELS))
    vectors = rng.normal(size=(4, CHANNELS)).astype(np.float32)
    return {
        "x": jnp.asarray(x, dtype),
        "weights": jnp.asarray(rng.normal(size=x.shape), jnp.float32),
        "params": {"scale": vectors[0], "bias": vectors[1]},
        "batch_stats": {"mean": vectors[2], "var": 1 + vectors[3] ** 2},
    }


def reference(case: dict[str, Any], group_size: int | None) -> dict[str, Any]:
    """Returns output, statistics and the gradient of sum(weights * y) in float64, from the formulas."""
    case = jax.tree.map(np.float64, case)  # jax.tree.map sorts the keys
    x, weights, (bias, scale) = case["x"], case["weights"], case["params"].values()
    y, dx = np.empty_like(x), np.empty_like(x)
    dscale, dbias = np.zeros(CHANNELS), np.zeros(CHANNELS)
    size = group_size or len(x)
    axes = tuple(range(x.ndim - 1))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        deviation = 1 / np.sqrt(x[rows].var(axes) + 1e-5)
        unit = (x[rows] - x[rows].mean(axes)) * deviation
        y[rows] = scale * unit + bias
        dy = weights[rows]
        dscale += (dy * unit).sum(axes)
        dbias += dy.sum(axes)
        dx[rows] = scale * deviation * (dy - dy.mean(axes) - unit * (dy * unit).mean(axes))
    new = {"mean": x.mean(axes), "var": x.var(axes)}
    stats = {name: 0.9 * old + 0.1 * new[name] for name, old in case["batch_stats"].items()}
    return {"y": y, "batch_stats": stats, "dx": dx, "dparams": {"scale": dscale, "bias": dbias}}


def step(
    group_size: int | None, axis_name: Any, sum_over: Any, x: Any, weights: Any, *variables: Any
) -> dict[str, Any]:
    """Returns results to compare with `reference`; sums parameter gradients over `sum_over`."""
    norm = BatchNorm(group_size, use_running_average=False, axis_name=axis_name, momentum=0.9)
    params, batch_stats = variables

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        y, state = norm.apply(variables, x, mutable="batch_stats")
        return jnp.sum(weights * y), (y, state["batch_stats"])

    (dparams, dx), (y, stats) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    if sum_over:
        dparams = jax.lax.psum(dparams, sum_over)
    return {"y": y, "batch_stats": stats, "dx": dx, "dparams": dparams}


def under_jit(*shape: int) -> Callable[..., Any]:
    def build(group_size: int | None) -> Callable[..., Any]:
        mesh = make_mesh(*shape)
        run = functools.partial(step, group_size, None, None)
        specs = (P(mesh.axis_names), P(mesh.axis_names), P(), P())
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        out = dict(zip(("y", "dx", "batch_stats", "dparams"), shardings))
        return jax.jit(run, in_shardings=shardings, out_shardings=out)

    return build


def under_shard_map(*shape: int, check_vma: bool) -> Callable[..., Any]:
    def build(group_size: int | None) -> Callable[..., Any]:
        mesh = make_mesh(*shape)
        names = mesh.axis_names
        # With check_vma, gradients of replicated parameters are already summed over devices.
        run = functools.partial(step, group_size, names, None if check_vma else names)
        specs = (P(names), P(names), P(), P())
        out = dict(zip(("y", "dx", "batch_stats", "dparams"), specs))
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
        return jax.jit(run)

    return build


def under_pmap(group_size: int | None) -> Callable[..., Any]:
    step_of_device = functools.partial(step, group_size, "data", "data")
    mapped = jax.pmap(step_of_device, "data", in_axes=(0, 0, None, None))

    def run(x: jax.Array, weights: jax.Array, *variables: Any) -> dict[str, Any]:
        x, weights = (a.reshape(DEVICES, -1, *a.shape[1:]) for a in (x, weights))
        out = mapped(x, weights, *variables)
        whole = {name: out[name].reshape(-1, *x.shape[2:]) for name in ("y", "dx")}
        return jax.tree.map(lambda a: a[0], out) | whole

    return run


BUILDERS = {
    "jit, 1 device": under_jit(1),
    "jit, 8": under_jit(8),
    "jit, 4 x 2": under_jit(4, 2),
    "shard_map, 8": under_shard_map(8, check_vma=False),
    "shard_map, 4 x 2": under_shard_map(4, 2, check_vma=False),
    "checked shard_map, 4 x 2": under_shard_map(4, 2, check_vma=True),
    "pmap, 8": under_pmap,
}
PLACEMENTS = [
    pair
    for pair in itertools.product(BUILDERS, GROUP_SIZES)
    # With check_vma, shard_map supports groups of complete inner axes: here 2 or all devices.
    if pair != ("checked shard_map, 4 x 2", 16)
]
# In `make test`: groups of 2 rows, of a device's 4 rows, of 2 devices and of all 8 devices.
MAIN_PLACEMENTS = ("jit, 1 device", "jit, 8", "shard_map, 8")
MAIN = [*itertools.product(MAIN_PLACEMENTS, (2, 4, 8, None))]


def some_pairs(pairs: Iterable[tuple[Any, ...]], main: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Marks all pairs of arguments as long except those in `main`, like `marks.some` for one argument."""
    return [pair if pair in main else pytest.param(*pair, marks=pytest.mark.long) for pair in pairs]


everywhere = pytest.mark.parametrize("placement, group_size", some_pairs(PLACEMENTS, MAIN))


@functools.cache
def sharded(placement: str, group_size: int | None) -> Callable[..., dict[str, Any]]:
    """Returns `step` for a sharding and a group size, compiled once for all tests."""
    return BUILDERS[placement](group_size)


def assert_close(ours: Any, theirs: Any, rtol: float, atol: float = 0.0) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), ours, theirs)


@everywhere
def test_every_sharding_agrees_with_float64(placement: str, group_size: int | None) -> None:
    case = make_case()
    out = sharded(placement, group_size)(*case.values())
    assert_close(out, reference(case, group_size), 2e-6, 4e-6)
    assert_close(out, sharded("jit, 1 device", group_size)(*case.values()), 1e-6, 2e-6)


@everywhere
def test_a_large_mean_costs_no_digits(placement: str, group_size: int | None) -> None:
    # The running mean is far off, as at the start of training.
    case = make_case(mean=10_000.0)
    out = sharded(placement, group_size)(*case.values())
    expected = reference(case, group_size)
    assert_close(out["batch_stats"], expected["batch_stats"], 1e-4)
    # Near 10,000, neighbouring float32 numbers differ by 0.001, which limits the precision of the
    # mean and y.
    assert_close(out, expected, 2e-3, 1e-2)


def applied(norm: nn.Module, variables: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the output and new state of a layer, computed in one program."""
    return jax.jit(functools.partial(norm.apply, mutable="batch_stats"))(variables, x)


@pytest.mark.parametrize(
    "placement, group_size",
    some_pairs(
        itertools.product(BUILDERS, (2, 8)),
        [(name, 2 if name in MAIN_PLACEMENTS else 8) for name in BUILDERS],
    ),
)
def test_bfloat16(placement: str, group_size: int) -> None:
    case = make_case(dtype=jnp.bfloat16)
    out = sharded(placement, group_size)(*case.values())
    assert out["y"].dtype == out["dx"].dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves(out["batch_stats"])} == {jnp.dtype("float32")}
    expected = reference(case, group_size)
    assert_close(out["batch_stats"], expected["batch_stats"], 1e-6, 1e-6)
    # y is rounded to 8 bits, and so is its cotangent, from which the gradients are computed.
    assert_close(np.float64(out["y"]), expected["y"], 2**-8, 1e-6)
    ours, theirs = ((np.float64(tree["dx"]), tree["dparams"]) for tree in (out, expected))
    jax.tree.map(lambda a, b: assert_close(a, b, 0, 5e-3 * np.max(np.abs(b))), ours, theirs)


def test_float64() -> None:
    with jax.enable_x64(True):
        case = make_case(mean=1000.0, dtype=np.float64)
        out = BUILDERS["jit, 8"](8)(*case.values())
        assert out["batch_stats"]["mean"].dtype == jnp.float32
        expected = reference(case, 8)
        assert_close((out["y"], out["dx"]), (expected["y"], expected["dx"]), 1e-9, 1e-9)


@pytest.mark.parametrize("running, tolerance", [(0.0, 5e-3), (90.0, 1e-5)])
def test_bfloat16_of_a_large_mean(running: float, tolerance: float) -> None:
    """The variance is within 0.5 % if the running mean is 0, and within 0.001 % if it is near the mean."""
    case = make_case(mean=100.0, dtype=jnp.bfloat16)
    norm = BatchNorm(use_running_average=False, momentum=0.0)
    stats = {"mean": jnp.full(CHANNELS, running), "var": jnp.ones(CHANNELS)}
    variables = {"params": case["params"], "batch_stats": stats}
    _, state = applied(norm, variables, case["x"])
    true = np.asarray(case["x"], np.float64).var((0, 1, 2))
    assert_close(state["batch_stats"]["var"], true, tolerance)


def test_running_averages_are_those_of_the_batch_not_the_mean_of_the_groups() -> None:
    x = jnp.array([[0.0], [2.0], [10.0], [14.0]])
    variables = jax.jit(BatchNorm(use_running_average=False).init)(KEY, x)
    for group_size in (1, 2, 4, None):
        norm = BatchNorm(group_size, use_running_average=False, momentum=0.75)
        _, state = applied(norm, variables, x)
        # By hand: mean 26 / 4, variance 300 / 4 - 6.5^2; the groups of 2 have variances 1 and 4.
        assert state["batch_stats"]["mean"] == pytest.approx(0.25 * 6.5)
        assert state["batch_stats"]["var"] == pytest.approx(0.75 * 1 + 0.25 * 32.75)


@pytest.mark.parametrize("shape", [(16, 3), (16, 7, 3), (16, 4, 4, 3), (4, 2, 3, 2, 3)])
def test_full_batch_equals_flax_batch_norm_at_any_rank(shape: Sequence[int]) -> None:
    x = 1 + 2 * jax.random.normal(KEY, shape)
    ours = BatchNorm(use_running_average=False)
    theirs = nn.BatchNorm(use_running_average=False, use_fast_variance=False)
    variables = jax.jit(theirs.init)(KEY, x)
    assert_close(jax.jit(ours.init)(KEY, x), variables, 0, 0)

    def moved(norm: nn.Module, x: jax.Array) -> Any:
        y, state = applied(norm, variables, x)
        return y, state["batch_stats"]

    assert_close(moved(ours, x), moved(theirs, x), 1e-6, 1e-6)
    later = {"params": variables["params"], "batch_stats": moved(ours, x)[1]}
    evaluate = [cls(use_running_average=True) for cls in (BatchNorm, nn.BatchNorm)]
    assert_close(*(jax.jit(norm.apply)(later, x) for norm in evaluate), 1e-6, 1e-6)


def test_init_needs_no_mesh_and_moves_nothing() -> None:
    x = jnp.full((3, 4), 7.0)
    norm = BatchNorm(8, axis_name="data", scale_init=nn.initializers.zeros)
    variables = jax.jit(functools.partial(norm.init, use_running_average=False))(KEY, x)
    zeros = np.zeros(4)
    stats = {"mean": zeros, "var": np.ones(4)}
    assert_close(variables, {"params": {"scale": zeros, "bias": zeros}, "batch_stats": stats}, 0)
    assert_close(norm.apply(variables, x, use_running_average=True), np.zeros((3, 4)), 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group_size", some(GROUP_SIZES, (2, 8, None)))
def test_packed_examples_make_no_difference(group_size: int | None, dtype: Any) -> None:
    case = make_case(mean=3.0, dtype=dtype)
    variables = {name: case[name] for name in ("params", "batch_stats")}

    def run(packed: int, params: Any, x: jax.Array) -> Any:
        norm = BatchNorm(group_size, momentum=0.9, packed=packed)
        given, x = {**variables, "params": params}, pack(x, packed)
        evaluated = norm.apply(given, x, True)
        y, state = norm.apply(given, x, False, mutable="batch_stats")
        y, evaluated = unpack(y, packed), unpack(evaluated, packed)
        return jnp.sum(case["weights"] * y), (y, state, evaluated)

    def step(packed: int) -> Any:
        grad = jax.grad(functools.partial(run, packed), (0, 1), has_aux=True)
        return jax.tree.map(np.float64, jax.jit(grad)(case["params"], case["x"]))

    (dparams, dx), rest = step(4)
    (expected_dparams, expected_dx), expected = step(1)
    # Sums are in another order; for bfloat16 the last of 8 bits may be rounded differently.
    rtol, atol = (1e-5, 1e-5) if dtype == jnp.float32 else (2**-7, 1e-3)
    assert_close(rest, expected, rtol, atol)
    assert_close(dparams, expected_dparams, 1e-5, 1e-4)
    assert_close(dx, expected_dx, rtol, 10 * atol)


def test_second_derivatives() -> None:
    """Constants in the computation (a pixel, the centre) do not change derivatives."""
    x, direction = jax.random.normal(KEY, (2, 6, 3, 2))

    def loss(group_size: int | None, centre: jax.Array | None, x: jax.Array) -> jax.Array:
        groups = groups_of(len(x), group_size, None)
        mean, var = norm_lib._group_moments(x, groups, centre)
        return jnp.sum(jnp.sin(mean) * jnp.exp(var))

    def plain(size: int, x: jax.Array) -> jax.Array:
        x = x.reshape(-1, size * 3, 2)
        return jnp.sum(jnp.sin(x.mean(1)) * jnp.exp(x.var(1)))

    def curvature(f: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (direction,))[1])(x)

    for group_size, centre in itertools.product((1, 2, None), (None, jnp.array([[0.3, -0.2]]))):
        ours = curvature(functools.partial(loss, group_size, centre))
        assert_close(ours, curvature(functools.partial(plain, group_size or 6)), 1e-5, 1e-5)


def test_under_remat() -> None:
    x = make_case()["x"]

    def grad(cls: type[nn.Module]) -> jax.Array:
        norm = cls(8, use_running_average=False)
        variables = jax.jit(norm.init)(KEY, x)
        apply = functools.partial(norm.apply, variables, mutable="batch_stats")
        return jax.jit(jax.grad(lambda x: jnp.sum(apply(x)[0] ** 3)))(x)

    assert_close(grad(nn.remat(BatchNorm)), grad(BatchNorm), 1e-6, 1e-6)


def moments_of(norm: nn.Module, variables: Any, x: jax.Array) -> tuple[Any, Any]:
    """Returns the state after a batch, and BatchNorm's moments."""
    variables = {**variables, "batch_moments": {}}
    _, state = norm.apply(variables, x, mutable=["batch_stats", "batch_moments"])
    return {"batch_stats": state["batch_stats"]}, state["batch_moments"]


@pytest.mark.parametrize(
    "microbatches, group_size",
    some_pairs(itertools.product((1, 2, 4), (2, 8, None)), [(1, 8), (2, None), (4, 2), (4, 8)]),
)
def test_microbatches_update_the_averages_like_the_full_batch(
    microbatches: int, group_size: int | None
) -> None:
    case = make_case(mean=3.0)
    norm = BatchNorm(group_size, use_running_average=False, momentum=0.9)
    variables = {name: case[name] for name in ("params", "batch_stats")}
    parts = case["x"].reshape(microbatches, -1, *case["x"].shape[1:])

    def step(_: None, part: jax.Array) -> tuple[None, Any]:
        return None, moments_of(norm, variables, part)

    _, (states, moments) = jax.lax.scan(step, None, parts)
    actual = combine_moments({"batch_stats": case["batch_stats"]}, moments)
    # `reference` averages over all examples in float64; the groups do not matter.
    assert_close(actual, {"batch_stats": reference(case, None)["batch_stats"]}, 2e-6, 1e-6)
    if microbatches == 1:
        assert_close(actual, jax.tree.map(lambda leaf: leaf[0], states), 1e-7, 1e-7)
    else:
        # The mean of the microbatches' states would be wrong.
        mean = jax.tree.map(lambda leaf: leaf.mean(0), states)["batch_stats"]["var"]
        assert np.max(np.abs(mean - actual["batch_stats"]["var"])) > 1e-3


def test_microbatches_over_devices() -> None:
    """A device's moments are those of the microbatch over all devices."""
    case = make_case(mean=3.0)
    variables = {name: case[name] for name in ("params", "batch_stats")}

    def run(x: jax.Array) -> Any:
        norm = BatchNorm(8, use_running_average=False, axis_name="data", momentum=0.9)
        steps = [moments_of(norm, variables, part)[1] for part in jnp.split(x, 2)]
        moments = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)
        return combine_moments({"batch_stats": case["batch_stats"]}, moments)

    run = jax.shard_map(run, mesh=make_mesh(8), in_specs=P("data"), out_specs=P(), check_vma=False)
    expected = {"batch_stats": reference(case, None)["batch_stats"]}
    assert_close(jax.jit(run)(case["x"]), expected, 2e-6, 1e-6)


def test_each_layer_has_separate_moments_also_in_a_stack() -> None:
    class Block(nn.Module):
        momentum: float

        @nn.compact
        def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
            norm = BatchNorm(use_running_average=False, momentum=self.momentum)
            return 2 * norm(x) ** 2 + 1, None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x, _ = Block(0.5, name="first")(x)
            axes = {"params": 0, "batch_stats": 0, "batch_moments": 0}
            scan = nn.scan(Block, axes, split_rngs={"params": True}, length=2)
            return scan(0.75, name="stack")(x)[0]

    x = 5 + jax.random.normal(KEY, (4, 6, 3))  # 4 microbatches
    variables = jax.jit(Stack().init)(KEY, x[0])
    moments = jax.jit(lambda part: moments_of(Stack(), variables, part)[1])
    parts = [moments(part) for part in x]
    moments = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    actual = combine_moments({"batch_stats": variables["batch_stats"]}, moments)["batch_stats"]
    means = np.mean(x, (0, 1))
    assert_close(actual["first"]["BatchNorm_0"]["mean"], 0.5 * means, 1e-6)
    assert_close(actual["first"]["BatchNorm_0"]["var"], 0.5 + 0.5 * np.var(x, (0, 1)), 1e-6)
    # Each input of the stack is 2 y^2 + 1 for a normalised y, so its mean is 3.
    assert actual["stack"]["BatchNorm_0"]["mean"].shape == (2, 3)
    assert_close(actual["stack"]["BatchNorm_0"]["mean"], np.full((2, 3), 0.25 * 3), 1e-4)


def test_state_that_cannot_be_combined() -> None:
    _, moments = moments_of(
        BatchNorm(use_running_average=False),
        {
            "params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)},
            "batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)},
        },
        jnp.ones((4, 2)),
    )
    moments = {"norm": jax.tree.map(lambda leaf: leaf[None], moments)}
    good = {"batch_stats": {"norm": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}}
    assert_close(combine_moments(good, moments)["batch_stats"]["norm"]["mean"], [0.01, 0.01], 1e-6)
    assert combine_moments({}, {}) == {}
    for path, state in {
        "cache/steps": {**good, "cache": {"steps": jnp.zeros(())}},
        "counter": {**good, "counter": jnp.zeros(())},
        "cache/norm/mean": {"cache": good["batch_stats"]},
        "batch_stats/flax/mean": {"batch_stats": {"flax": {"mean": jnp.zeros(2)}}},
        "batch_stats/norm/momentum": {"batch_stats": {"norm": {"momentum": jnp.zeros(())}}},
    }.items():
        with pytest.raises(ValueError, match=f"state has {path}, which is not a running average"):
            combine_moments(state, moments)


@pytest.mark.parametrize(
    "fields, x, message",
    [
        ({"momentum": 1.5}, jnp.zeros((4, 2)), ("momentum", 1.5, "is out of range", "use 0 to 1")),
        ({"epsilon": -1e-5}, jnp.zeros((4, 2)), ("epsilon", -1e-5, "is out of range")),
        ({}, jnp.zeros(4), ("input of BatchNorm", ..., "is float32(4,)", "use a floating")),
        ({}, jnp.zeros((4, 2), jnp.uint8), ("input of BatchNorm", ..., "is uint8(4, 2)")),
    ],
)
def test_impossible_arguments(
    fields: dict[str, Any], x: jax.Array, message: tuple[Any, ...]
) -> None:
    with rejected(*message, kind=ArgumentError):
        BatchNorm(use_running_average=False, **fields).init(KEY, x)


def test_statistics_of_one_device_only_if_asked_for() -> None:
    """With axis_name=() inside shard_map, each device's examples are normalised separately."""
    x = make_case()["x"]
    norm = BatchNorm(use_running_average=False, axis_name=())
    variables = jax.jit(norm.init)(KEY, x)
    apply = functools.partial(norm.apply, variables, mutable="batch_stats")
    each = jax.shard_map(apply, mesh=make_mesh(8), in_specs=P("data"), out_specs=P("data"))
    means = jax.jit(each)(x)[0].reshape(DEVICES, -1, CHANNELS).mean(1)
    assert_close(means, np.zeros((DEVICES, CHANNELS)), 0, 1e-6)


def test_docstrings() -> None:
    result = doctest.testmod(norm_lib)
    assert result.failed == 0
    assert result.attempted >= 4
