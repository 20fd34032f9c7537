"""Data sets, the order of their examples, and batches."""

import importlib
from typing import Any

# Imported at first use: Grain and TFDS take a second, which the commands of this package, such as
# prepare_text, would spend before they answer --help.
_MODULES = {
    "checking": ("LARGEST", "ZERO_OR_ONE", "Check", "Range", "Ranges"),
    "evaluation": ("eval_batches",),
    "loader": ("TrainLoader",),
    "order": ("example_order", "global_indices"),
    "registry": ("DATASETS", "check_same_text", "load"),
    "shapes": ("ShapeSource", "load_shapes"),
    "source": (
        "ArraySource",
        "BaseSource",
        "Batch",
        "FieldSpec",
        "RecordSource",
        "Source",
        "title",
        "tokens_of",
        "zeros",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    # Stored, so that Python does not ask this function for the name again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
