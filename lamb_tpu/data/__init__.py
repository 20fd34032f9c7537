"""Where records come from and how they become batches."""

from lamb_tpu.data.evaluation import eval_batches
from lamb_tpu.data.loader import TrainLoader
from lamb_tpu.data.order import example_order, global_indices
from lamb_tpu.data.registry import DATASETS, check_same_text, load
from lamb_tpu.data.source import ArraySource, Batch, FieldSpec, RecordSource, Source, title

__all__ = [
    "DATASETS",
    "ArraySource",
    "Batch",
    "FieldSpec",
    "RecordSource",
    "Source",
    "TrainLoader",
    "check_same_text",
    "eval_batches",
    "example_order",
    "global_indices",
    "load",
    "title",
]
