"""Options of a data set: the fields of a dataclass, checked against a config's values."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from lamb_tpu.errors import UserError

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


OptionsT = TypeVar("OptionsT", bound=_Dataclass)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a data set without options."""


def read_options(
    name: str, kind: type[OptionsT], given: Mapping[str, Any], **fixed: Any
) -> OptionsT:
    """Returns the options of data set `name`, an instance of the dataclass `kind`.

    Args:
      name: name of the data set, for the error message.
      kind: a dataclass whose fields are int, float, str or bool and have defaults.
      given: `config.data.options`; the value None leaves an option at its default.
      **fixed: fields that the user cannot set.

    Raises:
      UserError: an option is unknown, or a value has another type.
    """
    known = {field.name: field for field in dataclasses.fields(kind) if field.name not in fixed}
    for key, value in given.items():
        if key not in known:
            listed = ", ".join(f"{field.name} = {field.default!r}" for field in known.values())
            raise UserError(
                f"config.data.options.{key} is unknown; "
                + (f"{name} has, with these defaults: {listed}" if known else f"{name} has none")
            )
        wanted: Any = known[key].type
        # A float may be given as 1. Types are compared exactly, because True is an instance of int.
        accepted = (int, float) if wanted is float else (wanted,)
        if value is not None and type(value) not in accepted:
            raise UserError(f"config.data.options.{key} is {value!r}; it must be {_KINDS[wanted]}")
    chosen = {key: value for key, value in given.items() if value is not None}
    return kind(**chosen, **fixed)
