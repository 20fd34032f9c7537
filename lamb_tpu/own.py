"""A user's own model, task, data set or optimizer, which a config names 'package.module:Name'.

Python imports the name from the current folder, from PYTHONPATH, or from the installed packages.
Its arguments become fields of the config, like those of the shipped parts.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import os
import pathlib
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lamb_tpu.errors import Preempted, UserError

FORM = "'my_package.my_module:Name'"
_FORM = re.compile(r"(?P<module>[^\W\d][\w.]*):(?P<attribute>[^\W\d][\w.]*)")
_LISTED = 12  # names in a message
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
# Folders of code that is not a user's.
_LIBRARIES = (
    # Frames of Python's import system have file names such as '<frozen importlib._bootstrap>'.
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<frozen",
    str(pathlib.Path(__file__).parent) + os.sep,
)
# Top-level packages of the modules that were imported here, for `blame`.
_imported: set[str] = set()
# Exceptions of this package and Ctrl-C, which custom code may pass on.
_PASSED = (UserError, Preempted, KeyboardInterrupt)


def is_own(name: object) -> bool:
    """Returns whether a name in a config has this form, unlike the shipped names."""
    return isinstance(name, str) and ":" in name


def module_of(value: object) -> str | None:
    """Returns the module of a value of this form; None for any other value.

    'tfds:NAME', a data set, is another value.
    """
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    return None if match is None or match["module"] == "tfds" else match["module"]


def imported_tops() -> frozenset[str]:
    """Returns the top-level packages and modules that configs have named in this process."""
    return frozenset(_imported)


def find(name: str, key: str) -> Callable[..., Any]:
    """Returns the class or function of a name.

    Args:
      name: a name such as 'my_package.my_module:Name'.
      key: key of the config, for error messages.

    Raises:
      UserError: the module or attribute does not exist or cannot be called, or the import fails.
    """
    match = _FORM.fullmatch(name)
    if match is None:
        raise UserError(f"{key} is {name!r}; one of your own has the form {FORM}")
    found: Any = imported(match["module"], f"{key} is {name!r}")
    # An attribute may be dotted, such as Class.method.
    for part in match["attribute"].split("."):
        with calling(f"{key} is {name!r}, which", failures=True):
            is_there = hasattr(found, part)
        if not is_there:
            # The message lists what the module defines, not what it imports.
            public = [
                item
                for item, value in vars(found).items()
                if callable(value)
                and not item.startswith("_")
                and getattr(value, "__module__", None) == match["module"]
            ]
            listed = ", ".join(public[:_LISTED]) or "no class or function"
            raise UserError(f"{key} is {name!r}; {_title(found)} has no {part!r}, it has: {listed}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{key} is {name!r}, which is {found!r}; it must be a class or a function")
    return found


def imported(module: str, told: str) -> types.ModuleType:
    """Imports a module for a config.

    Args:
      module: its dotted name.
      told: start of the error message: the key and its value.

    Raises:
      UserError: the module does not exist, or its import fails.
    """
    _imported.add(module.partition(".")[0])
    try:
        return importlib.import_module(module)
    except _PASSED:
        raise
    except BaseException as error:  # a custom module can raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module itself, or a package that it lies in, is missing. In any other case the module
        # is there and one of its own imports fails.
        if absent and f"{module}.".startswith(f"{absent}."):
            raise UserError(
                f"{told}; Python finds no module {absent!r} from the current folder, "
                f"{os.getcwd()}; run in the folder that it lies in, or name that folder in "
                "PYTHONPATH"
            ) from None
        raise UserError(f"{told}; importing {module} fails{_describe(error)}") from error


def _title(found: Any) -> str:
    if not isinstance(found, types.ModuleType):
        return f"{found.__name__}" if hasattr(found, "__name__") else repr(found)
    return f"the module {found.__name__} ({getattr(found, '__file__', 'built in')})"


def fields(made: Callable[..., Any], hidden: Collection[str] = ()) -> dict[str, dataclasses.Field]:
    """Returns the arguments of a class or function, with their types and defaults.

    The arguments of a dataclass, such as a Linen module, are its fields.

    Args:
      made: the class or function.
      hidden: arguments that a config cannot set.
    """
    read: list[tuple[str, Any, Any, Any]]
    if isinstance(made, type) and dataclasses.is_dataclass(made):
        found = [field for field in dataclasses.fields(made) if field.init]
        read = [(f.name, f.type, f.default, f.default_factory) for f in found]
    else:
        read = [
            (p.name, p.annotation, _or_missing(p.default), dataclasses.MISSING)
            for p in parameters(made)
        ]
    table = {}
    for name, kind, default, factory in read:
        if name not in hidden:
            field: Any = dataclasses.field(default=default)
            if factory is not dataclasses.MISSING:
                field = dataclasses.field(default_factory=factory)
            field.name, field.type = name, _resolved(kind, made)
            table[name] = field
    return table


def parameters(made: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the named parameters of a function, or of a class' `__init__`."""
    init = inspect.getattr_static(made, "__init__")
    own_init = isinstance(made, type) and init is not object.__init__
    # NNX' metaclass hides the signature of a class.
    try:
        listed = list(inspect.signature(init if own_init else made).parameters.values())
    except (TypeError, ValueError):  # one that is not written in Python
        return []
    # The first parameter of `__init__` is self.
    return [
        parameter
        for parameter in listed[1 if own_init else 0 :]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _or_missing(default: Any) -> Any:
    return dataclasses.MISSING if default is inspect.Parameter.empty else default


def _resolved(kind: Any, made: Callable[..., Any]) -> Any:
    """Returns an annotation as a type; `Any` if it is missing or cannot be resolved."""
    if isinstance(kind, str):  # as under `from __future__ import annotations`
        module = sys.modules.get(getattr(made, "__module__", None) or "")
        try:
            kind = eval(kind, dict(vars(module)) if module else {})
        except Exception:
            # It may name something that is imported for type checkers only.
            return Any
    return Any if kind is inspect.Parameter.empty else kind


def check(
    section: str,
    noun: str,
    name: str,
    known: Mapping[str, dataclasses.Field],
    given: Mapping[str, Any],
) -> None:
    """Refuses unknown fields, missing required fields, and values of another type.

    Args:
      section: section of the config, such as 'config.model'.
      noun: kind of the part, such as 'model'.
      name: name of the part in the config.
      known: fields of the part.
      given: fields of the config.

    Raises:
      UserError: a field is wrong; the message names the key.
    """
    for key, value in given.items():
        if key not in known:
            listed = ", ".join(known) or "none"
            raise UserError(f"{section}.{key} is not a field of {noun} {name!r}; known: {listed}")
        kind: Any = known[key].type
        if not _fits(value, known[key]):
            raise UserError(f"{section}.{key} is {value!r}; it must be {_KINDS[kind]}")
    for key, field in known.items():
        missing = field.default is field.default_factory is dataclasses.MISSING
        if missing and key not in given:
            raise UserError(f"{section}.{key} is missing; {noun} {name!r} has no default for it")


def _fits(value: Any, field: dataclasses.Field) -> bool:
    """Returns whether a value has a field's plain type; other annotations are not checked."""
    kind: Any = field.type
    # None is right where it is the default, whatever the annotation says.
    if not isinstance(kind, type) or kind not in _KINDS or value is field.default is None:
        return True
    # type() and not isinstance(), because True is an int.
    return type(value) in ((int, float) if kind is float else (kind,))


@contextlib.contextmanager
def making(name: str, key: str) -> Iterator[None]:
    """Turns an error of a user's class or function, called in the block, into a UserError.

    Args:
      name: name of the part in the config.
      key: key of the config that has the name.
    """
    try:
        yield
    except _PASSED:
        raise
    except BaseException as error:
        raise UserError(f"{key} is {name!r}; making it fails{_describe(error)}") from error


@contextlib.contextmanager
def calling(what: str = "", failures: bool = False) -> Iterator[None]:
    """Turns an exit of custom code, called anywhere in the block, into a UserError.

    `sys.exit(0)` in a network that is traced would otherwise end the command as a success. An
    exception that is not an `Exception` passes the handlers of every layer between.

    Args:
      what: the block, for an exit outside of any module that a config names; '': only exits of
        such modules become a UserError.
      failures: whether an ordinary error of custom code becomes a UserError too. At the end of a
        command `blame` names it, but the other processes of a run need it earlier.
    """
    try:
        yield
    except _PASSED:
        raise
    except BaseException as error:
        is_failure = isinstance(error, Exception)
        if is_failure and (not failures or isinstance(error, MemoryError)):
            raise
        told = blame(error)
        if told is None and what and isinstance(error, (SystemExit, GeneratorExit)):
            told = f"{what} fails{_describe(error)}; custom code must not end the command"
        if told is None:
            raise
        raise UserError(told) from error


def blame(error: BaseException) -> str | None:
    """Returns a sentence with the place in a user's own module where an error was raised, or None.

    Installed packages, as in 'optax:adabelief', do not count as a user's own.
    """
    # Innermost frame first: the user's line that failed, or that called the library that failed.
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if name.partition(".")[0] in _imported and not file.startswith(_LIBRARIES):
            return f"your own module {name} fails{_describe(error, file)}"
    return None


def _describe(error: BaseException, file: str | None = None) -> str:
    """Returns ' at line 3 of FILE: TypeError: ...', for the innermost line outside of libraries."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file or (file is None and not frame.filename.startswith(_LIBRARIES)):
            place = f" at line {frame.lineno} of {frame.filename}"
    # A file with a syntax error did not run, so it has no frame.
    if isinstance(error, SyntaxError) and error.filename:
        place = f" at line {error.lineno} of {error.filename}"
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:300]
    return f"{place}: {type(error).__name__}{f': {text}' if text else ''}"


def receipt(names: Collection[object]) -> dict[str, dict[str, str]]:
    """Returns file and SHA-256 of the module of each name that is a user's own."""
    found = {}
    for name in names:
        module = sys.modules.get(str(name).partition(":")[0]) if is_own(name) else None
        file = getattr(module, "__file__", None)
        if file is not None and os.path.isfile(file):
            digest = hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
            found[str(name)] = {"file": file, "sha256": digest}
    return found
