"""Reading ahead of the training step, in threads."""

from collections.abc import Callable, Iterator

from lamb_tpu.data.source import Batch

_THREADS = 4
_BATCHES = 4  # batches that are read ahead; more would only take memory


def run_ahead(fetch: Callable[[int], Batch], start: int, stop: int) -> Iterator[Batch]:
    """Yields `fetch(start)` ... `fetch(stop - 1)` in order; threads compute a few results in advance."""
    import grain  # imported here: sets in memory do not need it

    numbers = grain.MapDataset.range(start, stop)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES)
    return iter(numbers.map(fetch).to_iter_dataset(options))
