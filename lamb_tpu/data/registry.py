"""Data sets by name: bundled sets, prepared sets, photographs, text, and any prepared TFDS set."""

import dataclasses
import importlib
import inspect
import os
import pathlib
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lamb_tpu.components import Field, Registry, fields_of
from lamb_tpu.data import custom_source, originals
from lamb_tpu.data.images.arrays import ArrayOptions, AugmentedArraySource
from lamb_tpu.data.source import Source, title
from lamb_tpu.data.text.masked_lm import MaskedLmOptions, MaskedLmSource
from lamb_tpu.errors import UserError, listed

if TYPE_CHECKING:
    from lamb_tpu.data.images.source import ImageOptions


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a data set without options."""


def load(
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    source_dir: str | None = None,
    in_memory: bool | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    training: bool = True,
    batch_size: int = 1,
) -> Source:
    """Loads a split of a data set, and prepares the set first if necessary.

    Args:
      name: one of:
        `digits` (bundled with the package), `mnist`, `fashion_mnist`, `cifar10`;
        `tfds:NAME[/CONFIG]`, any set that TFDS has prepared in the ArrayRecord format;
        photographs, decoded while they are read: `image_folder`, `imagenet2012` (prepared by TFDS),
        and any TFDS set whose images differ in size; `cifar10_jpeg`, one file;
        text: `masked_lm` (prepared by `lamb_tpu.data.prepare_text`), `squad`, `ptb`, and the
        bundled `python_docs`, `python_docs_cloze` and `python_docs_words`, which resemble these
        three;
        pairs of German and English sentences: `multi30k`, `wmt16` and the bundled `grammar_de_en`;
        'package.module:Name', a custom data set, see README.md in this folder.
      split: in TFDS syntax, such as `train`, `train[:1000]` or `test[50%:]`. `masked_lm`: a
        prepared folder in `source_dir`. `squad`: a file in `source_dir`. `ptb`: train, valid or
        test. Bundled text: train or test. `image_folder`: TFDS syntax, with the folders in
        `source_dir` as splits, see `images.folder.FolderRecords`.
      data_dir: folder of prepared sets; None for the default of TFDS, `~/tensorflow_datasets`.
      source_dir: folder with the original files, if the set is not prepared yet; None downloads
        them. For `masked_lm`, `squad` and `image_folder` see `split`; for `cifar10_jpeg`, `ptb` and
        `multi30k` this is the folder with the set's files.
      in_memory: whether to read the full split into memory, as arrays or token ids; None does so
        if the split has at most `prepared.IN_MEMORY_BYTES`. `digits`, questions and bundled text are
        always in memory, photographs never.
      options: option -> value; see the data set's class: `masked_lm.MaskedLmOptions` except the seed,
        `squad_source.SquadOptions`, `python_docs.PythonDocsOptions`, `python_docs.ClozeOptions`,
        `streams.StreamOptions`, `python_docs_words.PythonDocsWordsOptions` or
        `pair_source.PairOptions` for text;
        `images.source.ImageOptions` for photographs; `images.arrays.ArrayOptions` for `cifar10` and
        `cifar10_jpeg`.
      seed: seed of the random choices in training examples. Evaluation uses 0 instead, so that runs
        with different seeds are evaluated on the same examples.
      training: True if the split is for training, False if it is for evaluation.
      batch_size: examples in a training batch over all processes; `ptb` and `python_docs_words`
        need it, because it is their number of streams.

    Returns:
      A source with fields in their stored dtypes (images uint8) and class labels int32.

    Raises:
      UserError: the name, the split or an option is unknown, a file is missing or damaged, or a
        download fails.
    """
    values: dict[str, Any] = dict(
        name=name,
        split=split,
        # The shell does not expand the ~ in --config.data.dir=~/DIR.
        data_dir=data_dir and os.path.expanduser(data_dir),
        source_dir=source_dir and os.path.expanduser(source_dir),
        in_memory=in_memory,
        given=dict(options or {}),
        seed=seed if training else 0,
        training=training,
        batch_size=batch_size,
    )
    if DATASETS.is_custom(name):
        return custom_source.load(DATASETS, name, values["given"], values)
    data_set: _Set = DATASETS.find(name)
    load_split = _imported(data_set.load)
    takes = inspect.signature(load_split).parameters
    if "given" not in takes:  # `load_tfds` reads the options after it has opened the set
        values["options"] = read_options(name, values["given"], values["seed"])
    source: Source = load_split(**{key: values[key] for key in takes if key in values})
    return source


class _Set(NamedTuple):
    """A shipped data set: a function and a dataclass, each named as 'module:name' in this package.

    The function `load` loads a split. It may take any arguments of `registry.load`, `given` (the
    options as the user gave them) and `options` (an instance of the dataclass).
    """

    load: str
    options: str = "registry:NoOptions"


def _imported(path: str) -> Any:
    # Imported at first use, because importing the tokenizer and the image decoder is slow.
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"lamb_tpu.data.{module}"), name)


def _fields(made: Any) -> dict[str, Field]:
    if isinstance(made, _Set):
        return fields_of(_imported(made.options), ("seed",))  # the run sets the seed
    return fields_of(made, custom_source.OFFERED)


def read_options(name: str, given: Mapping[str, Any], seed: int = 0) -> Any:
    """Reads the options of a shipped data set; returns an instance of their dataclass.

    `given` is `config.data.options`; the value None leaves an option at its default. `seed` is used
    if the dataclass has this field. Raises a UserError if an option is unknown or has the wrong type.
    """
    DATASETS.check(name, given)
    options_type = _imported(DATASETS.find(name).options)
    chosen = {key: value for key, value in given.items() if value is not None}
    if any(field.name == "seed" for field in dataclasses.fields(options_type)):
        chosen["seed"] = seed
    return options_type(**chosen)


def check_same_text(train: Source, evaluation: Source) -> None:
    """Raises a UserError if two text sets differ in their vocabulary or casing."""
    ours, theirs = train.vocabulary, evaluation.vocabulary
    if ours is None or theirs is None:
        return
    tokens = zip(ours.tokens, theirs.tokens)
    for what, first, second in (
        ("number of tokens in the vocabulary", len(ours), len(theirs)),
        ("cased", train.cased, evaluation.cased),
        # Equal sizes are not enough: each id must stand for the same token in both sets.
        *((f"token {number}", *pair) for number, pair in enumerate(tokens)),
    ):
        if first != second:
            problem = f"differs from {second!r} in the evaluation set {title(evaluation)}"
            remedy = "prepare both sets with the same vocabulary and casing"
            raise UserError(f"{what} of the training set {title(train)}", first, problem, remedy)


def load_original(
    name: str, split: str, data_dir: str | None, source_dir: str | None, in_memory: bool | None
) -> Source:
    """Loads a split of MNIST, Fashion-MNIST or CIFAR-10, see `load`."""
    # If possible, reads the original files without TFDS, which is faster because no PNG is decoded.
    if in_memory is not False:
        source = originals.load(name, split, source_dir)
        if source is not None:
            return source
    return _tfds(name).load_by_builder(name, split, data_dir, source_dir, in_memory)


def _tfds(name: str) -> types.ModuleType:
    """Returns `lamb_tpu.data.prepared`; raises a UserError if TFDS is not installed."""
    try:
        return importlib.import_module("lamb_tpu.data.prepared")
    except ModuleNotFoundError as error:
        folder = ", or give --config.data.dir=FOLDER, a folder with all original files"
        problem = f"needs the package {error.name}, which is not installed"
        remedy = (
            "install the extra train: pip install '.[train]'"
            f"{folder if name in originals.SETS else ''}"
        )
        raise UserError(f"data set {name}", ..., problem, remedy) from error


def load_cifar10(
    name: str,
    split: str,
    data_dir: str | None,
    source_dir: str | None,
    in_memory: bool | None,
    options: ArrayOptions,
    seed: int,
    training: bool,
) -> Source:
    """Loads a split of CIFAR-10, from its original files or from JPEGs, see `load`."""
    augments = training and not options.change_nothing
    if name == "cifar10_jpeg":
        plain = _imported("images.cifar10_jpeg:load_cifar10_jpeg")(split, source_dir)
    else:
        # Augmentation works on arrays, so the set must be in memory.
        plain = load_original(name, split, data_dir, source_dir, True if augments else in_memory)
    if not augments:
        return plain
    return AugmentedArraySource(plain.name, plain.arrays, plain.num_classes, options, seed)


def load_tfds(
    name: str,
    split: str,
    data_dir: str | None,
    source_dir: str | None,
    in_memory: bool | None,
    given: Mapping[str, Any],
    seed: int,
    training: bool,
) -> Source:
    """Loads a split of a set that TFDS has prepared, see `load`."""
    prepared = _tfds(name)
    builder = prepared.find(name, data_dir, source_dir)
    if prepared.holds_photographs(builder):
        options = read_options(name, given)
        return prepared.load_images(name, split, builder, options, seed, training)
    for key in given:
        remedy = f"leave it out, because data set {name!r} has no options"
        raise UserError(f"config.data.options.{key}", ..., "is unknown", remedy)
    return prepared.read(name, builder, split, in_memory)


def load_masked_lm(
    split: str, source_dir: str | None, in_memory: bool | None, options: MaskedLmOptions
) -> Source:
    """Loads a folder of prepared text, see `load`."""
    if source_dir is None:
        remedy = (
            f"give DIR, the folder that contains {split!r}; to make it, run "
            f"python -m lamb_tpu.prepare_text --output=DIR/{split}"
        )
        raise UserError("config.data.dir", ..., "is missing", remedy)
    from lamb_tpu.data.text.shards import MANIFEST, TokenShards

    root = pathlib.Path(source_dir)
    if not (root / split).is_dir():
        prepared = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
        remedy = f"use a split of config.data.dir: {listed(prepared)}"
        if (root / MANIFEST).exists():
            remedy = f"use the parent folder as config.data.dir: {root} is itself a prepared folder"
        elif not prepared:
            remedy = f"run python -m lamb_tpu.prepare_text --output={root / split} to make it"
        raise UserError(f"{root / split}", ..., "is not a prepared folder", remedy)
    return MaskedLmSource(TokenShards(root / split, in_memory), options)


def load_image_folder(
    split: str, source_dir: str | None, options: "ImageOptions", seed: int, training: bool
) -> Source:
    """Loads a split of a folder of images, see `load`."""
    from lamb_tpu.data.images.folder import FolderRecords
    from lamb_tpu.data.images.source import ImageSource

    if source_dir is None:
        where = "DIR/SPLIT/CLASS or DIR/CLASS, or with a list of images in DIR/labels.tsv"
        remedy = f"give a folder DIR with images in {where}"
        raise UserError("config.data.dir", ..., "is missing", remedy)
    # The option on_bad_record applies to damaged files and also to wrong lines of labels.tsv.
    skip = options.on_bad_record == "skip"
    records = FolderRecords(source_dir, split, options.num_classes, skip, options.holdout, training)
    return ImageSource(f"image_folder:{split}", records, options, seed, training)


_PHOTOGRAPHS, _PAIRS = "images.source:ImageOptions", "text.pair_source:PairOptions"
_ARRAYS, _DOCS = "images.arrays:ArrayOptions", "text.python_docs"
_DOCS_WORDS = "text.python_docs_words"

DATASETS = Registry(
    "data set",
    {
        "digits": _Set("digits:load_digits"),
        **dict.fromkeys(originals.SETS, _Set("registry:load_original")),
        **dict.fromkeys(("cifar10", "cifar10_jpeg"), _Set("registry:load_cifar10", _ARRAYS)),
        "image_folder": _Set("registry:load_image_folder", _PHOTOGRAPHS),
        "imagenet2012": _Set("registry:load_tfds", _PHOTOGRAPHS),
        "masked_lm": _Set("registry:load_masked_lm", "text.masked_lm:MaskedLmOptions"),
        "squad": _Set("text.squad_source:load_squad", "text.squad_source:SquadOptions"),
        **dict.fromkeys(
            ("multi30k", "wmt16", "grammar_de_en"), _Set("text.pair_source:load_pairs", _PAIRS)
        ),
        "python_docs": _Set(f"{_DOCS}:load_python_docs", f"{_DOCS}:PythonDocsOptions"),
        "python_docs_cloze": _Set(f"{_DOCS}:load_python_docs_cloze", f"{_DOCS}:ClozeOptions"),
        "ptb": _Set("text.ptb:load_ptb", "text.streams:StreamOptions"),
        "python_docs_words": _Set(
            f"{_DOCS_WORDS}:load_python_docs_words", f"{_DOCS_WORDS}:PythonDocsWordsOptions"
        ),
    },
    section="data.options",
    name_key="data.name",
    # Only the files of a prepared TFDS set show whether it has photographs.
    prefixes={"tfds:": _Set("registry:load_tfds", _PHOTOGRAPHS)},
    fields=_fields,
    none_is_default=True,
)
