"""A case of the fuzzer: a combination of features, with the settings of its two legs."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from tests import tiny
from tests.fuzz import families

PROCESSES = "processes"
AXES = ("data", "fsdp", "model", "sequence")


@dataclasses.dataclass(frozen=True)
class Case:
    """A run that is saved, restored in another setting and continued.

    Attributes:
      family: a name in `families.FAMILIES`.
      config: changes of the family's config, dotted key -> value, as in JSON.
      first: keys that a resumed run may change, such as the mesh, in the run from the start.
      second: the same keys in the run that continues from the checkpoint. The key 'processes' is the
        number of processes over which its devices are spread.
    """

    family: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    second: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def legs(self) -> tuple[ConfigDict, ConfigDict]:
        """Returns the configs of the two legs."""
        return self.made(self.first), self.made(self.second)

    def made(self, setting: Mapping[str, Any]) -> ConfigDict:
        """Returns the config with a setting."""
        changes = {**self.config, **setting}
        changes.pop(PROCESSES, None)
        config = families.base(self.family)
        return tiny.change(config, {key: as_config(value) for key, value in changes.items()})

    def to_json(self) -> str:
        """Returns the case on one line."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        return cls(**json.loads(text))

    def features(self) -> dict[str, Any]:
        """Returns each changed key of the case, with 'first ' or 'second ' before keys of a leg."""
        legs = {"": self.config, "first ": self.first, "second ": self.second}
        return {f"{leg}{key}": value for leg, keys in legs.items() for key, value in keys.items()}


def as_config(value: Any) -> Any:
    """Returns a value from JSON as a config holds it: mappings as `ConfigDict`s, lists as tuples."""
    if isinstance(value, Mapping):
        return ConfigDict({key: as_config(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return dict(value) if isinstance(value, Mapping) else value


def num_devices(setting: Mapping[str, Any]) -> int:
    """Returns the number of devices of a setting's mesh."""
    return math.prod(setting.get(f"mesh.{axis}", 1) for axis in AXES)
