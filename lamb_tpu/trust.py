"""Custom names of a stored config, which are followed to the user's code alone.

A config that a user gives on the command line may name any class or function, such as
'optax:adabelief'. One that lies in a folder may come from someone else, and 'subprocess:getoutput'
with `model.cmd` would run a program. So a stored name must lead to a class or function that the
user's modules define: modules outside the standard library, the installed packages, this package
and the folder itself. Each package on the way is located before it is imported, because importing
runs code.
"""

import functools
import importlib.util
import os
import pathlib
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

from lamb_tpu import own
from lamb_tpu.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parent
# Debian's Python and virtual environments of other names have such folders too.
_INSTALLED = {"site-packages", "dist-packages"}


def check(stored: Mapping[str, Any], file: pathlib.Path, flag: str) -> None:
    """Rejects custom names of a stored config that lead to other code than the user's modules.

    The user's modules are imported; nothing else is.

    Args:
      stored: the config, flat or nested.
      file: the file that it was read from. Modules in the same folder count as part of the config.
      flag: the command-line flag that turns this check off, for the message.

    Raises:
      UserError: a name leads elsewhere, or the import of a user's module fails.
    """
    folder = pathlib.Path(os.path.realpath(file)).parent
    for key, name in _names(stored, "config"):
        reason = _rejected(name, key, folder)
        if reason is not None:
            raise UserError(
                f"{key} is {name!r} in {file}, and {reason}; a stored config may name only what "
                "your own modules define, because other code can run any program; give "
                f"{flag} if you trust the author of that folder"
            )


def _names(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields key and text of each value that has the form of a custom name, at any depth."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _names(inner, f"{key}.{part}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _names(inner, key)
    elif own.module_of(value) is not None:
        yield key, value


def _rejected(name: str, key: str, folder: pathlib.Path) -> str | None:
    """Returns why a name must not be followed; None if it may be, or if it leads to nothing."""
    module = name.partition(":")[0]
    reason = _of_module(module, key, name, folder)
    # Nothing can be imported: text of this form, or a module that `own.find` reports as missing.
    if reason is not None or module not in sys.modules:
        return reason
    found = own.find(name, key)
    # A module can also hold what it imported. A package may pass on what its modules define.
    home = getattr(found, "__module__", None)
    if not isinstance(home, str) or home.partition(".")[0] != module.partition(".")[0]:
        return f"{module} does not define it" + (f" ({home} does)" if home else "")
    return _of_module(home, key, name, folder)


def _of_module(module: str, key: str, name: str, folder: pathlib.Path) -> str | None:
    """Locates a module and then imports it, package by package; returns why it is rejected."""
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        path = ".".join(parts[:number])
        try:
            # The packages above it are imported already, so this imports nothing.
            spec = importlib.util.find_spec(path)
        except (ImportError, ValueError):  # its parent is no package; a module without location
            return f"{path} has no file" if path in sys.modules else None
        if spec is None:
            return None
        # A folder without __init__.py, in which no code lies.
        is_folder = spec.origin is None and spec.submodule_search_locations is not None
        if not is_folder and (reason := _of_file(path, spec.origin, folder)):
            return reason
        own.imported(path, f"{key} is {name!r}")
    return None


def _of_file(module: str, origin: str | None, folder: pathlib.Path) -> str | None:
    if module.partition(".")[0] in sys.stdlib_module_names:
        return f"{module} belongs to Python's standard library"
    if origin is None or not os.path.isabs(origin):  # 'built-in', 'frozen'
        return f"{module} has no file"
    if is_library(origin):
        return f"{module} belongs to an installed package, Python or lamb_tpu ({origin})"
    if pathlib.Path(os.path.realpath(origin)).is_relative_to(folder):
        return f"{module} lies in the same folder"
    return None


def is_library(file: str) -> bool:
    """Returns whether a module's file is of Python, an installed package or this package."""
    # Behind symbolic links too.
    paths = (pathlib.Path(file), pathlib.Path(os.path.realpath(file)))
    return any(
        _INSTALLED & set(path.parts) or any(map(path.is_relative_to, _libraries()))
        for path in paths
    )


@functools.cache
def _libraries() -> frozenset[str]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(name) for name in names}
    return frozenset({*found, *site.getsitepackages(), site.getusersitepackages(), str(_PACKAGE)})
