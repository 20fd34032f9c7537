"""Overlap of reading with the step: a function of a batch number, run ahead by threads."""

from collections.abc import Callable, Iterator

import grain

from lamb_tpu.data.source import Batch

# An element is a whole batch, so a few are enough and more would only hold memory.
_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)


def run_ahead(fetch: Callable[[int], Batch], start: int, stop: int) -> Iterator[Batch]:
    """Yields `fetch(start)` to `fetch(stop - 1)` in order, computing a few ahead in threads."""
    numbers = grain.MapDataset.range(start, stop)
    return iter(numbers.map(fetch).to_iter_dataset(_READ_OPTIONS))
