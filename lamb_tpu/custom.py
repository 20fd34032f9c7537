"""Custom components, which a config names 'package.module:Name'.

Python imports the module from the current folder, PYTHONPATH, or the installed packages.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from lamb_tpu.errors import Preempted, UserError

FORM = "'my_package.my_module:Name'"
_FORM = re.compile(r"(?P<module>[^\W\d][\w.]*):(?P<attribute>[^\W\d][\w.]*)")
_LISTED = 12  # names in a message
# Prefixes of the file names of code that is not the user's.
_LIBRARIES = (
    # Frames of Python's import system have file names such as '<frozen importlib._bootstrap>'.
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<frozen",
    str(pathlib.Path(__file__).parent) + os.sep,
)
# Top-level packages of the modules imported here, for `blame`.
_imported: set[str] = set()
# Exceptions that custom code may pass on: this package's, and Ctrl-C.
_PASSED = (UserError, Preempted, KeyboardInterrupt)


def is_custom(name: object) -> bool:
    """Returns whether a name in a config has the form of a custom component's name."""
    return isinstance(name, str) and ":" in name


def module_of(value: object) -> str | None:
    """Returns the module in a custom component's name; None for other values, such as 'tfds:NAME'."""
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    return None if match is None or match["module"] == "tfds" else match["module"]


def imported_tops() -> frozenset[str]:
    """Returns the top-level packages imported for configs in this process."""
    return frozenset(_imported)


def find(name: str, key: str) -> Callable[..., Any]:
    """Imports the class or function with a name such as 'my_package.my_module:Name'."""
    match = _FORM.fullmatch(name)
    if match is None:
        raise UserError(key, name, "is not the name of a component", f"use {FORM}")
    component: Any = imported(match["module"], key, name)
    # The attribute may be dotted, such as Class.method.
    for part in match["attribute"].split("."):
        with calling(f"{key} is {name!r}, which", failures=True):
            is_there = hasattr(component, part)
        if not is_there:
            # List the names that the module defines, not those that it imports.
            public = [
                item
                for item, value in vars(component).items()
                if callable(value)
                and not item.startswith("_")
                and getattr(value, "__module__", None) == match["module"]
            ]
            has = ", ".join(public[:_LISTED]) or "no class or function"
            raise UserError(key, name, "does not exist", f"{_title(component)} defines {has}")
        component = getattr(component, part)
    if not callable(component):
        raise UserError(key, name, f"names {component!r}", "name a class or a function")
    return component


def imported(module: str, key: str, value: object) -> types.ModuleType:
    """Imports a module that the config key `key` names in its value; errors show `key` and `value`."""
    _imported.add(module.partition(".")[0])
    try:
        return importlib.import_module(module)
    except _PASSED:
        raise
    except BaseException as error:  # a custom module can raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        # Either the module or a package that contains it is missing, or the module exists and one
        # of its imports is missing.
        if absent and f"{module}.".startswith(f"{absent}."):
            problem = f"needs the module {absent!r}, which is not in the folder {os.getcwd()}"
            remedy = "run in the module's folder, or add that folder to PYTHONPATH"
            raise UserError(key, value, problem, remedy) from None
        raise UserError(key, value, f"cannot be imported{_describe(error)}") from error


def _title(component: Any) -> str:
    if not isinstance(component, types.ModuleType):
        return f"{component.__name__}" if hasattr(component, "__name__") else repr(component)
    return f"the module {component.__name__} ({getattr(component, '__file__', 'built in')})"


@contextlib.contextmanager
def making(name: str, key: str) -> Iterator[None]:
    """Turns an error that the custom component `name` raises in the block into a UserError about `key`."""
    try:
        yield
    except _PASSED:
        raise
    except BaseException as error:
        raise UserError(key, name, f"cannot be built{_describe(error)}") from error


@contextlib.contextmanager
def calling(what: str = "", failures: bool = False) -> Iterator[None]:
    """Turns an exit (SystemExit) of custom code in the block into a UserError.

    Otherwise `sys.exit(0)` in a traced network would end the command as a success, because no
    handler on the way catches a SystemExit. `what` describes the block; with '', only exits of
    custom modules become a UserError. With `failures`, ordinary exceptions of custom code also
    become a UserError at once. Without `failures`, `blame` converts them only at the end of the
    command, which is too late for the other processes of a run.
    """
    try:
        yield
    except _PASSED:
        raise
    except BaseException as error:
        is_failure = isinstance(error, Exception)
        if is_failure and (not failures or isinstance(error, MemoryError)):
            raise
        blamed = blame(error)
        if blamed is None and what and isinstance(error, (SystemExit, GeneratorExit)):
            problem, remedy = f"fails{_describe(error)}", "remove the exit from the custom code"
            blamed = UserError(what, problem=problem, remedy=remedy)
        if blamed is None:
            raise
        raise blamed from error


def blame(error: BaseException) -> UserError | None:
    """Returns a UserError that names the custom module and line where `error` arose, or None.

    Installed packages, as in 'optax:adabelief', do not count as custom modules.
    """
    # Innermost frame first: the user's line that failed, or that called a failing library.
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if name.partition(".")[0] in _imported and not file.startswith(_LIBRARIES):
            return UserError(f"custom module {name}", ..., f"fails{_describe(error, file)}")
    return None


def _describe(error: BaseException, file: str | None = None) -> str:
    """Returns ' at line 3 of FILE: TypeError: ...' for the innermost line outside libraries."""
    position = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file or (file is None and not frame.filename.startswith(_LIBRARIES)):
            position = f" at line {frame.lineno} of {frame.filename}"
    # After a syntax error, no frame belongs to the file.
    if isinstance(error, SyntaxError) and error.filename:
        position = f" at line {error.lineno} of {error.filename}"
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:300]
    return f"{position}: {type(error).__name__}{f': {text}' if text else ''}"


def receipt(names: Collection[object]) -> dict[str, dict[str, str]]:
    """Maps the names of custom components to the file and SHA-256 digest of their modules."""
    files = {}
    for name in names:
        module = sys.modules.get(str(name).partition(":")[0]) if is_custom(name) else None
        file = getattr(module, "__file__", None)
        if file is not None and os.path.isfile(file):
            digest = hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
            files[str(name)] = {"file": file, "sha256": digest}
    return files
