"""A trap for code in data: payloads that leave a mark if something executes them."""

import contextlib
import importlib
import json
import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

from lamb_tpu.errors import UserError

NAME = "marking_module"


class _Marks:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


class Trap:
    """A folder of data, and payloads that leave a file `mark` if anything executes them.

    Attributes:
      folder: the current folder, from which modules can be imported.
      texts: payloads that are text.
      pickled: a payload that is a pickle.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self._mark = folder, folder / "mark"
        command = f"touch {self._mark}"
        code = f"__import__('os').system('{command}')"
        self.texts = [
            f"{NAME}:Net",
            f"{NAME}.Net",
            NAME,
            f"{NAME}:Net()",
            "os:system",
            "subprocess:getoutput",
            code,
            f"{{{{ cycler.__init__.__globals__.os.system('{command}') }}}}",
            f"!!python/object/apply:os.system ['{command}']",
            f"$({command})",
            f"`{command}`",
            f"; {command}; #",
            f"{{x.__class__}}{code}",
            f"{folder / NAME}.py",
            f"{folder / NAME}.py:smoke",
        ]
        self.pickled = pickle.dumps(_Marks(command))

    def install(self) -> None:
        """Moves the module to the installed packages, which stored data may not name.

        A stored config or a table may name classes of the user's modules; see `lamb_tpu.trust`.
        """
        packages = self.folder / "site-packages"
        packages.mkdir()
        (self.folder / f"{NAME}.py").rename(packages / f"{NAME}.py")
        sys.path.insert(0, str(packages))
        importlib.invalidate_caches()

    def sprung(self) -> bool:
        """Returns whether code ran, and sets the trap again."""
        ran = self._mark.exists()
        self._mark.unlink(missing_ok=True)
        sys.modules.pop(NAME, None)
        return ran

    def into_json(self, path: pathlib.Path, read: Callable[[], Any]) -> None:
        """Reads a JSON file with each payload as its strings, names or keys, and then as a pickle."""
        before = path.read_text()
        lines = path.suffix == ".jsonl"
        documents = (
            [json.loads(line) for line in before.splitlines()] if lines else [json.loads(before)]
        )
        for payload in self.texts:
            for change in (in_strings, in_names, in_keys):
                changed = [change(document, payload) for document in documents]
                path.write_text("".join(json.dumps(each) + "\n" for each in changed))
                self.check(read, f"{path.name}: {payload}")
        path.write_bytes(self.pickled)
        self.check(read, f"{path.name}: a pickle")
        path.write_text(before)

    def into_text(self, path: pathlib.Path, texts: Iterable[str], read: Callable[[], Any]) -> None:
        """Writes each text to a file and reads it; then restores the file if it existed before."""
        before = path.read_bytes() if path.exists() else None
        for text in texts:
            path.write_text(text)
            self.check(read, f"{path.name}: {text}")
        if before is not None:
            path.write_bytes(before)

    def check(self, read: Callable[[], Any], what: str) -> None:
        """Reads data, which may be rejected, and asserts that no payload ran."""
        with contextlib.suppress(UserError, SystemExit):
            read()
        assert not self.sprung(), what


def in_strings(node: Any, payload: str) -> Any:
    match node:
        case str():
            return payload
        case dict():
            return {key: in_strings(value, payload) for key, value in node.items()}
        case list():
            return [in_strings(each, payload) for each in node[:3]]
    return node


def in_names(node: Any, payload: str) -> Any:
    """Replaces only fields that name something, so that the other fields still pass earlier checks."""
    match node:
        case dict():
            return {
                key: payload
                if isinstance(value, str) and key.endswith("name")
                else in_names(value, payload)
                for key, value in node.items()
            }
        case list():
            return [in_names(each, payload) for each in node]
    return node


def in_keys(node: Any, payload: str) -> Any:
    if not isinstance(node, dict):
        return node
    return {
        **node,
        payload: payload,
        "auto_map": {"AutoModel": payload},
        "__reduce__": payload,
        "py/object": payload,
        "_target_": payload,
        "$ref": payload,
    }
