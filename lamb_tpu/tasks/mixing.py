"""mixup and cutmix on the device, between neighbouring examples of a batch.

Rows 2k and 2k + 1 of the global batch are a pair. Their mixture depends only on the two rows, the
step's key and k. If no pair is split between devices or microbatches, the mixture is therefore the same
for any number of devices and microbatches, and no example has to move to another device.
"""

import jax
import jax.numpy as jnp

from lamb_tpu.models.dropout import positions_of

# This number, 'mix' in ASCII, is folded into the key, so that these keys differ from the network's.
_PURPOSE = 0x6D6978


def mix(
    images: jax.Array, key: jax.Array, mixup_alpha: float, cutmix_alpha: float
) -> tuple[jax.Array, jax.Array]:
    """Mixes each image with its partner; returns the mixtures and the shares s, float32 (rows,).

    Each pair's s is drawn from Beta(alpha, alpha). mixup adds s times an image and 1 - s times its
    partner. cutmix exchanges a box between the two images of a pair. The box covers 1 - s of the area
    before its sides are rounded down to even numbers of pixels and it is clipped at the image's edges;
    its centre is random. s is then replaced by the fraction of the pixels outside the box. If both
    methods are enabled, one of them is chosen for each pair, with equal probability.

    Args:
      images: float32 (rows, ...); for cutmix (rows, height, width, ...).
      key: the step's typed random key.
      mixup_alpha, cutmix_alpha: parameters of the Beta distributions, at least 0; 0 disables the
        method. One method at least must be enabled.

    Raises:
      ValueError: the number of rows is odd.

    References:
      Zhang et al., mixup: Beyond Empirical Risk Minimization, 2017.
      Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
        Features, 2019, and its code, clovaai/CutMix-PyTorch.
    """
    rows, *shape = images.shape
    if rows % 2:
        raise ValueError(f"images has {rows} rows, which cannot be paired; use an even number")
    # Make a threefry key, because with an rbg key the bits would depend on a device's number of rows.
    # An rbg key has four words and a threefry key two.
    key = jax.random.wrap_key_data(jax.random.key_data(key).ravel()[:2], impl="threefry2x32")
    key = jax.random.fold_in(key, _PURPOSE)
    pairs = positions_of(rows).reshape(-1, 2)[:, 0] // 2
    # Columns of `chance`, uniform in [0, 1): two for the share, two for the centre of the box, one
    # for the choice between the methods.
    chance = jax.vmap(lambda pair: jax.random.uniform(jax.random.fold_in(key, pair), (5,)))(pairs)

    if not cutmix_alpha:
        share, weights = _mixup(chance, mixup_alpha, shape)
    else:
        share, weights = _cutmix(chance, cutmix_alpha, shape)
        if mixup_alpha:
            chosen = chance[:, 4] < 0.5
            other_share, other_weights = _mixup(chance, mixup_alpha, shape)
            share = jnp.where(chosen, share, other_share)
            weights = jnp.where(_along(chosen, shape), weights, other_weights)
    # (pairs, 2, ...): the two images of a pair next to each other.
    weights, two = weights[:, None], images.reshape(-1, 2, *shape)
    mixed = weights * two + (1 - weights) * two[:, ::-1]
    share = jnp.broadcast_to(share[:, None], (rows // 2, 2)).reshape(rows)
    return mixed.reshape(images.shape), share


def partners(values: jax.Array) -> jax.Array:
    """Swaps the two rows of each pair of an array (rows, ...)."""
    return values.reshape(-1, 2, *values.shape[1:])[:, ::-1].reshape(values.shape)


def symmetric_beta(u: jax.Array, v: jax.Array, alpha: float) -> jax.Array:
    """Draws from Beta(alpha, alpha), from two arrays of independent uniform values in [0, 1).

    The method avoids rejection sampling, which is a loop that all devices would have to leave
    together. t = sqrt(2 alpha (u^(-1 / alpha) - 1)) cos(2 pi v) has Student's distribution with
    2 alpha degrees of freedom, so (1 + t / sqrt(2 alpha + t^2)) / 2 has the Beta distribution.

    References:
      Bailey, Polar Generation of Random Variates with the t-Distribution, 1994.
      Devroye, Random Variate Generation in One Line of Code, 1996.
    """
    exponent = jnp.log1p(-u) / alpha  # log of 1 - u, which is never 0
    # Numerator and denominator are multiplied by u^(1 / alpha), whose inverse may overflow float32.
    power, rest = jnp.exp(exponent), -jnp.expm1(exponent)
    cosine = jnp.cos(2 * jnp.pi * v)
    # 1e-30 avoids 0 / 0 if the power underflows and the cosine is 0.
    ratio = cosine * jnp.sqrt(rest) / jnp.sqrt(power + rest * cosine**2 + 1e-30)
    return (1 + jnp.clip(ratio, -1, 1)) / 2


# Both functions return each pair's share (pairs,), and the share at each pixel as (pairs, ...),
# which broadcasts against one image of each pair.


def _mixup(chance: jax.Array, alpha: float, shape: list[int]) -> tuple[jax.Array, jax.Array]:
    share = symmetric_beta(chance[:, 0], chance[:, 1], alpha)
    return share, _along(share, shape)


def _cutmix(chance: jax.Array, alpha: float, shape: list[int]) -> tuple[jax.Array, jax.Array]:
    height, width, *channels = shape
    # The fraction of each side that the box covers, so that it covers 1 - s of the area.
    side = jnp.sqrt(1 - symmetric_beta(chance[:, 0], chance[:, 1], alpha))
    rows = _stretch(height, side, chance[:, 2])
    columns = _stretch(width, side, chance[:, 3])
    box = rows[:, :, None] & columns[:, None, :]
    area = jnp.sum(rows, 1) * jnp.sum(columns, 1)
    share = jnp.float32(height * width - area) / jnp.float32(height * width)
    return share, jnp.where(box, 0.0, 1.0).reshape(*box.shape, *(1,) * len(channels))


def _stretch(size: int, side: jax.Array, chance: jax.Array) -> jax.Array:
    """Returns which pixels of one side of the image each box covers, bool (pairs, size)."""
    half = jnp.int32(size * side) // 2
    centre = jnp.int32(size * chance)
    pixels = jnp.arange(size, dtype=jnp.int32)
    return (pixels >= (centre - half)[:, None]) & (pixels < (centre + half)[:, None])


def _along(values: jax.Array, shape: list[int]) -> jax.Array:
    return values.reshape(-1, *(1,) * len(shape))
