"""mixup and cutmix on the device, between neighbouring examples of a batch.

Rows 2k and 2k + 1 of the global batch are a pair. Their mixture is a function of the step's key and
of k. So it is the same on any number of devices and in microbatches, as long as no pair is split,
and no example has to move to another device.
"""

import jax
import jax.numpy as jnp

from lamb_tpu.models.dropout import positions_of

# Folded into the key, so that a network's keys from the same key differ from these.
# The number is 'mix' in ASCII.
_PURPOSE = 0x6D6978


def mix(
    images: jax.Array, key: jax.Array, mixup_alpha: float, cutmix_alpha: float
) -> tuple[jax.Array, jax.Array]:
    """Mixes each image with its partner; returns the images and the share that is its own.

    mixup adds s times an image and 1 - s times its partner, with s from Beta(alpha, alpha). cutmix
    exchanges a box between the two images of a pair. The box has the area 1 - s; its sides are
    rounded down to even numbers of pixels, its centre is a random pixel, and it is cut off at the
    image's edge. s then becomes the share of the pixels outside the box. If both are asked for,
    each pair is mixed by one of them, with equal probability.

    The rows' positions in the global batch come from `models.dropout.example_positions`.

    Args:
      images: float32 (rows, ...); for cutmix (rows, height, width, ...).
      key: the step's typed random key.
      mixup_alpha, cutmix_alpha: parameters of the Beta distributions, at least 0; 0 disables that
        method. Not both are 0.

    Returns:
      Images of the same shape, and the shares s, float32 (rows,).

    Raises:
      ValueError: the number of rows is odd.

    References:
      Zhang et al., mixup: Beyond Empirical Risk Minimization, 2017.
      Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
        Features, 2019, and its code, clovaai/CutMix-PyTorch.
    """
    rows, *shape = images.shape
    if rows % 2:
        raise ValueError(f"there are {rows} rows to be mixed in pairs; it takes an even number")
    # With an 'rbg' key the bits would depend on how many rows a device has.
    # An rbg key has four words, a threefry key two.
    key = jax.random.wrap_key_data(jax.random.key_data(key).ravel()[:2], impl="threefry2x32")
    key = jax.random.fold_in(key, _PURPOSE)
    pairs = positions_of(rows).reshape(-1, 2)[:, 0] // 2
    # Columns of `chance`, uniform in [0, 1): two for the share, two for the centre of the box, one
    # for the choice between the two methods.
    chance = jax.vmap(lambda pair: jax.random.uniform(jax.random.fold_in(key, pair), (5,)))(pairs)

    if not cutmix_alpha:
        share, own = _mixup(chance, mixup_alpha, shape)
    else:
        share, own = _cutmix(chance, cutmix_alpha, shape)
        if mixup_alpha:
            chosen = chance[:, 4] < 0.5
            other_share, other_own = _mixup(chance, mixup_alpha, shape)
            share = jnp.where(chosen, share, other_share)
            own = jnp.where(_along(chosen, shape), own, other_own)
    # (pairs, 2, ...): the two images of a pair beside each other.
    own, two = own[:, None], images.reshape(-1, 2, *shape)
    mixed = own * two + (1 - own) * two[:, ::-1]
    share = jnp.broadcast_to(share[:, None], (rows // 2, 2)).reshape(rows)
    return mixed.reshape(images.shape), share


def partners(values: jax.Array) -> jax.Array:
    """Swaps the two rows of each pair, (rows, ...)."""
    return values.reshape(-1, 2, *values.shape[1:])[:, ::-1].reshape(values.shape)


def symmetric_beta(u: jax.Array, v: jax.Array, alpha: float) -> jax.Array:
    """Draws from Beta(alpha, alpha), from two arrays of independent uniform values in [0, 1).

    The method needs no rejection, which would be a loop that all devices must leave together. If t
    has Student's distribution with 2 alpha degrees of freedom, (1 + t / sqrt(2 alpha + t^2)) / 2
    has the Beta distribution, and t = sqrt(2 alpha (u^(-1 / alpha) - 1)) cos(2 pi v).

    References:
      Bailey, Polar Generation of Random Variates with the t-Distribution, 1994.
      Devroye, Random Variate Generation in One Line of Code, 1996.
    """
    exponent = jnp.log1p(-u) / alpha  # log of 1 - u, which is never 0
    # Numerator and denominator are multiplied by u^(1 / alpha), whose inverse may overflow float32.
    power, rest = jnp.exp(exponent), -jnp.expm1(exponent)
    cosine = jnp.cos(2 * jnp.pi * v)
    # 1e-30 avoids 0 / 0 where the power underflows and the cosine is 0.
    ratio = cosine * jnp.sqrt(rest) / jnp.sqrt(power + rest * cosine**2 + 1e-30)
    return (1 + jnp.clip(ratio, -1, 1)) / 2


# Both return each pair's share (pairs,), and the own share of each pixel as (pairs, ...), which
# broadcasts against one image of each pair.


def _mixup(chance: jax.Array, alpha: float, shape: list[int]) -> tuple[jax.Array, jax.Array]:
    share = symmetric_beta(chance[:, 0], chance[:, 1], alpha)
    return share, _along(share, shape)


def _cutmix(chance: jax.Array, alpha: float, shape: list[int]) -> tuple[jax.Array, jax.Array]:
    height, width, *channels = shape
    # As a share of each side of the image, so that the area is 1 - s.
    side = jnp.sqrt(1 - symmetric_beta(chance[:, 0], chance[:, 1], alpha))
    rows = _stretch(height, side, chance[:, 2])
    columns = _stretch(width, side, chance[:, 3])
    box = rows[:, :, None] & columns[:, None, :]
    area = jnp.sum(rows, 1) * jnp.sum(columns, 1)
    share = jnp.float32(height * width - area) / jnp.float32(height * width)
    return share, jnp.where(box, 0.0, 1.0).reshape(*box.shape, *(1,) * len(channels))


def _stretch(size: int, side: jax.Array, chance: jax.Array) -> jax.Array:
    """Pixels along a side of the image that each box covers, bool (pairs, size)."""
    half = jnp.int32(size * side) // 2
    centre = jnp.int32(size * chance)
    pixels = jnp.arange(size, dtype=jnp.int32)
    return (pixels >= (centre - half)[:, None]) & (pixels < (centre + half)[:, None])


def _along(values: jax.Array, shape: list[int]) -> jax.Array:
    """Reshapes values (pairs,) to (pairs, 1, ...), to broadcast against images."""
    return values.reshape(-1, *(1,) * len(shape))
