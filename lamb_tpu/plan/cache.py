"""Compiled programs kept on disk, so that the same plan is not compiled again.

A plan's key is a hash of the program before compilation, of the devices in their order, and of the
versions of jax and libtpu. KEY.json has its numbers and KEY.hlo.gz the compiled program.
"""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing

# What two configs share whose steps differ in their batch alone.
_FAMILY = (
    "model.",
    "data.name",
    "data.options.",
    "task.",
    "optimizer.name",
    "mesh.",
    "parallel.",
    "accumulation_steps",
    "ema.",
    "prng",
)
# It follows the batch in some recipes.
_FOLLOWS = ("model.group_size",)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The outcome of a compilation.

    Attributes:
      seconds: time of the compilation.
      message: the compiler's out-of-memory message; '' for a step that fits.
      memory: bytes by kind, see `report.Memory`; None for a step that does not fit.
      program: the optimized HLO; '' for a step that does not fit.
    """

    seconds: float
    message: str
    memory: dict[str, int] | None
    program: str


def default_folder() -> pathlib.Path:
    """The folder for plans below the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "lamb_tpu" / "plans"


def key_of(lowered: str, places: Sequence[Sequence[int]], options: dict[str, Any]) -> str:
    """Returns the key of a program.

    Args:
      lowered: the program before compilation.
      places: coordinates of its devices, in their order.
      options: how the slice is described to the compiler.
    """
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    settings = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    head = json.dumps([versions, settings, list(places), options], sort_keys=True)
    return _digest(f"{head}\n{lowered}")


class Cache:
    """Compiled programs in a folder.

    Args:
      folder: the folder, made when it is first needed; None keeps nothing.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder

    def load(self, key: str) -> Compiled | None:
        """Returns what is kept; None if there is nothing, or a file is damaged."""
        if self._folder is None:
            return None
        try:
            record = json.loads((self._folder / f"{key}.json").read_text())
            program = gzip.decompress((self._folder / f"{key}.hlo.gz").read_bytes()).decode()
            whole = record["sha256"] == _digest(program)
            return Compiled(program=program, **record["compiled"]) if whole else None
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
            return None

    def store(self, key: str, compiled: Compiled, config: ConfigDict, topology: str) -> None:
        """Keeps what a compilation gave.

        Raises:
          UserError: the folder cannot be written.
        """
        if self._folder is None:
            return
        record = dataclasses.asdict(compiled)
        del record["program"]
        with writing.checked(self._folder, "--cache"):
            self._folder.mkdir(parents=True, exist_ok=True)
            # The program first: a record is found only with its program.
            path = self._folder / f"{key}.hlo.gz"
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.write_bytes(gzip.compress(compiled.program.encode(), 6, mtime=0))
            new.replace(path)
            writing.replace(
                self._folder / f"{key}.json",
                json.dumps(
                    {
                        "compiled": record,
                        "sha256": _digest(compiled.program),
                        "batch_size": config.batch_size,
                        "family": _family(config, topology),
                    }
                ),
            )

    def batches(self, config: ConfigDict, topology: str) -> dict[int, bool]:
        """Returns the batches at which steps that differ in the batch alone are known to fit."""
        found: dict[int, bool] = {}
        if self._folder is None:
            return found
        family = _family(config, topology)
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = json.loads(path.read_text())
                if record["family"] == family:
                    fits = record["compiled"]["memory"] is not None
                    batch = record["batch_size"]
                    found[batch] = found.get(batch, False) or fits
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged, or removed meanwhile
        return found


def check_folder(folder: str) -> pathlib.Path | None:
    """Returns the folder of --cache; None for 'none'.

    Raises:
      UserError: it is no folder.
    """
    if folder == "none":
        return None
    path = pathlib.Path(folder).expanduser() if folder else default_folder()
    if path.exists() and not path.is_dir():
        raise UserError(f"--cache is {folder!r}, which is no folder; give one, or 'none'")
    return path


def _family(config: ConfigDict, topology: str) -> str:
    flat = {
        key: value
        for key, value in flatten(config).items()
        if key.startswith(_FAMILY) and key not in _FOLLOWS
    }
    text = json.dumps([topology, importlib.metadata.version("libtpu"), flat], sort_keys=True)
    return _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
