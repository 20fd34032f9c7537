"""The folder of a run: its files, and the checks before a run may use it."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lamb_tpu import __version__, custom
from lamb_tpu.cluster import host
from lamb_tpu.config import FREE_KEYS, differences
from lamb_tpu.data import Source, title
from lamb_tpu.data.text import saved
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, leases, locks, reading, writing
from lamb_tpu.optim import durations, leaves
from lamb_tpu.spec import Config, Spec, flatten
from lamb_tpu.store import checkout, checksums, programs, schema

_LISTED = 8  # differing keys in a message
# Files and folders of a run.
_FILES = (
    "config.json",
    "run.jsonl",
    "parameters.txt",
    "init.json",
    "metrics.jsonl",
    "mlperf.log",
    ".lock",
    saved.VOCABULARY,
    saved.SETTINGS,
)
_FOLDERS = ("checkpoints", "tensorboard", programs.FOLDER)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Workdir:
    """The files of a run, below one folder.

    Attributes:
      config: path of config.json, the resolved config.
      run: path of run.jsonl, with the versions, hardware and command of each start that trained.
      init: path of init.json, with the source of the initial weights; missing if they were random.
    """

    def __init__(self, path: str | os.PathLike[str], key: str = "--workdir") -> None:
        """Stores the folder, and the flag or config key that names the folder in error messages."""
        self._key = key
        try:
            os.fspath(path).encode()
        except UnicodeError:
            problem, remedy = "is not UTF-8", "give a folder with another name"
            raise UserError(key, os.fspath(path), problem, remedy) from None
        self.path = buckets.parse(path, key)
        self.config = self.path / "config.json"
        self.run = self.path / "run.jsonl"
        self.parameters = self.path / "parameters.txt"
        self.init = self.path / "init.json"
        self.checkpoints = self.path / "checkpoints"

    def check(
        self, config: Config, free_keys: tuple[str, ...] = FREE_KEYS, writes: bool = True
    ) -> None:
        """Creates the folder if it is missing; rejects it if a run of this config may not use it.

        The keys `free_keys` may differ from the config in the folder. If `writes` is False, a missing
        folder is not created, and the folder may be read-only.
        """
        if self._in_bucket:
            buckets.check(self.path, self._key)
        try:
            if writes:
                if not self._in_bucket:
                    self.path.mkdir(parents=True, exist_ok=True)
                writing.try_out(self.path)
        except OSError as error:
            raise self._error(f"cannot be written ({error.strerror})") from None
        # Check this before reading anything, so that a folder called config.json gets a clear message.
        self._check_types()
        # A run that has begun continues only with the same config.
        if self.config.exists():
            stored, new = self.read_config(), flatten(config)
            # A config stored by an earlier version lacks the keys that were added later.
            old = {key: value for key, value in flatten(Spec()).items() if key in new} | stored
            changed = differences(old, new, free_keys)
            if changed:
                more = f"; and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
                raise self._error(
                    f"holds a run of another config ({'; '.join(changed[:_LISTED])}{more})",
                    "give another folder, or the config of that run"
                    f"{self._how_to_extend(old, new) if len(changed) == 1 else ''}",
                )
        elif self.has_checkpoint():
            raise self._error("holds checkpoints but no config.json to compare with")

    def _error(self, problem: str, remedy: str = "give another folder") -> UserError:
        return UserError(f"{self._key} {self.path}", problem=problem, remedy=remedy)

    @property
    def _in_bucket(self) -> bool:
        return buckets.is_remote(self.path)

    def _how_to_extend(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        """Returns advice if the new config only makes the run longer; '' for other changes."""
        try:
            # A config without the key or with an invalid duration gets no advice.
            before, after = (durations.parse(config["duration"]) for config in (old, new))
        except (KeyError, ValueError):
            return ""
        more = after.value - before.value
        if before.unit != after.unit or more <= 0:
            return ""
        return (
            "; to train longer, give another folder and --config.init_from="
            f"{shlex.quote(str(self.path))} --config.init.optimizer_state=keep "
            f"--config.duration='{durations.Duration(more, after.unit)}' --config.seed="
            f"{new['seed'] + 1}: the schedule starts again, and the data come in another order"
        )

    def _check_types(self) -> None:
        """Rejects a folder with an entry of the wrong type, such as a folder named config.json."""
        if self._in_bucket:  # buckets have no folders
            return
        for names, wanted in ((_FILES, "a file"), (_FOLDERS, "a folder")):
            for name in names:
                try:
                    actual = reading.kind(self.path / name)
                    if actual == "a file" and not os.access(self.path / name, os.R_OK):
                        actual = "an unreadable path (Permission denied)"
                except OSError as error:
                    actual = f"an unreadable path ({error.strerror})"
                if actual not in (None, wanted):
                    raise UserError(
                        f"{self._key} {self.path}: {name}",
                        problem=f"is {actual}, not {wanted}",
                        remedy="move it away, or give another folder",
                    )

    def has_checkpoint(self) -> bool:
        """Returns whether the folder has a checkpoint, intact or damaged."""
        if self._in_bucket:
            return any(map(checksums.is_committed, buckets.children(self.checkpoints)))
        # Only complete saves have a number as their name.
        return any(path.name.isdecimal() for path in self.checkpoints.glob("*/"))

    @contextlib.contextmanager
    def hold(
        self, enabled: bool = True, lost: Callable[[UserError], None] = lambda error: None
    ) -> Iterator[None]:
        """Locks the folder against a second run on this machine or, in a bucket, on any machine.

        Only the run's first process sets `enabled`. If the lock in a bucket is lost, a thread calls
        `lost`.
        """
        if not enabled:
            yield
            return
        lock, named = self.path / ".lock", f"{self._key} {self.path}"
        remedy = "wait until it ends, or give another folder"
        busy = UserError(named, ..., "is in use by another run", remedy)
        with leases.hold(lock, named, lost) if self._in_bucket else locks.hold(lock, busy):
            yield

    def read_config(self) -> dict[str, Any]:
        """Returns the flattened config of the run in this folder."""
        if self._in_bucket:
            buckets.check(self.path, self._key)
        config = self._read(self.config)
        if config is None:
            if reading.kind(self.path) not in (None, "a folder"):
                raise self._error("is not a folder", "give the folder of a run")
            raise self._error("holds no run: config.json is missing", "give the folder of a run")
        # A flat config has keys such as 'model.name', but no key 'model'.
        sections = {key[:at] for key in config for at, char in enumerate(key) if char == "."}
        if sections & config.keys() or any(isinstance(x, dict) for x in config.values()):
            raise self._damaged(self.config, "its keys are not those of a config")
        schema.check_config(config, str(self.config))
        return config

    def read_init(self) -> dict[str, Any] | None:
        """Returns the record of `write_init`; None if the initial weights were random."""
        record = self._read(self.init)
        if record is not None:
            types = {
                "init_from": str,
                "update": int | None,
                "optimizer_state": str,
                "updates_before": int,
            }
            for name, wanted in types.items():
                if name not in record or not isinstance(record[name], wanted):
                    raise self._damaged(self.init, f"its {name} is missing or has the wrong type")
        return record

    def write_init(self, record: Mapping[str, Any]) -> None:
        """Writes the record of the initial weights."""
        writing.replace(self.init, json.dumps(record, indent=1) + "\n")

    def _read(self, file: pathlib.Path) -> dict[str, Any] | None:
        try:
            content = reading.read_json(file)
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
            return content
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damaged(file, str(error)) from None

    def _damaged(self, file: pathlib.Path, reason: str) -> UserError:
        remedy = f"restore it or give another {self._key}"
        return UserError(file, problem=f"is damaged ({reason})", remedy=remedy)

    def check_parameters(self, table: str) -> None:
        """Rejects a resumed run if the metadata of a parameter have changed since the run began."""
        if not self.parameters.exists():
            return
        # A damaged file need not be UTF-8.
        before = self.parameters.read_bytes().decode(errors="replace")
        if (difference := leaves.difference(before, table)) is not None:
            raise UserError(
                "the parameter table",
                problem=f"differs from {self.parameters} ({difference}): the run began with a different "
                "model or different rules",
                remedy="give another --workdir",
            )

    def write_file(self, name: str, text: str) -> None:
        """Writes a file into the folder atomically."""
        writing.replace(self.path / name, text)

    def check_text(self, source: Source) -> None:
        """Rejects a resumed run if the vocabulary of `source` has changed since the run began."""
        if source.vocabulary is not None and (self.path / saved.VOCABULARY).exists():
            vocabulary, cased = saved.read(self.path)
            if (vocabulary.tokens, cased) != (source.vocabulary.tokens, source.cased):
                raise UserError(
                    f"the vocabulary of {title(source)}",
                    problem=f"differs from {saved.VOCABULARY} (cased={cased}) in {self._key} "
                    f"{self.path}",
                    remedy="give the text with which the run began, or another folder",
                )

    def write_config(self, config: Config) -> None:
        """Writes the config into the folder."""
        writing.replace(self.config, json.dumps(flatten(config), indent=1) + "\n")

    def write_receipt(
        self, spec: Spec, table: str, details: Mapping[str, Any], source: Source | None = None
    ) -> None:
        """Writes the config, the parameter table, and the versions and hardware of this start.

        Also writes the vocabulary of `source`, the training set, if it is text.
        """
        self.write_config(spec)
        writing.replace(self.parameters, table)
        if source is not None and source.vocabulary is not None:
            saved.save(self.path, source.vocabulary, source.cased)
        # Versions and hardware may differ between starts, so each start has a line.
        record = {
            "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
            "lamb_tpu": __version__,
            "commit": checkout.commit(),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "processor": host.processor(),
            "NPROC": os.environ.get("NPROC"),  # number of XLA threads, which affects rounding
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            **({"own": modules} if (modules := custom.receipt(_names(spec))) else {}),
            **details,
        }
        lines = writing.LineFile(self.run)
        lines.write(json.dumps(record))
        lines.close()


def _names(spec: Spec) -> list[str]:
    sections = (spec.model, spec.task, spec.data, spec.optimizer, spec.batch_rule)
    return [each.name for each in (*sections, spec.parallel.exchange)] + [spec.schedule.decay]
