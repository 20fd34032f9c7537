"""A user's own data set: a class or function from a split to a `Source`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from lamb_tpu import own
from lamb_tpu.data.source import FieldSpec, Source
from lamb_tpu.errors import UserError

_KEY = "config.data.name"
# Arguments of `registry.load` that the class or function may take; its others are options.
_OFFERED = ("split", "data_dir", "source_dir", "in_memory", "seed", "training")
_FIELDS = (
    "name",
    "num_classes",
    "element_spec",
    "in_memory",
    "vocabulary",
    "cased",
    "notes",
    "tally",
    "streams",
    "buckets",
    "gather",
    "trim",
    "__len__",
)


def option_fields(name: str) -> dict[str, dataclasses.Field]:
    """Returns the options of the data set, see `registry.option_fields`."""
    return own.fields(own.find(name, _KEY), _OFFERED)


def load(name: str, options: Mapping[str, Any], request: Mapping[str, Any]) -> Source:
    """Makes the data set from its options and from those arguments of `registry.load` that it has.

    Raises:
      UserError: an option is unknown, or the result is not a `Source`.
    """
    make, told = own.find(name, _KEY), f"{_KEY} is {name!r}"
    chosen = {key: value for key, value in options.items() if value is not None}
    own.check("config.data.options", "data set", name, option_fields(name), chosen)
    takes = {parameter.name for parameter in own.parameters(make)}
    if "split" not in takes:
        raise UserError(f"{told}, which has no argument 'split'; it must take one")
    for argument, key in (("source_dir", "dir"), ("data_dir", "prepared_dir")):
        if request[argument] is not None and argument not in takes:
            raise UserError(
                f"config.data.{key} is {request[argument]!r}, and {name!r} has no argument "
                f"{argument!r} to take it; leave it out"
            )
    with own.making(name, _KEY):
        source = make(**chosen, **{key: request[key] for key in _OFFERED if key in takes})
        missing = [part for part in _FIELDS if not hasattr(source, part)]
        if missing:
            raise UserError(
                f"{told}, which makes {source!r} without {', '.join(missing)}; it must make an "
                "ArraySource, or a class of its own that inherits from BaseSource, both of "
                "lamb_tpu.data"
            )
        if len(source) < 1:
            raise UserError(f"{told}, of which split {request['split']!r} has no example")
        # One example is read, so that a wrong shape or dtype is told before anything is compiled.
        found = source.gather(np.zeros(1, np.int64))
    specs = {
        field: FieldSpec(np.shape(array)[1:], np.asarray(array).dtype)
        for field, array in found.items()
    }
    declared = dict(source.element_spec)
    for field, spec in declared.items():
        if not (isinstance(spec, FieldSpec) and isinstance(spec.dtype, np.dtype)):
            raise UserError(
                f"{told}, whose element_spec has {field!r}: {spec!r}; it must be a "
                "lamb_tpu.data.FieldSpec of a shape and a numpy.dtype"
            )
    # A set for evaluation may add `mask`, which `element_spec` does not list.
    for field in sorted({*specs, *declared} - {"mask"}):
        if specs.get(field) != declared.get(field) or len(found[field]) != 1:
            raise UserError(
                f"{told}, whose gather gives {field!r} as {_text(specs.get(field))} for one "
                f"example, and whose element_spec says {_text(declared.get(field))}"
            )
    return source


def _text(spec: FieldSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
