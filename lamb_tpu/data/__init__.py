"""Data sets, the order of their examples, and batches."""

import importlib
from typing import Any

# Imported at first use: importing Grain and TFDS takes a second, and `prepare_text --help` does not
# need them.
_MODULES = {
    "checking": "LARGEST ZERO_OR_ONE Check Range Ranges check_same_form split_difference",
    "evaluation": "eval_batches",
    "held": "HeldSet held_set",
    "loader": "TrainLoader",
    "order": "example_order global_indices",
    "registry": "DATASETS check_same_text load",
    "shapes": "ShapeSource load_shapes",
    "source": "ArraySource BaseSource Batch FieldSpec RecordSource Source "
    "num_bytes title tokens_of zeros",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # so that the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
