"""BatchNorm over groups of devices in the training step of complete networks on 8 devices.

The networks have few layers; tests/models/test_norm.py tests the layer with every sharding.
"""

import functools
import itertools
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, models
from lamb_tpu.models.resnet import ResNet
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.marks import some
from tests.models.numpy_layers import conv, variables
from tests.parallel.nets import difference

DEVICES, ROWS, UPDATES = 8, 4, 3  # rows per device
MOMENTUM = 0.5
# Numbers of devices that share statistics. Each case takes seconds to compile, so some are missing.
SHARED = {
    ("efficientnet", "shard_map"): (1, 2, 4, 8),
    ("efficientnet", "jit"): (4,),
    ("resnet", "shard_map"): (1, 8),
    ("resnet", "jit"): (8,),
}
CASES = [(*key, shared) for key, several in SHARED.items() for shared in several]
MAIN_CASES = [("resnet", "jit", 8)]


class CutResNet(ResNet):
    """The first two blocks of ResNet-18."""

    blocks, bottleneck = (1, 1), False


NETWORKS = {
    "efficientnet": {"name": "efficientnet_b0", "stages": ((1, 3, 1, 1, 16), (1, 3, 2, 6, 24))},
    "resnet": {"name": "cut_resnet", "stem": "cifar", "zero_gamma": False},
}


class Trained(NamedTuple):
    """The images of the first batch; all variables after 0 updates, 1 update and `UPDATES` updates."""

    images: np.ndarray
    start: Any
    first: Any
    last: Any


@functools.cache
def trained(network: str, backend: str, shared: int) -> Trained:
    """Trains with groups that span `shared` devices."""
    fields = {
        **NETWORKS[network],
        "num_classes": 10,
        "group_size": ROWS * shared,
        "momentum": MOMENTUM,
    }
    optimizer = ConfigDict({"name": "nesterov", "learning_rate": 0.02, "rules": "no_bias_no_norm"})
    settings = tiny.digits(
        model=ConfigDict(fields),
        optimizer=optimizer,
        batch_size=DEVICES * ROWS,
        schedule__warmup="0 steps",
        parallel__backend=backend,
    )
    run = prepare(settings, None)
    assert run.batch_norm.endswith(f" {shared} device(s) each")
    loader = data.TrainLoader(run.train_set, DEVICES * ROWS, 0, run.local_rows())
    batches = [next(loader) for _ in range(UPDATES)]
    module = models.MODULES[fields.pop("name")](**fields)
    start = variables(module, np.float32(batches[0]["image"][:1]))
    given = {"params": start["params"], "model_state": {"batch_stats": start["batch_stats"]}}
    given = flax.traverse_util.flatten_dict(given, sep="/")
    state = jax.jit(run.init, out_shardings=run.shardings)(jax.random.key(0), given)
    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile()
    states = []
    for batch in batches:
        state, _ = step(state, run.shard_batch(batch))
        states.append(jax.device_get({"params": state.params, **state.model_state}))
    return Trained(np.float64(batches[0]["image"]) / 16, start, states[0], states[-1])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODULES, "cut_resnet", CutResNet)


def normalised(
    x: np.ndarray, start: Any, layer: tuple[str, ...], size: int, epsilon: float
) -> tuple[np.ndarray, dict[str, Any]]:
    """Normalises each group of `size` examples; also returns the running averages.

    The full batch's statistics follow from the groups' by the law of total variance.
    """
    params, old = (
        functools.reduce(lambda tree, key: tree[key], layer, start[collection])
        for collection in ("params", "batch_stats")
    )
    groups = x.reshape(-1, size, *x.shape[1:])
    mean, var = groups.mean((1, 2, 3)), groups.var((1, 2, 3))
    axes = (slice(None), None, None, None)
    y = ((groups - mean[axes]) / np.sqrt(var[axes] + epsilon)).reshape(x.shape)
    full = {"mean": mean.mean(0), "var": var.mean(0) + mean.var(0)}
    moved = {name: MOMENTUM * old[name] + (1 - MOMENTUM) * value for name, value in full.items()}
    return params["scale"] * y + params["bias"], moved


def expected(network: str, actual: Trained, shared: int) -> dict[str, Any]:
    """Returns the running averages of the network's first two normalisations, in float64."""
    params, size, same = actual.start["params"], shared * ROWS, ((1, 1), (1, 1))
    if network == "efficientnet":
        # With TensorFlow's SAME and an even size, the odd pixel of padding is at the end.
        x = conv(actual.images, params["stem_conv"]["kernel"], 2, ((0, 1), (0, 1)))
        x, stem = normalised(x, actual.start, ("stem_norm",), size, 1e-3)
        x, layer, name = x / (1 + np.exp(-x)), "depthwise", "depthwise_norm"
    else:
        x = conv(actual.images, params["stem_conv"]["kernel"], 1, same)
        x, stem = normalised(x, actual.start, ("stem_norm",), size, 1e-5)
        x, layer, name = np.maximum(x, 0), "conv1", "norm1"
    x = conv(x, params["stage1_block1"][layer]["kernel"], 1, same)
    _, second = normalised(x, actual.start, ("stage1_block1", name), size, 1e-5)
    return {"stem_norm": stem, "stage1_block1": {name: second}}


def relative_distance(one: Trained, two: Trained, collection: str) -> float:
    """Returns the distance between two trained networks, relative to how far training moved the first."""

    def length(ours: Any, theirs: Any) -> float:
        squares = jax.tree.map(lambda a, b: np.sum((np.float64(a) - b) ** 2), ours, theirs)
        return float(np.sqrt(sum(jax.tree.leaves(squares))))

    tiny.assert_equal(two.start, one.start)
    return length(two.last[collection], one.last[collection]) / length(
        one.last[collection], one.start[collection]
    )


@pytest.mark.long
@pytest.mark.parametrize("case", some(CASES, MAIN_CASES))
def test_statistics_are_those_of_numpy(case: tuple[str, str, int]) -> None:
    network, backend, shared = case
    actual = trained(network, backend, shared)
    stats = tiny.arrays(actual.first["batch_stats"])
    of_groups = expected(network, actual, shared)
    for path, value in tiny.arrays(of_groups).items():
        np.testing.assert_allclose(stats[path], value, rtol=2e-5, atol=2e-5, err_msg=path)
    # The groups matter after the first normalisation: another group size gives other averages.
    other = 2 if shared != 2 else 1
    assert difference(expected(network, actual, other), of_groups) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("network", some(NETWORKS, ("resnet",)))
def test_training_depends_on_the_groups_and_not_on_sharding(network: str) -> None:
    for shared in SHARED[network, "jit"]:
        one, two = (trained(network, backend, shared) for backend in ("jit", "shard_map"))
        assert relative_distance(one, two, "params") < 1e-4
        assert relative_distance(one, two, "batch_stats") < 1e-4
    # Groups of one device are local BatchNorm; any two group sizes train differently.
    several = [trained(network, "shard_map", shared) for shared in SHARED[network, "shard_map"]]
    for one, two in itertools.combinations(several, 2):
        assert relative_distance(one, two, "params") > 0.05
