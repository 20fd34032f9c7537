"""Data sets by their published facts: fields, classes and numbers of examples, without any file.

A plan needs the shapes of a batch and the number of examples, and reads none. The facts of MNIST,
Fashion-MNIST and CIFAR-10 are those of TFDS's catalogue; ImageNet's those of its challenge of 2012;
SQuAD's the questions in the two files of version 1.1; the Penn Treebank's the words of Mikolov's
three files; Multi30k's and WMT'16's the pairs of each split, in batches of the greatest width.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lamb_tpu.data import registry
from lamb_tpu.data.options import read_options
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec, Source, zeros
from lamb_tpu.data.splits import slices
from lamb_tpu.data.text import masked_lm, pair_source, ptb, streams
from lamb_tpu.errors import UserError

# The length of a set of unknown length, if nothing depends on it.
_ANY_LENGTH = 10**6


class _Facts(NamedTuple):
    shape: tuple[int, ...]  # of a picture
    num_classes: int
    lengths: dict[str, int]  # examples of each split


_MNIST = _Facts((28, 28, 1), 10, {"train": 60_000, "test": 10_000})
_CIFAR10 = _Facts((32, 32, 3), 10, {"train": 50_000, "test": 10_000})
_PICTURES = {
    "mnist": _MNIST,
    "fashion_mnist": _MNIST,
    "cifar10": _CIFAR10,
    "cifar10_jpeg": _CIFAR10,
}
_IMAGENET = {"train": 1_281_167, "validation": 50_000}
_IMAGENET_CLASSES = 1000
# A long context makes several windows of a question, so the sets are a little longer than this. The
# number of the training file is recalled.
_QUESTIONS = {"train-v1.1.json": 87_599, "dev-v1.1.json": 10_570}
# WMT'16's are those of TFDS's catalogue, recalled. Long pairs are left out of training.
_PAIRS = {
    "multi30k": {"train": 29_000, "validation": 1_014, "test": 1_000, "test_2017": 1_000},
    "wmt16": {"train": 4_548_885, "validation": 2_169, "test": 2_999},
}
_INT32 = np.dtype(np.int32)


class ShapeSource(BaseSource):
    """A `Source` whose shapes and length are known, and whose examples are all zeros.

    Attributes:
      counted: whether the length is that of the set; otherwise it is arbitrary.
    """

    questions: tuple[Any, ...] = ()  # of question answering

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
    """Returns a set that has the shapes of the one that `registry.load` loads, and reads no file.

    Embedded sets, a user's own, sets that only their files describe (`tfds:`), and `masked_lm`,
    `squad`, `ptb` and `image_folder` in a given folder are loaded as for training.

    Args:
      name, split, source_dir, options, training: see `registry.load`.
      examples: number of training examples, for a set whose facts are not known.
      counted_by: what needs the number of training examples, such as "config.duration is
        '3 epochs'"; '' for nothing.
      **others: the other arguments of `registry.load`.

    Raises:
      UserError: an option or a split is wrong, or the number of training examples is needed and not
        known.
    """
    given = {"options": options, "training": training, "source_dir": source_dir, **others}
    chosen: Any = None
    if (
        name in _PICTURES
        or name == "imagenet2012"
        or (name in ("masked_lm", "squad", "ptb", "image_folder", *_PAIRS) and source_dir is None)
    ):
        fixed = {"seed": 0} if name == "masked_lm" else {}
        chosen = read_options(name, registry.options_type(name), options or {}, **fixed)
    if chosen is None:
        return registry.load(name, split, **given)
    num_classes: int | None = None
    length: int | None = None
    if name in _PICTURES or name == "imagenet2012":
        facts = _PICTURES.get(name)
        if facts is None:
            size = (chosen.size, chosen.size, 3)
            facts = _Facts(size, chosen.num_classes or _IMAGENET_CLASSES, _IMAGENET)
        spec, num_classes = _picture(facts.shape), facts.num_classes
        length = sum(stop - start for _, start, stop in slices(name, split, facts.lengths))
    elif name == "image_folder":
        spec, num_classes = _picture((chosen.size, chosen.size, 3)), chosen.num_classes or None
    elif name == "ptb":
        spec, length = _streams(split, chosen, training, others.get("batch_size", 1))
        num_classes = ptb.VOCABULARY
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
            raise UserError(
                f"{counted_by}, and the number of examples of data set {name} is not known "
                "without its files; give --examples=N, or the folder of the files as "
                "config.data.dir"
            )
    return ShapeSource(f"{name}:{split}", spec, length, num_classes)


def _picture(shape: tuple[int, ...]) -> dict[str, FieldSpec]:
    return {"image": FieldSpec(shape, np.dtype(np.uint8)), "label": FieldSpec((), _INT32)}


def _streams(
    split: str, options: streams.Options, training: bool, batch_size: int
) -> tuple[dict[str, FieldSpec], int]:
    ptb.check_split(split)
    streams.check_options(options)
    total = ptb.NUM_WORDS[split]
    if training:
        length = streams.count_examples(f"ptb:{split}", total, batch_size, options)
        return streams.training_spec(options), length
    return streams.eval_spec(total, options), options.eval_streams


def _windows(length: int, training: bool) -> dict[str, FieldSpec]:
    fields = {
        "input_ids": FieldSpec((length,), _INT32),
        "token_type_ids": FieldSpec((length,), _INT32),
        "attention_mask": FieldSpec((length,), np.dtype(bool)),
    }
    if training:
        fields |= {key: FieldSpec((), _INT32) for key in ("start_position", "end_position")}
    return fields
