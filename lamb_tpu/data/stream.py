"""Reading ahead of the training step, in threads."""

from collections.abc import Callable, Iterator

import grain

from lamb_tpu.data.source import Batch

# An element is a whole batch, so a few are enough; more would only take memory.
_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)


def run_ahead(fetch: Callable[[int], Batch], start: int, stop: int) -> Iterator[Batch]:
    """Yields `fetch(start)` to `fetch(stop - 1)` in order; threads compute a few ahead."""
    numbers = grain.MapDataset.range(start, stop)
    return iter(numbers.map(fetch).to_iter_dataset(_READ_OPTIONS))
