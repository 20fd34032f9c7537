"""mixup and cutmix: mixtures and shares, which are the same on any number of devices."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.models.dropout import example_positions
from lamb_tpu.run.build import prepare
from lamb_tpu.tasks import build, mixing
from tests import tiny
from tests.marks import some
from tests.parallel.nets import difference, trained
from tests.raising import rejected

KEY = jax.random.key(7)
LEFT_OUT = 0.0
mix = jax.jit(mixing.mix, static_argnums=(2, 3))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.8, 1.0, 4.0])
def test_shares_have_the_beta_distribution(alpha: float) -> None:
    count = 100_000
    u, v = jax.random.uniform(jax.random.key(0), (2, count))
    shares = np.asarray(mixing.symmetric_beta(u, v, alpha), np.float64)
    assert 0 <= shares.min() and shares.max() <= 1
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(shares.mean() - 0.5) < 5 * np.sqrt(variance / count)
    assert abs(shares.var() / variance - 1) < 0.02
    # Kolmogorov-Smirnov: larger deviations have a probability of 1/1,000.
    below = np.linspace(0.001, 0.999, 101)
    actual = np.searchsorted(np.sort(shares), below) / count
    expected = jax.scipy.special.betainc(alpha, alpha, jnp.asarray(below, jnp.float32))
    assert np.abs(actual - np.asarray(expected)).max() < 1.95 / np.sqrt(count)


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 1.0, 1e3])
def test_shares_at_the_ends_of_chance(alpha: float) -> None:
    ends = jnp.array([0.0, 1e-7, 0.25, 0.5, 0.75, 1 - 2**-23], jnp.float32)
    shares = mixing.symmetric_beta(*(x.ravel() for x in jnp.meshgrid(ends, ends)), alpha)
    assert bool(jnp.all((shares >= 0) & (shares <= 1)))  # false for NaN


def rows_of_their_number(rows: int, *shape: int) -> jax.Array:
    """Returns images in which each value is the image's row in the batch, counted from 1."""
    return jnp.broadcast_to(
        jnp.arange(1.0, rows + 1).reshape(-1, *(1,) * len(shape)), (rows, *shape)
    )


def others(values: Any) -> np.ndarray:
    """Returns each row's partner, computed without `mixing.partners`."""
    values = np.asarray(values)
    return np.stack([values[row + 1 if row % 2 == 0 else row - 1] for row in range(len(values))])


@pytest.mark.parametrize("shape", [(5, 4, 3), (6,), ()])
def test_mixup_adds_a_share_of_each(shape: tuple[int, ...]) -> None:
    images = jax.random.normal(jax.random.key(1), (4000, *shape))
    mixed, shares = mix(images, KEY, 0.4, LEFT_OUT)
    assert mixed.shape == images.shape and mixed.dtype == shares.dtype == jnp.float32
    share = np.asarray(shares).reshape(-1, *(1,) * len(shape))
    np.testing.assert_allclose(mixed, share * images + (1 - share) * others(images), atol=1e-6)
    # Both rows of a pair have the same share, and the pairs' shares differ.
    np.testing.assert_array_equal(shares[::2], shares[1::2])
    pairs = np.asarray(shares[::2], np.float64)
    assert len(set(pairs.tolist())) > 1900
    assert abs(pairs.mean() - 0.5) < 5 * np.sqrt(1 / 7.2 / 2000)
    assert abs(pairs.var() * 7.2 - 1) < 0.1
    assert abs(np.corrcoef(pairs[1:], pairs[:-1])[0, 1]) < 5 / np.sqrt(2000)


def official_boxes(rng: np.random.Generator, count: int, h: int, w: int) -> np.ndarray:
    """Draws masks of boxes, bool (count, h, w), as the paper's code does for `alpha` = 1."""
    masks = np.zeros((count, h, w), bool)
    for mask, side in zip(masks, np.sqrt(1 - rng.uniform(size=count)), strict=True):
        y, x = rng.integers(h), rng.integers(w)
        high, wide = int(h * side), int(w * side)
        top, bottom = np.clip([y - high // 2, y + high // 2], 0, h)
        left, right = np.clip([x - wide // 2, x + wide // 2], 0, w)
        mask[top:bottom, left:right] = True
    return masks


def test_cutmix_shares_are_those_of_the_pixels() -> None:
    images = rows_of_their_number(4000, 11, 14, 3)
    mixed, shares = (np.asarray(x) for x in mix(images, KEY, LEFT_OUT, 1.0))
    unmixed = mixed == np.asarray(images)
    partners = mixed == others(images)
    assert (unmixed ^ partners).all()  # every pixel is from one of the two images
    count = np.float32(unmixed[..., 0].sum((1, 2)))
    np.testing.assert_array_equal(shares, count / np.float32(11 * 14))
    # The box is the same for both images of a pair and for all channels.
    np.testing.assert_array_equal(unmixed[::2], unmixed[1::2])
    np.testing.assert_array_equal(unmixed[..., :1] & unmixed, unmixed)
    boxes = partners[::2, :, :, 0]
    rows, columns = boxes.any(2), boxes.any(1)
    np.testing.assert_array_equal(boxes, rows[:, :, None] & columns[:, None, :])
    for side in (rows, columns):  # each box is contiguous
        assert (np.abs(np.diff(side.astype(int), prepend=0, append=0)).sum(1) <= 2).all()
    # Boxes are distributed as in the paper's code: mean area, mean squared area, and each pixel.
    official = official_boxes(np.random.default_rng(0), 8000, 11, 14)
    for actual, expected in (
        (boxes, official),
        (rows, official.any(2)),
        (columns, official.any(1)),
    ):
        for of in (lambda x: x.mean((1, 2)), lambda x: x.mean((1, 2)) ** 2, lambda x: x):
            a, b = (of(x.reshape(len(x), x.shape[1], -1)) for x in (actual, expected))
            error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
            assert (np.abs(a.mean(0) - b.mean(0)) < 5 * error).all()
    assert shares.min() < 0.3 and shares.max() == 1


def test_either_of_the_two_where_both_are_on() -> None:
    images = rows_of_their_number(4000, 8, 8, 1)
    mixed, shares = (np.asarray(x) for x in mix(images, KEY, 1.0, 1.0))
    flat, number = mixed.reshape(4000, -1), np.asarray(images)[:, 0, 0, 0]
    cut = ((flat == number[:, None]) | (flat == others(number)[:, None])).all(1)
    np.testing.assert_array_equal(cut[::2], cut[1::2])
    assert abs(cut[::2].mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    alone, _ = mix(images, KEY, LEFT_OUT, 1.0)
    np.testing.assert_array_equal(mixed[cut], np.asarray(alone)[cut])
    share = shares[:, None]
    added = share * number[:, None] + (1 - share) * others(number)[:, None]
    np.testing.assert_allclose(flat[~cut], np.broadcast_to(added, flat.shape)[~cut], rtol=1e-6)
    np.testing.assert_allclose(flat.mean(1), added[:, 0], rtol=1e-5)


def test_rows_keys_and_updates_differ() -> None:
    images = rows_of_their_number(64, 8, 8, 1)
    first, again, other = (
        np.asarray(mix(images, key, 1.0, 1.0)[1]) for key in (KEY, KEY, jax.random.key(8))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_mixture_depends_on_the_global_row(impl: str) -> None:
    images, key = rows_of_their_number(64, 8, 8, 1), jax.random.key(3, impl=impl)
    full, shares = mix(images, key, 1.0, 1.0)
    for start, stop in ((24, 26), (32, 64)):
        with example_positions(jnp.arange(start, stop)):
            # Uses a new function, so that JAX traces it again with these positions.
            part, part_shares = jax.jit(lambda x, key: mixing.mix(x, key, 1.0, 1.0))(
                images[start:stop], key
            )
        np.testing.assert_allclose(part, full[start:stop], atol=1e-5)
        np.testing.assert_allclose(part_shares, shares[start:stop], atol=1e-6)


def test_odd_number_of_rows() -> None:
    with pytest.raises(ValueError, match="has 3 rows, which cannot be paired; use an even"):
        mixing.mix(jnp.ones((3, 2, 2, 1)), KEY, 1.0, 0.0)


def test_no_example_leaves_its_device() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    places = NamedSharding(mesh, PartitionSpec("data"))
    images = jax.ShapeDtypeStruct((32, 8, 8, 3), jnp.float32, sharding=places)
    labels = jax.ShapeDtypeStruct((32,), jnp.int32, sharding=places)

    def both(images: jax.Array, labels: jax.Array) -> Any:
        return mixing.mix(images, KEY, 0.2, 1.0), mixing.partners(labels)

    text = jax.jit(both, out_shardings=places).lower(images, labels).compile().as_text()
    assert not re.findall("all-gather|all-to-all|collective-permute|all-reduce", text)
    assert "f32[4,8,8,3]" in text  # a device's rows


IDENTITY = models.Model(lambda key, x: {"params": {}}, lambda v, x, **_: (x, {}))
LABELS = np.array([0, 2, 1, 1, 2, 0], np.int32)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_targets_are_mixed_like_the_images(smoothing: float) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    fields = {"mixup_alpha": 1.0, "label_smoothing": smoothing, "input_std": 2.0}
    task = build("classification", IDENTITY, input_mean=1.0, **fields)
    batch = {"image": logits, "label": LABELS}
    terms, (_, sums) = jax.jit(task.loss)({}, {}, batch, KEY)
    inputs = (logits - 1) / 2
    mixed, shares = mix(jnp.asarray(inputs), KEY, 1.0, LEFT_OUT)
    mixed, shares = np.asarray(mixed, np.float64), np.asarray(shares, np.float64)
    of_label, of_other = np.eye(3)[LABELS], np.eye(3)[others(LABELS)]
    targets = shares[:, None] * of_label + (1 - shares[:, None]) * of_other
    smoothed = (1 - smoothing) * targets + smoothing / 3
    log_softmax = mixed - np.log(np.exp(mixed).sum(1, keepdims=True))
    np.testing.assert_allclose(terms["cross_entropy"], -(smoothed * log_softmax).sum(), rtol=1e-5)
    correct, weight = sums["accuracy"]
    hits = targets[np.arange(6), mixed.argmax(1)]
    np.testing.assert_allclose(correct, hits.sum(), rtol=1e-6)
    assert weight == 6 and 0 < correct < 6
    # Evaluation mixes nothing.
    plain = build("classification", IDENTITY, input_mean=1.0, input_std=2.0)
    masked = batch | {"mask": np.ones(6, np.float32)}
    tiny.assert_equal(task.evaluate({}, {}, masked), plain.evaluate({}, {}, masked))


BOTH = ConfigDict(
    {
        "name": "classification",
        "input_std": 16.0,
        "mixup_alpha": 0.4,
        "cutmix_alpha": 1.0,
        "label_smoothing": 0.1,
    }
)
SHARD_MAP = {"parallel__backend": "shard_map"}
PLACES = {
    "one, 4 microbatches": (1, {"accumulation_steps": 4}),
    "jit": (8, {}),
    "jit, 4 microbatches of 2 rows a device": (8, {"accumulation_steps": 4}),
    "shard_map": (8, SHARD_MAP),
    "shard_map, 2 microbatches, zero1": (
        8,
        {**SHARD_MAP, "accumulation_steps": 2, "parallel__optimizer_state": "zero1"},
    ),
}


@pytest.fixture(scope="module")
def on_one() -> Any:
    """Returns the state after 6 updates on one device, and the metric sums of these updates."""
    return trained(1, 6, task=BOTH)[:2]


@pytest.mark.long
@pytest.mark.parametrize(
    "place", some(PLACES, ("one, 4 microbatches", "shard_map, 2 microbatches, zero1"))
)
def test_any_devices_and_microbatches_equal_one_device(on_one: Any, place: str) -> None:
    devices, changes = PLACES[place]
    expected, sums_on_one = on_one
    actual, sums, _ = trained(devices, 6, task=BOTH, **changes)
    assert difference(actual.params, expected.params) < 1e-6
    for of_one, of_all in zip(sums_on_one, sums, strict=True):
        for name in of_one:
            np.testing.assert_allclose(of_all[name], of_one[name], rtol=1e-5, err_msg=name)
        assert of_all["accuracy"][0] % 1 and of_all["accuracy"][1] == 64  # examples were mixed


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 56}, (56, "because config.task.mixup_alpha mixes pairs", "use 48 or 64")),
        ({"accumulation_steps": 8}, (64, "times config.accumulation_steps=8 t", "use 128")),
        (
            {"task": ConfigDict({"name": "classification", "cutmix_alpha": 1.0}), "batch_size": 8},
            (8, "config.task.cutmix_alpha mixes", "use 16"),
        ),
    ],
)
def test_splitting_pairs_is_rejected(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: tuple[Any, ...],
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # it must fail before compiling
    config = tiny.digits(**{"task": BOTH, **changes})
    with rejected("config.batch_size", *message) as error:
        prepare(config, tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    prepare(config, None, training=False)  # an evaluation mixes nothing
