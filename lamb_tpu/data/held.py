"""Training sets in device memory: for each batch, the host sends indices instead of examples.

The host still draws the order of the examples and all random numbers, as for `ArraySource` and
`AugmentedArraySource`, and sends them as small integers. The step gathers and augments the examples
in integer arithmetic, as these sources do on the host, so the batches are the same bit for bit.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.data.images.arrays import AugmentedArraySource, cut_square
from lamb_tpu.data.source import ArraySource, Batch, Source

_INDEX = "index"
_WIDEST = 4  # size in bytes of the largest numbers on a device
_Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class HeldSet:
    """A training set for device memory.

    Attributes:
      arrays: the fields of all examples, with each example flattened to a row. A TPU pads the last
        two axes of an array to tiles, which would multiply the size of small images.
      draws: `(indices, epochs) -> draws`, the indices and random choices that the host sends for a
        batch, each (n, ...).
      read: `(arrays, draws) -> batch`, called in a compiled step.
      shapes: shape of each field of an example.
    """

    arrays: Mapping[str, np.ndarray]
    draws: Callable[[np.ndarray, np.ndarray], Batch]
    read: Callable[[_Arrays, _Arrays], dict[str, jax.Array]]
    shapes: Mapping[str, tuple[int, ...]]

    def fields(self) -> Batch:
        """Returns all examples in their original shapes, without a copy."""
        return {
            name: array.reshape(len(array), *self.shapes[name])
            for name, array in self.arrays.items()
        }


def held_set(source: Source) -> HeldSet | None:
    """Returns `source` as a set for device memory; None if the source is not supported.

    Supports `ArraySource` and `AugmentedArraySource` with numbers of at most 4 bytes.
    """
    if type(source) not in (ArraySource, AugmentedArraySource):
        return None
    assert isinstance(source, ArraySource)
    if any(array.dtype.itemsize > _WIDEST for array in source.arrays.values()):
        return None
    shapes = {name: array.shape[1:] for name, array in source.arrays.items()}
    flat = {
        name: array.reshape(len(array), -1) if array.ndim > 1 else array
        for name, array in source.arrays.items()
    }

    def gathered(arrays: _Arrays, drawn: _Arrays) -> dict[str, jax.Array]:
        rows = drawn[_INDEX]
        return {
            name: array.at[rows].get(mode="promise_in_bounds").reshape(len(rows), *shapes[name])
            for name, array in arrays.items()
        }

    if not isinstance(source, AugmentedArraySource):
        return HeldSet(flat, _indices, gathered, shapes)
    options, mean = source.options, source.mean

    def draws(indices: np.ndarray, epochs: np.ndarray) -> Batch:
        return {**_indices(indices, epochs), **source.draws(indices, epochs)}

    def read(arrays: _Arrays, drawn: _Arrays) -> dict[str, jax.Array]:
        batch = gathered(arrays, drawn)
        images = batch["image"]
        height, width = images.shape[1:3]
        if options.pad:
            sides = ((0, 0), (options.pad, options.pad), (options.pad, options.pad), (0, 0))
            padded = jnp.pad(images, sides, mode=options.numpy_mode)
            images = jax.vmap(
                lambda image, row, column: lax.dynamic_slice(
                    image, (row, column, 0), (height, width, image.shape[2])
                )
            )(padded, drawn["row"], drawn["column"])
        if options.flip:
            images = jnp.where(drawn["mirrored"][:, None, None, None], images[:, :, ::-1], images)
        if options.cutout:
            cut = cut_square(drawn, height, width, options.cutout)
            images = jnp.where(cut[..., None], jnp.asarray(mean), images)
        return {**batch, "image": images}

    return HeldSet(flat, draws, read, shapes)


def _indices(indices: np.ndarray, epochs: np.ndarray) -> Batch:
    del epochs  # every epoch has the same examples
    return {_INDEX: indices.astype(np.int32)}
