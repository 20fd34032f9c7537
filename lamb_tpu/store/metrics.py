"""Means of metrics, and a run's records: metrics.jsonl and TensorBoard files."""

import json
import math
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lamb_tpu.errors import ABSENT, UserError, shown, unreadable
from lamb_tpu.files import buckets, reading, writing
from lamb_tpu.files.uploads import Upload
from lamb_tpu.store import schema

_FLUSH_SECONDS = 120  # between flushes of a TensorBoard file


def fetched(trees: Iterable[Any]) -> Iterator[Any]:
    """Yields each tree as NumPy arrays, while the devices compute the next tree."""
    # Requesting the next tree starts its computation, so do that before fetching this tree.
    before: list[Any] = []
    for tree in trees:
        yield from map(jax.device_get, before)
        before = [tree]
    yield from map(jax.device_get, before)


def mean_metrics(batches: Iterable[Mapping[str, tuple[jax.Array, jax.Array]]]) -> dict[str, float]:
    """Adds up (sum, weight) pairs over batches and divides once.

    A metric whose name ends with 'perplexity' is the exponential of the mean: its pairs are sums of
    nats and numbers of words. A metric whose weights are all 0, for example because all updates were
    skipped, is left out. The host adds in float64, so that the number of batches adds no rounding
    error.
    """
    totals: dict[str, list[float]] = {}
    for batch in fetched(batches):
        for name, (total, weight) in batch.items():
            entry = totals.setdefault(name, [0.0, 0.0])
            entry[0] += float(total)
            entry[1] += float(weight)
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    return {
        name: _exp(mean) if name.endswith("perplexity") else mean for name, mean in means.items()
    }


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


class MetricsWriter:
    """Appends records to metrics.jsonl, one JSON object a line, and mirrors them to TensorBoard.

    Tables and plots are made from these records. Each has `step` (completed updates) and `kind`:
    'train', 'eval', 'layers', 'spike', 'target' (the first evaluation that reached the target, see
    `lamb_tpu.watch.target`) or 'pictures' (counts of unusual and damaged images that process 0 has
    read since it started, see `lamb_tpu.data.images.tally`). A 'train' record covers the updates
    since the previous 'train' record. Besides the metrics, it has these values, if they are known:

    - `examples_per_second`, `tokens_per_second` (padding counts as tokens) and `mfu`, the model
      FLOP/s utilisation (`lamb_tpu.cost.flops`) of all devices, 0 to 1. These exclude evaluation,
      saving, and the first update after a start or resumption, which includes compilation;
    - `seconds`: total time of training, evaluation and saving since the run began, without start-up
      and compilation;
    - `ratio_min`, `ratio_median`, `ratio_max`: smallest, median and largest trust ratio of the
      adaptive layers in the last update; the 'layers' record has the ratio of each layer;
    - `lipschitz`, see `lamb_tpu.parallel.curvature`;
    - statistics of gradients: `noise_scale` and `noise_scale_preconditioned` (from averages over
      all updates so far, see `lamb_tpu.watch.noise_scale`), and the means of `noise_scale/grad_sq`,
      `noise_scale/trace`, `similarity`, `similarity/<module>`, `variance`, `grad_sq`,
      `inner_product_variance` and `orthogonal_variance` over the updates of this record that
      measured them.

    Args:
      workdir: the folder for metrics.jsonl and tensorboard/.
      start_step: the update from which a run resumes. Records of later updates, left by a run that
        was killed after its last checkpoint, are removed first.
      tensorboard: whether to write TensorBoard files too.
      enabled: if False, writes nothing; used in all processes but the first.
      evaluated: False if the run will evaluate update `start_step` again, so that records of this
        evaluation are removed too.
      failed: called once with a UserError when a file can no longer be written; if None, the error
        is raised.
      expected: number of records, by kind, when `start_step` was saved; see `Position.records`.

    Attributes:
      counts: number of records in the file, by kind; empty if `enabled` is False.
      missing: number of `expected` records that the file lacks, by kind.
      steps: updates whose evaluation records the file had when it was opened.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        start_step: int,
        tensorboard: bool,
        enabled: bool = True,
        evaluated: bool = True,
        failed: Callable[[UserError], None] | None = None,
        expected: Mapping[str, int] = {},
    ) -> None:
        self.path = workdir / "metrics.jsonl"
        self.counts, self.missing = Counter[str](), dict[str, int]()
        self.steps = set[int]()
        self._file: writing.LineFile | None = None
        self._tensorboard: _TensorBoard | None = None
        if not enabled:
            return
        if self.path.exists():
            # This replaces the file, so do it before opening the file for appending.
            remaining = _remove_records_after(self.path, start_step, evaluated)
            self.counts.update(record["kind"] for record in remaining)
            self.steps = {record["step"] for record in remaining if record["kind"] == "eval"}
        lacking = {kind: count - self.counts[kind] for kind, count in expected.items()}
        self.missing = {kind: count for kind, count in lacking.items() if count > 0}
        self._file = writing.LineFile(self.path, failed)
        if tensorboard:
            self._tensorboard = _TensorBoard(workdir / "tensorboard", start_step, failed)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Writes one record, which survives a kill of the process."""
        if self._file is None:
            return
        record = {"step": step, "kind": kind, **values}
        self._file.write(json.dumps(as_json(record)))
        self.counts[kind] += 1
        if self._tensorboard is not None:
            self._tensorboard.write(step, {f"{kind}/{name}": x for name, x in values.items()})

    def flush(self) -> None:
        """Makes all records survive a power failure; uploads new ones if the file is in a bucket."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Writes the remaining data; a second call does nothing."""
        for file in (self._file, self._tensorboard):
            if file is not None:
                file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _TensorBoard:
    """The TensorBoard file that one process writes.

    Does not use the writer of tensorboardX: a full disk would end that writer's thread with a
    traceback, and the run would then wait for the thread forever.
    """

    def __init__(
        self, folder: pathlib.Path, start_step: int, failed: Callable[[UserError], None] | None
    ) -> None:
        self._folder, self._failed = folder, failed
        self._upload: Upload | None = None
        try:  # imported here because it takes a third of a second
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        except ModuleNotFoundError as error:
            problem = f"needs the package {error.name}, which is not installed"
            remedy = "install the extra train (pip install '.[train]'), or use False"
            raise UserError("config.log.tensorboard", True, problem, remedy) from error
        self._new_event, self._scalar = event_pb2.Event, summary.scalar
        begun = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        with writing.checked(folder):
            if buckets.is_remote(folder):
                self._upload = Upload(folder)
                folder = self._upload.local
            folder.mkdir(parents=True, exist_ok=True)
            self._file = event_file_writer.EventsWriter(str(folder / "events"))
            # TensorBoard hides the values of previous files from the step of the START event on.
            self._add(start_step + 1, file_version="brain.Event:2")
            self._add(start_step + 1, session_log=begun)
            self._flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values by name; they are flushed from time to time."""
        if self._file is None:
            return
        try:
            with writing.checked(self._folder):
                for name, value in values.items():
                    self._add(step, summary=self._scalar(name, value))
                # Flush rarely: this file only mirrors metrics.jsonl.
                if time.monotonic() > self._flushed + _FLUSH_SECONDS:
                    self._flush()
        except UserError as error:
            self._fail(error)

    def _add(self, step: int, **content: Any) -> None:
        self._file.write_event(self._new_event(wall_time=time.time(), step=step, **content))

    def _flush(self) -> None:
        self._file.flush()
        if self._upload is not None:
            self._upload.now()
        self._flushed = time.monotonic()

    def _fail(self, error: UserError) -> None:
        # Later values are dropped, so `failed` is called once.
        self._file = None
        if self._failed is None:
            raise error
        self._failed(error)

    def close(self) -> None:
        """Writes the remaining data; a second call does nothing."""
        if self._file is None:
            return
        # Set `_file` to None first, so that a second call does nothing even if this call fails.
        file, self._file = self._file, None
        try:
            with writing.checked(self._folder):
                file.close()
                if self._upload is not None:
                    self._upload.now()
        except UserError as error:
            self._fail(error)
        finally:
            if self._upload is not None:
                self._upload.close()


def read_records(
    path: pathlib.Path, kind: str | None = None, keys: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Reads the records of a JSON-lines file; `kind` selects the records of one kind in a metrics.jsonl.

    Skips an incomplete last line, which a killed run may leave. Rejects records of this kind that
    lack one of the `keys`.
    """
    if kind is None:
        return [record for _, record in _read_lines(path)]
    records = []
    for where, record in _read_lines(path, schema.check_metrics):
        if record["kind"] == kind:
            for key in keys:
                if key not in record:
                    raise UserError(f"{where}: {key}", ABSENT, "is missing", "restore the file")
            records.append(record)
    return records


def read_receipts(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a run.jsonl: versions and hardware at each start or resumption; see `read_records`."""
    return [receipt for _, receipt in _read_lines(path, schema.check_receipt)]


def _read_lines(
    path: pathlib.Path, check: Callable[[Any, str], None] = lambda record, where: None
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the name ('line 1 of FILE') and the object of each line of a JSON-lines file."""
    try:
        text = reading.read_text(path, errors="replace")
    except FileNotFoundError:
        raise UserError(path, ABSENT, "does not exist", "give the workdir of a run") from None
    except ValueError as error:
        raise unreadable(path, error, "restore the file") from None
    # Text after the last newline is empty or an incomplete line.
    lines = [
        (f"line {number} of {path}", parse_line(line, f"line {number} of {path}"))
        for number, line in enumerate(text.split("\n")[:-1], start=1)
    ]
    for where, record in lines:
        check(record, where)
    return lines


def parse_line(line: str, where: str) -> dict[str, Any]:
    """Parses a line of a JSON-lines file; messages name the line as `where`, such as 'line 3 of FILE'."""
    try:
        record = reading.parse_json(line)
    except ValueError:
        raise UserError(where, ABSENT, f"is not JSON: {shown(line)}", "restore the file") from None
    if not isinstance(record, dict):
        problem = f"is not a JSON object: {shown(line)}"
        raise UserError(where, ABSENT, problem, "restore the file")
    return record


def _remove_records_after(path: pathlib.Path, step: int, evaluated: bool) -> list[dict[str, Any]]:
    def remains(record: Mapping[str, Any]) -> bool:
        # Records of update `step` stay, except those of an evaluation that will be repeated.
        return record["step"] < step + (record["kind"] not in ("eval", "target") or evaluated)

    lines = _read_lines(path, schema.check_metrics)
    remaining = [record for _, record in lines if remains(record)]
    # Replace by renaming: a run that is killed here keeps all of its records.
    writing.replace(path, "".join(json.dumps(record) + "\n" for record in remaining))
    return remaining


def nonfinite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are not finite."""
    return {name: value for name, value in metrics.items() if _is_nonfinite(value)}


def as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with text in place of non-finite values, which JSON does not have."""
    return {k: v if not _is_nonfinite(v) else str(v) for k, v in record.items()}


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and not math.isfinite(value)
