"""Data sets without their files: their fields, classes and numbers of examples, as published.

A plan needs the shapes of a batch and the number of examples, and reads no data. The sizes are from
TFDS's catalogue for MNIST, Fashion-MNIST and CIFAR-10, and from the 2012 challenge for ImageNet.
For SQuAD, the sizes are the numbers of questions in the two files of version 1.1; for the Penn
Treebank, the sizes follow from the numbers of words in Mikolov's three files. An example of
Multi30k or WMT'16 is a pair of sentences, padded to the option `max_length`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lamb_tpu.data import registry
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec, Source, zeros
from lamb_tpu.data.splits import slices
from lamb_tpu.data.text import masked_lm, pair_source, ptb, streams
from lamb_tpu.errors import UserError

# The length given to a set if its length is unknown and does not matter.
_ANY_LENGTH = 10**6


class _Details(NamedTuple):
    shape: tuple[int, ...] | None  # shape of an image; None: (size, size, 3) with the option `size`
    num_classes: int
    lengths: dict[str, int]  # examples of each split


_MNIST = _Details((28, 28, 1), 10, {"train": 60_000, "test": 10_000})
_CIFAR10 = _Details((32, 32, 3), 10, {"train": 50_000, "test": 10_000})
_IMAGE_SETS = {
    "mnist": _MNIST,
    "fashion_mnist": _MNIST,
    "cifar10": _CIFAR10,
    "cifar10_jpeg": _CIFAR10,
    "imagenet2012": _Details(None, 1000, {"train": 1_281_167, "validation": 50_000}),
}
# Questions in each file. The sets are a little longer, because a question about a long context has
# several windows. The number for the training file is quoted from memory, not counted.
_QUESTIONS = {"train-v1.1.json": 87_599, "dev-v1.1.json": 10_570}
# Pairs in each split. The numbers for WMT'16 are quoted from memory of TFDS's catalogue. Training
# leaves out long pairs, so the training set is smaller.
_PAIRS = {
    "multi30k": {"train": 29_000, "validation": 1_014, "test": 1_000, "test_2017": 1_000},
    "wmt16": {"train": 4_548_885, "validation": 2_169, "test": 2_999},
}
_INT32 = np.dtype(np.int32)


class ShapeSource(BaseSource):
    """A `Source` with known shapes, whose examples are all zeros.

    `counted` says whether the number of examples is known; otherwise the length is arbitrary.
    """

    questions: tuple[Any, ...] = ()  # read by the task question_answering

    def __init__(
        self,
        name: str,
        spec: Mapping[str, FieldSpec],
        length: int | None,
        num_classes: int | None = None,
    ) -> None:
        self.name, self.element_spec, self.num_classes = name, dict(spec), num_classes
        self.counted = length is not None
        self._length = _ANY_LENGTH if length is None else length

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        del epochs
        return zeros(self, len(indices))


def load_shapes(
    name: str,
    split: str,
    *,
    source_dir: str | None = None,
    options: Mapping[str, Any] | None = None,
    training: bool = True,
    examples: int | None = None,
    counted_by: str = "",
    **others: Any,
) -> Source:
    """Returns a source with the shapes of the set that `registry.load` loads.

    No files are read, with these exceptions, which `registry.load` loads: bundled and custom sets;
    `tfds:` sets, whose shapes only the files show; and `masked_lm`, `squad`, `ptb`, `image_folder`,
    `multi30k` and `wmt16` if `source_dir` is given.

    Args:
      name, split, source_dir, options, training, **others: see `registry.load`.
      examples: number of training examples, for a set whose size is unknown.
      counted_by: reason why the number of training examples is needed, such as "config.duration is
        '3 epochs'"; '' if the number is not needed.

    Raises:
      UserError: an option or the split is wrong, or the number of training examples is needed but
        unknown.
    """
    without_files = ("masked_lm", "squad", "ptb", "image_folder", *_PAIRS)
    if name not in _IMAGE_SETS and (name not in without_files or source_dir is not None):
        given = {"options": options, "training": training, "source_dir": source_dir, **others}
        return registry.load(name, split, **given)
    chosen = registry.read_options(name, options or {})
    num_classes: int | None = None
    length: int | None = None
    if name in _IMAGE_SETS:
        details = _IMAGE_SETS[name]
        spec = _image_spec(details.shape or (chosen.size, chosen.size, 3))
        num_classes = getattr(chosen, "num_classes", 0) or details.num_classes
        length = sum(stop - start for _, start, stop in slices(name, split, details.lengths))
    elif name == "image_folder":
        spec, num_classes = _image_spec((chosen.size, chosen.size, 3)), chosen.num_classes or None
    elif name == "ptb":
        ptb.check_split(split)
        streams.check_options(chosen)
        num_classes, total = ptb.VOCABULARY, ptb.NUM_WORDS[split]
        spec, length = streams.eval_spec(total, chosen), chosen.eval_streams
        if training:
            batch_size, spec = others.get("batch_size", 1), streams.training_spec(chosen)
            length = streams.count_examples(f"ptb:{split}", total, batch_size, chosen)
    elif name in _PAIRS:
        pair_source.check_options(chosen)
        spec = pair_source.element_spec(chosen.max_length, chosen.max_length)
        length = sum(stop - start for _, start, stop in slices(name, split, _PAIRS[name]))
    elif name == "squad":
        spec, length = _windows(chosen.max_length, training), _QUESTIONS.get(split)
    else:
        masked_lm.check_options(chosen)
        spec = masked_lm.element_spec(chosen)
    if training and length is None:
        length = examples
        if length is None and counted_by:
            problem = f"is not known without its files, but is needed because {counted_by}"
            remedy = "give --examples=N, or the folder with the files as config.data.dir"
            raise UserError(f"the number of examples of data set {name}", ..., problem, remedy)
    return ShapeSource(f"{name}:{split}", spec, length, num_classes)


def _image_spec(shape: tuple[int, ...]) -> dict[str, FieldSpec]:
    return {"image": FieldSpec(shape, np.dtype(np.uint8)), "label": FieldSpec((), _INT32)}


def _windows(length: int, training: bool) -> dict[str, FieldSpec]:
    fields = {
        "input_ids": FieldSpec((length,), _INT32),
        "token_type_ids": FieldSpec((length,), _INT32),
        "attention_mask": FieldSpec((length,), np.dtype(bool)),
    }
    if training:
        fields |= {key: FieldSpec((), _INT32) for key in ("start_position", "end_position")}
    return fields
