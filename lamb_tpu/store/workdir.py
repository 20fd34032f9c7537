"""The folder of a run: its files, and the checks before it is used again."""

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
from ml_collections import ConfigDict

from lamb_tpu import __version__, own
from lamb_tpu.cluster import host
from lamb_tpu.config import FREE_KEYS, differences, flatten, renamed
from lamb_tpu.data import Source, title
from lamb_tpu.data.text import saved
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, leases, locks, reading, writing
from lamb_tpu.optim import durations, leaves
from lamb_tpu.store import checkout, checksums, programs

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
    """Paths of a run's files, below one folder.

    Attributes:
      path: the folder.
      config: the resolved config, as JSON.
      run: versions, hardware and the command, one JSON line for each start that trained.
      parameters: the table of parameter facts.
      init: source of the initial weights, as JSON; only if they were not random.
      checkpoints: Orbax' folder of checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str], key: str = "--workdir") -> None:
        """Takes the folder and the flag or config key that names it in error messages."""
        self._key = key
        try:
            os.fspath(path).encode()
        except UnicodeError:
            raise UserError(
                f"{key} {os.fspath(path)!r} is not UTF-8; give a folder with another name"
            ) from None
        self.path = buckets.parse(path, key)
        self.config = self.path / "config.json"
        self.run = self.path / "run.jsonl"
        self.parameters = self.path / "parameters.txt"
        self.init = self.path / "init.json"
        self.checkpoints = self.path / "checkpoints"

    def check(
        self, config: ConfigDict, free_keys: tuple[str, ...] = FREE_KEYS, writes: bool = True
    ) -> None:
        """Creates a missing folder, and refuses a folder that this config may not write into.

        Existing files are not changed. `free_keys` of the config may differ from the folder's.
        Without `writes` the folder may be read-only.

        Raises:
          UserError: the folder cannot be written, or holds a run of another config, or checkpoints
            without a config.
        """
        if self._in_bucket:
            buckets.check(self.path, self._key)
        try:
            if writes:
                if not self._in_bucket:
                    self.path.mkdir(parents=True, exist_ok=True)
                writing.try_out(self.path)
        except OSError as error:
            raise UserError(
                f"{self._key} {self.path} cannot be written ({error.strerror}); give a folder "
                "that can"
            ) from None
        # Before anything is read, so that a folder called config.json is told as what it is.
        self._check_kinds()
        # A run that has begun goes on only with the config that it began with.
        if self.config.exists():
            old, new = self.read_config(), flatten(config)
            changed = differences(old, new, free_keys)
            if changed:
                more = f"; and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
                raise UserError(
                    f"{self._key} {self.path} holds a run of another config "
                    f"({'; '.join(changed[:_LISTED])}{more}); give another folder, or the run's "
                    f"own config{self._how_to_go_on(old, new) if len(changed) == 1 else ''}"
                )
        elif self.has_checkpoint():
            raise UserError(
                f"{self._key} {self.path} holds checkpoints but no config.json to compare with; "
                "give another folder"
            )

    @property
    def _in_bucket(self) -> bool:
        return buckets.is_remote(self.path)

    def _how_to_go_on(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        """Returns advice for a run that is asked to be longer; '' for other changes."""
        try:
            # A config without the key or with an invalid length gets no advice.
            before, after = (durations.parse(config["duration"]) for config in (old, new))
        except (KeyError, ValueError):
            return ""
        more = after.value - before.value
        if before.unit != after.unit or more <= 0:
            return ""
        return (
            "; a schedule is planned for a whole run, so to train on from where this one ends, "
            "give another folder and --config.init_from="
            f"{shlex.quote(str(self.path))} --config.init.optimizer_state=keep "
            f"--config.duration='{durations.Duration(more, after.unit)}' --config.seed="
            f"{new['seed'] + 1}: its schedule starts anew, and the data come in another order"
        )

    def _check_kinds(self) -> None:
        """Refuses a folder in which a file's name belongs to a folder, or the reverse."""
        if self._in_bucket:  # which has no folders
            return
        for names, wanted in ((_FILES, "a file"), (_FOLDERS, "a folder")):
            for name in names:
                try:
                    found = reading.kind(self.path / name)
                    if found == "a file" and not os.access(self.path / name, os.R_OK):
                        found = "unreadable (Permission denied)"
                except OSError as error:
                    found = f"unreadable ({error.strerror})"
                if found not in (None, wanted):
                    raise UserError(
                        f"{self._key} {self.path}: {name} is {found}, and must be {wanted}; move "
                        "it away, or give another folder"
                    )

    def has_checkpoint(self) -> bool:
        """Returns whether the folder has a checkpoint, whole or damaged."""
        if self._in_bucket:
            return any(map(checksums.is_committed, buckets.children(self.checkpoints)))
        # Unfinished saves have other names than a number.
        return any(path.name.isdecimal() for path in self.checkpoints.glob("*/"))

    @contextlib.contextmanager
    def hold(
        self, enabled: bool = True, lost: Callable[[UserError], None] = lambda error: None
    ) -> Iterator[None]:
        """Keeps a second run out of the folder: one on this machine, or any if it is in a bucket.

        Args:
          enabled: False does nothing, as on every process but the first.
          lost: called with an error, in a thread, if the lock in a bucket is lost.

        Raises:
          UserError: another run holds the folder.
        """
        if not enabled:
            yield
            return
        lock, named = self.path / ".lock", f"{self._key} {self.path}"
        refusal = f"{named} is in use by another run; wait until it ends, or give another folder"
        with leases.hold(lock, named, lost) if self._in_bucket else locks.hold(lock, refusal):
            yield

    def read_config(self) -> dict[str, Any]:
        """Returns the flattened config that the run in this folder was started with.

        Raises:
          UserError: the folder has no config, or it is damaged.
        """
        if self._in_bucket:
            buckets.check(self.path, self._key)
        config = self._read(self.config)
        if config is None:
            if reading.kind(self.path) not in (None, "a folder"):
                raise UserError(f"{self._key} {self.path} is no folder; give the folder of a run")
            raise UserError(f"{self._key} {self.path} holds no run: config.json is missing")
        # A flat config has keys such as 'model.name' and no key 'model' beside them.
        sections = {key[:at] for key in config for at, char in enumerate(key) if char == "."}
        if sections & config.keys() or any(isinstance(x, dict) for x in config.values()):
            raise self._damaged(self.config, "its keys are not those of a config")
        return renamed(config)

    def read_init(self) -> dict[str, Any] | None:
        """Returns the record of `write_init`; None if the initial weights were random.

        Raises:
          UserError: the record is damaged.
        """
        record = self._read(self.init)
        if record is not None:
            kinds = {
                "init_from": str,
                "update": int | None,
                "optimizer_state": str,
                "updates_before": int,
            }
            for name, wanted in kinds.items():
                if name not in record or not isinstance(record[name], wanted):
                    raise self._damaged(self.init, f"its {name} is missing or of the wrong type")
        return record

    def write_init(self, record: Mapping[str, Any]) -> None:
        """Writes the record of the initial weights."""
        writing.replace(self.init, json.dumps(record, indent=1) + "\n")

    def _read(self, file: pathlib.Path) -> dict[str, Any] | None:
        try:
            found = reading.read_json(file)
            if not isinstance(found, dict):
                raise ValueError("it is not a JSON object")
            return found
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damaged(file, str(error)) from None

    def _damaged(self, file: pathlib.Path, reason: str) -> UserError:
        return UserError(f"{file} is damaged ({reason}); restore it or give another {self._key}")

    def check_parameters(self, table: str) -> None:
        """Rejects a resume if the facts of a parameter have changed since the run began."""
        if not self.parameters.exists():
            return
        # A damaged file need not be UTF-8.
        before = self.parameters.read_bytes().decode(errors="replace")
        if (difference := leaves.difference(before, table)) is not None:
            raise UserError(
                f"the parameter table differs from {self.parameters} ({difference}), so this is "
                "not the model or the rules that the run began with; give another --workdir"
            )

    def write_file(self, name: str, text: str) -> None:
        """Writes a file into the folder; a reader sees the old file or the new one.

        Raises:
          UserError: the file cannot be written.
        """
        writing.replace(self.path / name, text)

    def check_text(self, source: Source) -> None:
        """Refuses to resume if the vocabulary of a text has changed since the run began."""
        if source.vocabulary is not None and (self.path / saved.VOCABULARY).exists():
            vocabulary, cased = saved.read(self.path)
            if (vocabulary.tokens, cased) != (source.vocabulary.tokens, source.cased):
                raise UserError(
                    f"the vocabulary of {title(source)} is not that of {self._key} {self.path}, "
                    f"{saved.VOCABULARY} with cased={cased}; give the text that the run began "
                    "with, or another folder"
                )

    def write_config(self, config: ConfigDict) -> None:
        """Writes the config into the folder."""
        writing.replace(self.config, json.dumps(flatten(config), indent=1) + "\n")

    def write_receipt(
        self, config: ConfigDict, table: str, facts: Mapping[str, Any], source: Source | None = None
    ) -> None:
        """Writes config, parameter table, and versions and hardware of this start of the run.

        With `source`, the training set, it also writes the vocabulary of a text.
        """
        self.write_config(config)
        writing.replace(self.parameters, table)
        if source is not None and source.vocabulary is not None:
            saved.save(self.path, source.vocabulary, source.cased)
        # A start may have other versions and hardware than the one before, so each has a line.
        record = {
            "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
            "lamb_tpu": __version__,
            "commit": checkout.commit(),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "processor": host.processor(),
            "NPROC": os.environ.get("NPROC"),  # XLA's threads, whose number changes roundings
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            **({"own": found} if (found := own.receipt(_names(config))) else {}),
            **facts,
        }
        lines = writing.LineFile(self.run)
        lines.write(json.dumps(record))
        lines.close()


def _names(config: ConfigDict) -> list[Any]:
    sections = [config[section] for section in ("model", "task", "data", "optimizer")]
    return [section.name for section in (*sections, config.parallel.exchange)]
