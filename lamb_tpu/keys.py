"""Generates the page of all config keys: python -m lamb_tpu.keys > configs/keys.md"""

import math
from collections.abc import Iterator, Mapping
from typing import get_origin

from lamb_tpu import spec_keys

_TYPES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "True or False",
    tuple: "tuple",
    spec_keys.Component: "name and fields",
}


def page() -> str:
    """Returns the page as Markdown."""
    lines = [
        "# Keys of a config",
        "",
        "A recipe starts from these defaults and changes some of them. On the command line, set a key "
        "with `--config.KEY=VALUE`. A duration is text: '30 epochs', '1000 steps', '50000 examples' or "
        "'5 percent' (of the run). [lamb_tpu.spec_keys](../lamb_tpu/spec_keys.py) declares the keys, "
        "and `python -m lamb_tpu.keys` generates this page.",
        "",
        "| key | type | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for path, *texts in rows():
        cells = [f"`{path}`", *texts]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields the path, type, default (as code) and meaning of each key."""
    for key in spec_keys.keys():
        if isinstance(key.default, spec_keys.Component):
            default = ", ".join(
                f"{name}={value!r}"
                for name, value in {"name": key.default.name, **key.default.fields}.items()
                if value != ""
            )
        elif isinstance(key.default, Mapping):
            default = ", ".join(f"{name}={value!r}" for name, value in key.default.items())
        else:
            default = repr(key.default)
        yield key.path, _type_of(key), default and f"`{default}`", key.details.text


def _type_of(key: spec_keys.Key) -> str:
    """Describes the type and bounds of a key, such as 'whole number, at least 1'."""
    details = key.details
    if details.known:
        return " or ".join(details.known)
    if details.is_path:
        return "path or None"
    kind = get_origin(key.kind) or key.kind
    text = "names and values" if kind is Mapping else _TYPES[kind]
    if details.least > -math.inf:
        text += f", at least {details.least:g}"
    if details.most < math.inf:
        text += f", at most {details.most:.0f}"
    if details.below < math.inf:
        text += f", below {details.below:.0f}"
    return text


if __name__ == "__main__":
    print(page(), end="")
