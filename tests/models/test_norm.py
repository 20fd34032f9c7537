"""BatchNorm over groups: the same numbers however the batch is placed."""

import collections
import doctest
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.models import norm as norm_lib
from lamb_tpu.models.norm import BatchNorm, replica_groups

BATCH, DEVICES, CHANNELS = 32, 8, 5
# Examples per group with 4 on a device: ghost, ghost, local, 2 devices, 4 devices, all of them.
GROUP_SIZES = (1, 2, 4, 8, 16, None)
KEY = jax.random.key(0)


def make_mesh(*shape: int, devices: Any = None) -> Mesh:
    names = ("data",) if len(shape) == 1 else ("group", "inner")
    devices = np.array(jax.devices()[: math.prod(shape)] if devices is None else devices)
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def make_case(mean: float = 0.0, dtype: Any = np.float32) -> dict[str, Any]:
    """Activations whose mean wanders from example to example, weights of the loss, variables."""
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
    """Output, statistics and the gradient of sum(weights * y) in float64, from the formulas."""
    case = jax.tree.map(np.float64, case)  # which sorts the keys
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
    """What `reference` computes; parameter gradients are summed over the axes `sum_over`."""
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
        # With check_vma gradients of replicated parameters are sums over the devices already.
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
    # With its checks shard_map takes groups of whole inner axes: here of 2 devices or all.
    if pair != ("checked shard_map, 4 x 2", 16)
]
everywhere = pytest.mark.parametrize("placement, group_size", PLACEMENTS)


@functools.cache
def placed(placement: str, group_size: int | None) -> Callable[..., dict[str, Any]]:
    """`step`, compiled once for all tests."""
    return BUILDERS[placement](group_size)


def assert_close(ours: Any, theirs: Any, rtol: float, atol: float = 0.0) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), ours, theirs)


@everywhere
def test_every_placement_gives_the_numbers_of_float64(
    placement: str, group_size: int | None
) -> None:
    case = make_case()
    out = placed(placement, group_size)(*case.values())
    assert_close(out, reference(case, group_size), 2e-6, 4e-6)
    assert_close(out, placed("jit, 1 device", group_size)(*case.values()), 1e-6, 2e-6)


@everywhere
def test_a_large_mean_costs_no_digits(placement: str, group_size: int | None) -> None:
    # The running mean is far away, as at the start of training.
    case = make_case(mean=10_000.0)
    out = placed(placement, group_size)(*case.values())
    expected = reference(case, group_size)
    assert_close(out["batch_stats"], expected["batch_stats"], 1e-4)
    # Neighbouring float32 numbers differ by 0.001 there; the mean and so y are known to that.
    assert_close(out, expected, 2e-3, 1e-2)


def test_the_fast_variance_of_flax_does_lose_them() -> None:
    case = make_case(mean=10_000.0)
    norm = nn.BatchNorm(use_running_average=False, momentum=0.0)
    _, state = norm.apply(norm.init(KEY, case["x"]), case["x"], mutable="batch_stats")
    true = np.asarray(case["x"], np.float64).var((0, 1, 2))
    assert np.max(np.abs(state["batch_stats"]["var"] / true - 1)) > 0.1


@pytest.mark.parametrize("placement, group_size", itertools.product(BUILDERS, (2, 8)))
def test_bfloat16(placement: str, group_size: int) -> None:
    case = make_case(dtype=jnp.bfloat16)
    out = placed(placement, group_size)(*case.values())
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
    """Differences from a running mean of 0 keep enough digits, those from a near one all."""
    case = make_case(mean=100.0, dtype=jnp.bfloat16)
    norm = BatchNorm(use_running_average=False, momentum=0.0)
    stats = {"mean": jnp.full(CHANNELS, running), "var": jnp.ones(CHANNELS)}
    variables = {"params": case["params"], "batch_stats": stats}
    _, state = norm.apply(variables, case["x"], mutable="batch_stats")
    true = np.asarray(case["x"], np.float64).var((0, 1, 2))
    assert_close(state["batch_stats"]["var"], true, tolerance)


def test_running_averages_are_those_of_the_batch_not_the_mean_of_the_groups() -> None:
    x = jnp.array([[0.0], [2.0], [10.0], [14.0]])
    for group_size in (1, 2, 4, None):
        norm = BatchNorm(group_size, use_running_average=False, momentum=0.75)
        _, state = norm.apply(norm.init(KEY, x), x, mutable="batch_stats")
        # By hand: mean 26 / 4, variance 300 / 4 - 6.5^2; the groups of 2 have 1 and 4.
        assert state["batch_stats"]["mean"] == pytest.approx(0.25 * 6.5)
        assert state["batch_stats"]["var"] == pytest.approx(0.75 * 1 + 0.25 * 32.75)


@pytest.mark.parametrize("shape", [(16, 3), (16, 7, 3), (16, 4, 4, 3), (4, 2, 3, 2, 3)])
def test_whole_batch_is_flax_batch_norm_at_any_rank(shape: Sequence[int]) -> None:
    x = 1 + 2 * jax.random.normal(KEY, shape)
    ours = BatchNorm(use_running_average=False)
    theirs = nn.BatchNorm(use_running_average=False, use_fast_variance=False)
    variables = theirs.init(KEY, x)
    assert_close(ours.init(KEY, x), variables, 0, 0)

    def moved(norm: nn.Module, x: jax.Array) -> Any:
        y, state = norm.apply(variables, x, mutable="batch_stats")
        return y, state["batch_stats"]

    assert_close(moved(ours, x), moved(theirs, x), 1e-6, 1e-6)
    later = {"params": variables["params"], "batch_stats": moved(ours, x)[1]}
    evaluate = [cls(use_running_average=True) for cls in (BatchNorm, nn.BatchNorm)]
    assert_close(*(norm.apply(later, x) for norm in evaluate), 1e-6, 1e-6)


def test_init_needs_no_mesh_and_moves_nothing() -> None:
    x = jnp.full((3, 4), 7.0)
    norm = BatchNorm(8, axis_name="data", scale_init=nn.initializers.zeros)
    variables = norm.init(KEY, x, use_running_average=False)
    zeros = np.zeros(4)
    stats = {"mean": zeros, "var": np.ones(4)}
    assert_close(variables, {"params": {"scale": zeros, "bias": zeros}, "batch_stats": stats}, 0)
    assert_close(norm.apply(variables, x, use_running_average=True), np.zeros((3, 4)), 0)


def test_second_derivatives() -> None:
    """Constants in the computation (a pixel, the centre) do not make it another function."""
    x, direction = jax.random.normal(KEY, (2, 6, 3, 2))

    def loss(group_size: int | None, centre: jax.Array | None, x: jax.Array) -> jax.Array:
        groups = norm_lib._groups(len(x), group_size, None)
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
        apply = functools.partial(norm.apply, norm.init(KEY, x), mutable="batch_stats")
        return jax.jit(jax.grad(lambda x: jnp.sum(apply(x)[0] ** 3)))(x)

    assert_close(grad(nn.remat(BatchNorm)), grad(BatchNorm), 1e-6, 1e-6)


class Network(nn.Module):
    """Two convolutions, each with a normalisation."""

    group_size: int | None
    axis_name: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (8, 16):
            x = nn.Conv(channels, (3, 3), use_bias=False, dtype=x.dtype)(x)
            x = nn.relu(BatchNorm(self.group_size, False, self.axis_name)(x))
        return nn.Dense(10, dtype=x.dtype)(x.mean((1, 2)))


def compiled_step(mesh: Mesh, group_size: int | None, dtype: Any, shard_map: bool) -> str:
    """The compiled program of a training step, 4 examples on a device."""
    names = mesh.axis_names
    network = Network(group_size, names if shard_map else None)
    x = jnp.zeros((4 * mesh.size, 8, 8, 3), dtype)
    variables = jax.eval_shape(Network(None).init, KEY, x)

    def step(variables: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            out, state = network.apply({**variables, "params": params}, x, mutable="batch_stats")
            return jnp.sum(out.astype(jnp.float32) ** 2), state

        grads, state = jax.grad(loss, has_aux=True)(variables["params"])
        if shard_map:
            grads = jax.lax.psum(grads, names)
        return jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads), state

    specs = (P(), P(names))
    if shard_map:
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    whole, split = (NamedSharding(mesh, spec) for spec in specs)
    step = jax.jit(step, in_shardings=(whole, split), out_shardings=whole)
    return step.lower(variables, x).compile().as_text()


def collectives_of(program: str) -> list[tuple[str, list[list[int]]]]:
    """Kind and replica groups of each collective of a compiled program."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = []
    for kind, line in re.findall(rf" ({kinds})(?:-start)?\((.*)", program):
        spec = line.split("replica_groups=")[1]
        if spec.startswith("{"):  # {{0,1},{2,3}}
            lists = re.findall(r"\{([\d,]+)\}", spec.split("}}")[0] + "}")
            groups = [[int(i) for i in numbers.split(",")] for numbers in lists]
        elif m := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", spec):
            # Numbers counted up in the second shape, transposed, cut into rows of the first.
            shape, sizes, order = (
                [int(i) for i in (part or "").split(",") if i] for part in m.groups()
            )
            ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order or None)
            groups = ids.reshape(shape).tolist()
        else:  # mesh['a'=4,'b'=6] {'a','b':(2)3}: together all of a, and the last 3 of b as 2 x 3
            mesh, within = re.match(r"mesh\[([^\]]*)\] \{([^}]*)\}", spec).groups()
            sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
            first = dict(zip(sizes, np.indices([*sizes.values()]).reshape(len(sizes), -1)))
            for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", within):
                after = sizes[name] // (int(before or 1) * int(size or sizes[name]))
                digit = first[name] // after % int(size or sizes[name])
                first[name] = first[name] - digit * after
            members = collections.defaultdict(list)
            for device, key in enumerate(zip(*first.values())):
                members[key].append(device)
            groups = [*members.values()]
        found.append((kind, groups))
    return found


@pytest.mark.parametrize("shape, shard_map", [((8,), False), ((4, 2), False), ((8,), True)])
@pytest.mark.parametrize("group_size, dtype", [
    (4, jnp.float32), (8, jnp.float32), (16, jnp.float32), (None, jnp.float32),
    (2, jnp.bfloat16), (8, jnp.bfloat16),
])
def test_compiled_step_reduces_over_the_groups_and_gathers_nothing(
    group_size: int | None, dtype: Any, shape: Sequence[int], shard_map: bool
) -> None:
    found = collectives_of(compiled_step(make_mesh(*shape), group_size, dtype, shard_map))
    assert {kind for kind, _ in found} == {"all-reduce"}
    replicas = (group_size or BATCH) // 4
    if replicas < 2:
        # Gradients and running averages, the variances of which need the means before.
        assert all(groups == [[*range(8)]] for _, groups in found)
        assert len(found) <= 5
        return
    own = [[*range(i, i + replicas)] for i in range(0, 8, replicas)]
    across = [[*range(i, 8, replicas)] for i in range(replicas)]
    assert all(groups in (own, across, [[*range(8)]]) for _, groups in found)
    # In each layer one round backward, and forward one for bfloat16, two for float32.
    rounds = 2 * (2 if dtype == jnp.bfloat16 else 3)
    count = sum(groups == own for _, groups in found)
    assert rounds <= count <= rounds + (0 if group_size else 2)


@pytest.mark.parametrize("group_size, rows, axis_name, message", [
    (0, 32, None, "group_size must be None or a whole number of at least 1, not 0"),
    (2.0, 32, None, "group_size must be None or a whole number of at least 1, not 2.0"),
    (True, 32, None, "group_size must be None or a whole number of at least 1, not True"),
    (12, 32, None, "group_size is 12, which does not fit the batch of 32 examples; 8 or 16 would"),
    (64, 32, None, "group_size is 64, which does not fit the batch of 32 examples; 32 would"),
    (6, 32, "data", "group_size is 6, .* 32 examples, 4 on each of 8 devices; 4 or 8 would"),
    (12, 32, "data", "group_size is 12, .* 32 examples, 4 on each of 8 devices; 8 or 16 would"),
    # 16 divides the batch of 96, but its groups would end within a device's 12.
    (16, 96, "data", "group_size is 16, .* 96 examples, 12 on each of 8 devices; 12 or 24 would"),
    (8, 32, "data", "groups of 2 devices are parts of the mesh axes data: give shard_map"),
    (None, 32, "", "set axis_name to the axes that split the batch, \\(\\) for none"),
])
def test_group_size_that_does_not_fit(
    group_size: Any, rows: int, axis_name: str | None, message: str
) -> None:
    norm = BatchNorm(group_size, use_running_average=False, axis_name=axis_name or None)
    x = jnp.zeros((rows, 5))
    variables = norm.init(KEY, x)
    apply = functools.partial(norm.apply, variables, mutable="batch_stats")
    if axis_name is not None:
        apply = jax.shard_map(apply, mesh=make_mesh(8), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=message):
        apply(x)


@pytest.mark.parametrize("fields, x, message", [
    ({"momentum": 1.5}, jnp.zeros((4, 2)), r"momentum must be in \[0, 1\], not 1.5"),
    ({"epsilon": -1e-5}, jnp.zeros((4, 2)), "epsilon must be at least 0, not -1e-05"),
    ({}, jnp.zeros(4), r"floating-point \(batch, ..., channels\), not float32\(4,\)"),
    ({}, jnp.zeros((4, 2), jnp.uint8), r"floating-point .*, not uint8\(4, 2\)"),
])
def test_impossible_arguments(fields: dict[str, Any], x: jax.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchNorm(use_running_average=False, **fields).init(KEY, x)


def test_statistics_of_one_device_only_if_asked_for() -> None:
    """axis_name=() inside shard_map: each device by itself."""
    x = make_case()["x"]
    norm = BatchNorm(use_running_average=False, axis_name=())
    apply = functools.partial(norm.apply, norm.init(KEY, x), mutable="batch_stats")
    each = jax.shard_map(apply, mesh=make_mesh(8), in_specs=P("data"), out_specs=P("data"))
    means = each(x)[0].reshape(DEVICES, -1, CHANNELS).mean(1)
    assert_close(means, np.zeros((DEVICES, CHANNELS)), 0, 1e-6)


@pytest.mark.parametrize("rows, columns, replicas, height, width", [
    (32, 32, 32, 4, 8),
    (32, 64, 32, 4, 8),
    (32, 32, 64, 8, 8),
    (2, 64, 32, 2, 16),
    (64, 2, 32, 16, 2),
    (4, 4, 16, 4, 4),
    (1, 32, 32, 1, 32),
    (6, 6, 18, 3, 6),
])
def test_tiles(rows: int, columns: int, replicas: int, height: int, width: int) -> None:
    groups = replica_groups(rows, columns, replicas)
    assert sorted(itertools.chain(*groups)) == [*range(rows * columns)]
    assert all(group == sorted(group) for group in groups)
    owner = np.empty(rows * columns, int)
    for number, group in enumerate(groups):
        owner[group] = number
    tiles = owner.reshape(rows // height, height, columns // width, width)
    assert np.all(tiles == tiles[:, :1, :, :1])
    assert len(groups) == len(np.unique(tiles[:, 0, :, 0])) == tiles[:, 0, :, 0].size


def test_rings() -> None:
    for rows, columns, replicas in ((4, 4, 1), (4, 8, 4), (3, 8, 12), (16, 2, 16)):
        everyone = np.arange(rows * columns)
        assert replica_groups(rows, columns, replicas) == everyone.reshape(-1, replicas).tolist()


@pytest.mark.parametrize("arguments, message", [
    ((4, 8, 5), "replicas is 5, which does not divide the 4 x 8 torus; 4 or 8 would"),
    ((0, 8, 4), "rows must be a whole number of at least 1, not 0"),
    ((4, 8.0, 4), "columns must be a whole number of at least 1, not 8.0"),
    ((4, 8, True), "replicas must be a whole number of at least 1, not True"),
])
def test_impossible_groups(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replica_groups(*arguments)


def test_devices_in_the_order_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of the batch are the tiles, as replica groups of a collective or by the mesh."""
    monkeypatch.setattr(norm_lib, "_LARGEST_RING", 2)
    tiles = replica_groups(2, 4, 4)
    assert tiles == [[0, 1, 4, 5], [2, 3, 6, 7]]
    x = jax.random.normal(KEY, (BATCH, CHANNELS))

    mesh = make_mesh(2, 4, devices=np.array(jax.devices())[np.array(tiles)])
    x = jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))
    norm = BatchNorm(16, use_running_average=False)
    variables = norm.init(KEY, x)
    y = jax.jit(lambda x: norm.apply(variables, x, mutable="batch_stats")[0])(x)
    parts = {shard.device.id: np.asarray(shard.data) for shard in y.addressable_shards}
    for tile in tiles:
        examples = np.concatenate([parts[i] for i in tile])
        assert_close(examples.mean(0), np.zeros(CHANNELS), 0, 1e-6)
        assert_close(examples.std(0), np.ones(CHANNELS), 1e-4)

    add = functools.partial(jax.lax.psum, axis_name="data", axis_index_groups=tiles)
    sums = jax.pmap(add, "data")(jnp.arange(8.0))
    assert sums.tolist() == [10, 10, 18, 18, 10, 10, 18, 18]


def test_docstrings() -> None:
    result = doctest.testmod(norm_lib)
    assert result.failed == 0
    assert result.attempted >= 6
