"""Means of metrics, and the records: metrics.jsonl and TensorBoard's files."""

import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading, writing
from lamb_tpu.files.uploads import Upload

_FLUSH_SECONDS = 120  # of TensorBoard's files


def fetched(trees: Iterable[Any]) -> Iterator[Any]:
    """Yields each tree as NumPy arrays, with a delay of one tree.

    The devices compute a tree while the host fetches the one before.
    """
    # Asking for the next tree starts its computation, so that comes before the fetch of this one.
    before: list[Any] = []
    for tree in trees:
        yield from map(jax.device_get, before)
        before = [tree]
    yield from map(jax.device_get, before)


def mean_metrics(batches: Iterable[Mapping[str, tuple[jax.Array, jax.Array]]]) -> dict[str, float]:
    """Adds up (sum, weight) pairs over batches and divides once.

    A metric whose name ends with 'perplexity' is the exponential of that mean: its pairs are sums
    of nats and numbers of words. A metric whose weights are all 0, such as those of skipped
    updates, has no mean and is left out. The additions are in float64 on the host, so that the
    number of batches adds no rounding error to that within a batch.
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

    Tables and plots are made from the JSON lines. Each has `step` (completed updates) and `kind`:
    'train', 'eval', 'layers', 'spike', 'target' (the first evaluation that reached it, see
    `lamb_tpu.watch.target`) or 'pictures' (counts of odd and damaged pictures that the first
    process has met in this start, see `lamb_tpu.data.images.tally`). A 'train' record covers the
    updates since the last one. Beside the metrics it has, if they are known:

    - `examples_per_second`, `tokens_per_second` (padding counts as tokens) and `mfu`, the model
      FLOP/s utilisation (`lamb_tpu.cost.flops`) of all devices together, 0 to 1. Evaluation,
      saving and the first update of a start, which waits for the compiler, are left out;
    - `seconds` since the first update began, over all starts: training, evaluation and saving,
      without start-up and compilation;
    - `ratio_min`, `ratio_median`, `ratio_max`: trust ratios of the last update, over the layers
      that adapt; the 'layers' record has each layer's own;
    - `lipschitz`, see `lamb_tpu.parallel.curvature`;
    - statistics of gradients: `noise_scale` and `noise_scale_preconditioned` (averages over all
      updates so far, see `lamb_tpu.watch.noise_scale`), and the means of `noise_scale/grad_sq`,
      `noise_scale/trace`, `similarity`, `similarity/<module>`, `variance`, `grad_sq`,
      `inner_product_variance` and `orthogonal_variance` over the updates that measured them.

    Args:
      workdir: the folder for metrics.jsonl and tensorboard/.
      start_step: the update from which a run resumes. Records of later updates, left by a run that
        was killed after its last checkpoint, are removed first.
      tensorboard: whether to write TensorBoard's files too.
      enabled: False writes nothing, as on every process but the first.
      evaluated: False if the evaluation of `start_step` is still to come: its records are removed
        too.
      failed: called once with a UserError when a file can no longer be written; None raises it.

    Raises:
      UserError: a file cannot be written.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        start_step: int,
        tensorboard: bool,
        enabled: bool = True,
        evaluated: bool = True,
        failed: Callable[[UserError], None] | None = None,
    ) -> None:
        self.path = workdir / "metrics.jsonl"
        self._file: writing.LineFile | None = None
        self._tensorboard: _TensorBoard | None = None
        if not enabled:
            return
        if self.path.exists():
            # This replaces the file, so it comes before the file is opened for appending.
            _remove_records_after(self.path, start_step, evaluated)
        self._file = writing.LineFile(self.path, failed)
        if tensorboard:
            self._tensorboard = _TensorBoard(workdir / "tensorboard", start_step, failed)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Writes one record; it is not lost when the process is killed."""
        if self._file is None:
            return
        record = {"step": step, "kind": kind, **values}
        self._file.write(json.dumps(as_json(record)))
        if self._tensorboard is not None:
            self._tensorboard.write(step, {f"{kind}/{name}": x for name, x in values.items()})

    def flush(self) -> None:
        """Uploads the records that are not yet in a bucket; on a disk nothing is to be done."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Writes what is left; it may be closed already."""
        for file in (self._file, self._tensorboard):
            if file is not None:
                file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _TensorBoard:
    """TensorBoard's file of one start.

    tensorboardX' own writer is not used: a full disk ends its thread with a traceback, and the run
    then waits for that thread forever.

    Args:
      folder: folder of the file; created if it is missing.
      start_step: the update from which a run resumes; TensorBoard hides later updates of earlier
        files.
      failed: see `MetricsWriter`.
    """

    def __init__(
        self, folder: pathlib.Path, start_step: int, failed: Callable[[UserError], None] | None
    ) -> None:
        self._folder, self._failed = folder, failed
        self._upload: Upload | None = None
        begun = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        with writing.checked(folder):
            if buckets.is_remote(folder):
                self._upload = Upload(folder)
                folder = self._upload.local
            folder.mkdir(parents=True, exist_ok=True)
            self._file = event_file_writer.EventsWriter(str(folder / "events"))
            # TensorBoard hides what earlier files have from the step of START on.
            self._add(start_step + 1, file_version="brain.Event:2")
            self._add(start_step + 1, session_log=begun)
            self._flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values by their names; they reach the disk after a while."""
        if self._file is None:
            return
        try:
            with writing.checked(self._folder):
                for name, value in values.items():
                    self._add(step, summary=summary.scalar(name, value))
                # Flushed seldom: metrics.jsonl is the record, and this file a mirror of it.
                if time.monotonic() > self._flushed + _FLUSH_SECONDS:
                    self._flush()
        except UserError as error:
            self._fail(error)

    def _add(self, step: int, **content: Any) -> None:
        self._file.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

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
        """Writes what is left; it may be closed already."""
        if self._file is None:
            return
        # None first, so that a second call does nothing even if this one fails.
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


def read_records(path: pathlib.Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Reads the records of a JSON-lines file; with `kind`, those of a metrics.jsonl of that kind.

    An unfinished last line, as a killed run leaves it, is skipped.

    Raises:
      UserError: the file is missing or cannot be read, or a line is not a record.
    """
    try:
        text = reading.read_text(path, errors="replace")
    except FileNotFoundError:
        raise UserError(f"there is no {path}; is its folder the workdir of a run?") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    records = []
    # What follows the last newline is empty, or an unfinished line.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            record = reading.parse_json(line)
        except ValueError:
            raise UserError(f"line {number} of {path} is not JSON: {line[:80]!r}") from None
        if not isinstance(record, dict):
            raise UserError(f"line {number} of {path} is not a JSON object: {line[:80]!r}")
        records.append(record)
    if kind is None:
        return records
    return [record for record in _of_a_run(path, records) if record["kind"] == kind]


def _of_a_run(path: pathlib.Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checks that each record has step and kind, as all records of a run, and returns them.

    Raises:
      UserError: a record has not; the message names its line.
    """
    for number, record in enumerate(records, start=1):
        if type(record.get("step")) is not int or not isinstance(record.get("kind"), str):
            raise UserError(
                f"line {number} of {path} is not a record with step and kind: {str(record)[:80]!r}"
            )
    return records


def _remove_records_after(path: pathlib.Path, step: int, evaluated: bool) -> None:
    def remains(record: Mapping[str, Any]) -> bool:
        # Records of the update `step` itself stay, but not those of an evaluation that comes anew.
        return record["step"] < step + (record["kind"] not in ("eval", "target") or evaluated)

    kept = [record for record in _of_a_run(path, read_records(path)) if remains(record)]
    # By rename: a run killed here keeps all of its records.
    writing.replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def nonfinite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are not finite."""
    return {name: value for name, value in metrics.items() if _is_nonfinite(value)}


def as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with text in place of values that are not finite: JSON has none."""
    return {k: v if not _is_nonfinite(v) else str(v) for k, v in record.items()}


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and not math.isfinite(value)
