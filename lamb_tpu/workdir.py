"""The folder of a run: what stands in it, and whether it may be used again."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from lamb_tpu import __version__
from lamb_tpu.config import differences, flatten
from lamb_tpu.errors import UserError

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Workdir:
    """Paths of a run's files, below one folder.

    Attributes:
      path: the folder.
      config: the resolved config, as JSON.
      run: versions, hardware and the command, one JSON line for each start that trained.
      parameters: the table of parameter facts.
      checkpoints: Orbax' folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in str(path):
            raise UserError(f"--workdir {path} is remote; give a local or mounted folder")
        self.path = pathlib.Path(path).expanduser().absolute()
        self.config = self.path / "config.json"
        self.run = self.path / "run.jsonl"
        self.parameters = self.path / "parameters.txt"
        self.checkpoints = self.path / "checkpoints"

    def check(self, config: ConfigDict) -> None:
        """Makes the folder when missing, and refuses one that this config may not write into.

        Nothing that is already there is changed.

        Raises:
          UserError: it cannot be written, or holds a run of another config or of none.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".write-probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"--workdir {self.path} cannot be written ({error.strerror}); give a folder that "
                "can"
            ) from None
        if self.config.exists():
            changed = differences(self.read_config(), flatten(config))
            if changed:
                raise UserError(
                    f"--workdir {self.path} holds a run of another config ({'; '.join(changed)}); "
                    "give another folder, or the same config to resume"
                )
        elif self.checkpoints.exists() and any(self.checkpoints.glob("*/")):
            raise UserError(
                f"--workdir {self.path} holds checkpoints but no config.json to compare with; give "
                "another folder"
            )

    @contextlib.contextmanager
    def hold(self, enabled: bool = True) -> Iterator[None]:
        """Keeps a second run on this machine out of the folder.

        Args:
          enabled: False does nothing, as on every process but the first.

        Raises:
          UserError: another run holds it.
        """
        if not enabled:
            yield
            return
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed even by kill -9
            except BlockingIOError:
                raise UserError(
                    f"--workdir {self.path} is in use by another run; wait until it ends, or give "
                    "another folder"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def read_config(self) -> dict[str, Any]:
        """The flattened config that the run in this folder was started with.

        Raises:
          UserError: there is none, or it is damaged.
        """
        try:
            return json.loads(self.config.read_text())
        except FileNotFoundError:
            raise UserError(f"--workdir {self.path} holds no run: config.json is missing") from None
        except ValueError as error:
            raise UserError(
                f"{self.config} is damaged ({error}); restore it or give another --workdir"
            ) from None

    def check_parameters(self, table: str) -> None:
        """Refuses to resume when the table of parameter facts is not the one the run began with."""
        if self.parameters.exists() and self.parameters.read_bytes() != table.encode():
            raise UserError(
                f"the parameter table differs from {self.parameters}, so this is not the model or "
                "the rules that the run began with; give another --workdir"
            )

    def write_receipt(self, config: ConfigDict, table: str, facts: Mapping[str, Any]) -> None:
        """Writes config, parameter table, and what this start of the run ran on."""
        _write(self.config, json.dumps(flatten(config), indent=1) + "\n")
        _write(self.parameters, table)
        record = {
            "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
            "lamb_tpu": __version__,
            "commit": _commit(),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            **facts,
        }
        with self.run.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _write(path: pathlib.Path, text: str) -> None:
    # By rename, so that a run killed here leaves the old file or the new one.
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def _commit() -> str | None:
    """The commit of the checkout that the package is run from, '+' when it has changes."""
    folder = pathlib.Path(__file__).parent
    try:
        # An installed package may lie inside a checkout of something else.
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", pathlib.Path(__file__).name],
            cwd=folder, capture_output=True, timeout=10, check=True,
        )
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
