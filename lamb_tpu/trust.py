"""Protection against stored configs that name foreign code.

A config stored in a folder may come from someone else, and the model 'subprocess:getoutput' with the
field `cmd` would run a program. Therefore the names in a stored config must refer to classes and
functions of the user's modules: modules outside the standard library, the installed packages, this
package and the config's folder.
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

from lamb_tpu import custom
from lamb_tpu.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parent
# Debian's Python and other virtual environments also use these folder names.
_INSTALLED = {"site-packages", "dist-packages"}


def check(stored: Mapping[str, Any], file: pathlib.Path, flag: str) -> None:
    """Rejects custom components in a stored config that the user's modules do not define.

    Imports the user's modules and nothing else. `file` is the stored config; modules in its folder
    are not trusted either. `flag` is the flag that turns this check off, for the message.
    """
    folder = pathlib.Path(os.path.realpath(file)).parent
    for key, name in _names(stored, "config"):
        reason = _rejected(name, key, folder)
        if reason is not None:
            raise UserError(
                key,
                name,
                f"in {file} is rejected: {reason}, but a stored config may name only what "
                "your own modules define, because other code can run any program",
                f"give {flag} if you trust the author of that folder",
            )


def _names(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields the key and text of each value with the form of a custom name, at any depth."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _names(inner, f"{key}.{part}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _names(inner, key)
    elif custom.module_of(value) is not None:
        yield key, value


def _rejected(name: str, key: str, folder: pathlib.Path) -> str | None:
    """Returns why a name is rejected; None if the name is allowed or cannot be imported."""
    module = name.partition(":")[0]
    reason = _of_module(module, key, name, folder)
    # If the module cannot be imported, the value is other text, or `custom.find` reports the error.
    if reason is not None or module not in sys.modules:
        return reason
    component = custom.find(name, key)
    # A module also contains the names that it imports. A package may re-export its modules' names.
    home = getattr(component, "__module__", None)
    if not isinstance(home, str) or home.partition(".")[0] != module.partition(".")[0]:
        return f"{module} does not define it" + (f" ({home} does)" if home else "")
    return _of_module(home, key, name, folder)


def _of_module(module: str, key: str, name: str, folder: pathlib.Path) -> str | None:
    """Locates and then imports a module, package by package; returns why it is rejected, or None."""
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        path = ".".join(parts[:number])
        try:
            # The parent packages are already imported, so this imports nothing.
            spec = importlib.util.find_spec(path)
        except (
            ImportError,
            ValueError,
        ):  # the parent is not a package, or the module has no location
            return f"{path} has no file" if path in sys.modules else None
        if spec is None:
            return None
        # A folder without __init__.py contains no code itself.
        is_folder = spec.origin is None and spec.submodule_search_locations is not None
        if not is_folder and (reason := _of_file(path, spec.origin, folder)):
            return reason
        custom.imported(path, key, name)
    return None


def _of_file(module: str, origin: str | None, folder: pathlib.Path) -> str | None:
    if module.partition(".")[0] in sys.stdlib_module_names:
        return f"{module} belongs to Python's standard library"
    if origin is None or not os.path.isabs(origin):  # 'built-in', 'frozen'
        return f"{module} has no file"
    if is_library(origin):
        return f"{module} belongs to an installed package, Python or lamb_tpu ({origin})"
    if pathlib.Path(os.path.realpath(origin)).is_relative_to(folder):
        return f"{module} is in the folder of that file"
    return None


def is_library(file: str) -> bool:
    """Returns whether a file belongs to Python, an installed package or this package."""
    # Also check the target of symbolic links.
    paths = (pathlib.Path(file), pathlib.Path(os.path.realpath(file)))
    return any(
        _INSTALLED & set(path.parts) or any(map(path.is_relative_to, _libraries()))
        for path in paths
    )


@functools.cache
def _libraries() -> frozenset[str]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(name) for name in names}
    return frozenset({*paths, *site.getsitepackages(), site.getusersitepackages(), str(_PACKAGE)})
