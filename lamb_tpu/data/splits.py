"""TFDS split syntax: `train`, `train[:1000]`, `train[10%:]`, `train[:50%]+test`."""

from collections.abc import Mapping

from tensorflow_datasets.core import splits as tfds_splits

from lamb_tpu.errors import UserError


def slices(dataset: str, split: str, lengths: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns the parts `(name, start, stop)` of a split, in order.

    Args:
      dataset: name of the data set, for the error message.
      split: the text of the config; TFDS itself parses it, so that both always agree.
      lengths: split name -> number of examples.

    Raises:
      UserError: the text is not a split of this set, or names no example.
    """
    # TFDS resolves a split against its own records of the set; it needs only the lengths.
    infos = {
        name: tfds_splits.SplitInfo(name=name, shard_lengths=[length], num_bytes=0)
        for name, length in lengths.items()
    }
    try:
        parts = tfds_splits.AbstractSplit.from_spec(split).to_absolute(infos)
    # TFDS descends one level for each '+', so thousands of parts exceed Python's limit.
    except (ValueError, NotImplementedError, RecursionError) as error:
        reason, shown = " ".join(str(error).split()), split[:200]
        raise UserError(
            f"data set {dataset}: split {shown!r} is not one ({reason}); it has "
            f"{', '.join(f'{name} ({length:,})' for name, length in lengths.items())}, "
            "and slices such as 'train[:1000]' or 'train[10%:]'"
        ) from error
    ranges = [
        (part.splitname, part.from_ or 0, lengths[part.splitname] if part.to is None else part.to)
        for part in parts
    ]
    if not any(stop > start for _, start, stop in ranges):
        raise UserError(f"data set {dataset}: split {split!r} holds no example")
    return ranges
