"""Custom data sets: a class or function that returns the `Source` of a split."""

import functools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from lamb_tpu.components import Registry, parameters
from lamb_tpu.data.source import FieldSpec, Source
from lamb_tpu.errors import UserError

# Arguments of `registry.load` that the class or function may take; its other arguments are options.
OFFERED = ("split", "data_dir", "source_dir", "in_memory", "seed", "training")
_FIELDS = (
    "name num_classes element_spec in_memory vocabulary cased notes "
    "tally streams buckets gather trim __len__"
).split()


def load(
    sets: Registry, name: str, options: Mapping[str, Any], request: Mapping[str, Any]
) -> Source:
    """Makes a custom data set from its options and from arguments of `registry.load`.

    Passes only the arguments that the class or function takes. Raises a UserError if an option is
    unknown, or if the result is not a valid `Source`.
    """
    make, wrong = sets.find(name), functools.partial(UserError, "config.data.name", name)
    sets.check(name, options)
    chosen = {key: value for key, value in options.items() if value is not None}
    takes = {parameter.name for parameter in parameters(make)}
    if "split" not in takes:
        raise wrong("has no argument 'split'", "add that argument")
    for argument, key in (("source_dir", "dir"), ("data_dir", "prepared_dir")):
        if request[argument] is not None and argument not in takes:
            problem = f"is not used by {name!r}, which has no argument {argument!r}"
            raise UserError(f"config.data.{key}", request[argument], problem, "leave it out")
    with sets.making(name):
        source = make(**chosen, **{key: request[key] for key in OFFERED if key in takes})
        missing = [attribute for attribute in _FIELDS if not hasattr(source, attribute)]
        if missing:
            remedy = "return a lamb_tpu.data.ArraySource, or inherit from lamb_tpu.data.BaseSource"
            raise wrong(f"returns {source!r}, which lacks {', '.join(missing)}", remedy)
        if len(source) < 1:
            raise wrong(f"holds no example in split {request['split']!r}", "use another split")
        _check_attributes(source, wrong)
        declared = _declared(source, wrong)
        # Reads one example, to report a wrong shape or dtype before anything is compiled.
        gathered = source.gather(np.zeros(1, np.int64))
        if not isinstance(gathered, Mapping):
            problem = f"has a method gather that returns {type(gathered).__name__}"
            raise wrong(problem, "return a dict of arrays")
        # Ragged nested lists raise a ValueError here.
        arrays = {field: np.asarray(values) for field, values in gathered.items()}
    specs = {field: FieldSpec(array.shape[1:], array.dtype) for field, array in arrays.items()}
    # An evaluation set may add `mask`, which `element_spec` does not list.
    for field in sorted({*specs, *declared} - {"mask"}, key=str):
        one = field in arrays and arrays[field].shape[:1] == (1,)
        if specs.get(field) != declared.get(field) or not one:
            rows = (
                ""
                if one or field not in arrays
                else f" in an array of shape {list(arrays[field].shape)}"
            )
            problem = f"gathers {_text(specs.get(field))} for field {field!r} of one example{rows}"
            raise wrong(problem, f"return {_text(declared.get(field))}, as element_spec declares")
    return source


def _check_attributes(source: Source, wrong: Callable[..., UserError]) -> None:
    if not isinstance(source.name, str):
        raise wrong(f"has the name {source.name!r}", "use text")
    classes = source.num_classes
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, Integral)):
        raise wrong(f"has num_classes={classes!r}", "use a whole number or None")
    if classes is not None and classes < 1:
        raise wrong(f"has num_classes={classes}", "use at least 1")


def _declared(source: Source, wrong: Callable[..., UserError]) -> dict[str, FieldSpec]:
    """Returns `element_spec`; raises a UserError if it is malformed or devices do not support a field."""
    declared = source.element_spec
    if not isinstance(declared, Mapping) or not declared:
        shown = "is empty" if declared == {} else f"is of type {type(declared).__name__}"
        remedy = "use a dict from the name of each field to its lamb_tpu.data.FieldSpec"
        raise wrong(f"has an element_spec that {shown}", remedy)
    for field, spec in declared.items():
        declares = f"declares the field {field!r} in element_spec"
        if not isinstance(field, str):
            raise wrong(declares, "use text as the name of each field")
        if not isinstance(spec, FieldSpec) or not isinstance(spec.dtype, np.dtype):
            problem = f"{declares} as {spec!r}"
            raise wrong(problem, "use a lamb_tpu.data.FieldSpec with a shape and a numpy.dtype")
        if not isinstance(spec.shape, tuple) or not all(
            isinstance(size, Integral) and not isinstance(size, bool) and size >= 1
            for size in spec.shape
        ):
            remedy = "use a tuple of whole numbers of at least 1, without the batch axis"
            raise wrong(f"{declares} with the shape {spec.shape!r}", remedy)
        if spec.dtype.kind not in "biuf":
            remedy = "use bool, an integer or a floating-point dtype of NumPy, such as float32"
            raise wrong(f"{declares} with the dtype {str(spec.dtype)!r}", remedy)
    return dict(declared)


def _text(spec: FieldSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
