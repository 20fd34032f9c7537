"""Data sets by name: embedded, prepared here, photographs, text, and any prepared TFDS set."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow_datasets as tfds

from lamb_tpu import own
from lamb_tpu.data import own_source
from lamb_tpu.data.builders import BUILDERS
from lamb_tpu.data.digits import load_digits
from lamb_tpu.data.images.arrays import ArrayOptions, AugmentedArraySource
from lamb_tpu.data.options import NoOptions, read_options
from lamb_tpu.data.prepare import is_prepared, prepare
from lamb_tpu.data.source import ArraySource, RecordSource, Source, title
from lamb_tpu.data.splits import slices
from lamb_tpu.data.text import streams
from lamb_tpu.data.text.masked_lm import MaskedLmSource, Options
from lamb_tpu.data.text.ptb import load_ptb
from lamb_tpu.data.text.shards import MANIFEST, TokenShards
from lamb_tpu.errors import UserError

IN_MEMORY_BYTES = 2**30  # decoded sets up to this size are read into memory by default
_TFDS_PREFIX = "tfds:"


class _Request(NamedTuple):
    """The arguments of `load`."""

    name: str
    split: str
    data_dir: str | None
    source_dir: str | None
    in_memory: bool | None
    given: Mapping[str, Any]
    seed: int
    training: bool
    batch_size: int

    def options(self, **fixed: Any) -> Any:
        """Returns the given options, as the data set's own dataclass."""
        return read_options(self.name, options_type(self.name), self.given, **fixed)


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
      name: `digits` (embedded), `mnist`, `fashion_mnist`, `cifar10`, or `tfds:NAME[/CONFIG]` for
        any set prepared by TFDS in the ArrayRecord format. Photographs, which are decoded while
        they are read: `image_folder`, `imagenet2012` (prepared by TFDS), and any TFDS set whose
        images differ in size; and `cifar10_jpeg`, one file. Text: `masked_lm` (prepared by
        `lamb_tpu.data.prepare_text`), `squad`, `ptb`, and, embedded, `python_docs`,
        `python_docs_cloze` and `python_docs_words`, which resemble these three. Pairs of sentences
        in German and English: `multi30k`, `wmt16` and, embedded, `grammar_de_en`.
        'package.module:Name' is a user's own, see README.md of this folder.
      split: in TFDS syntax, such as `train`, `train[:1000]` or `test[50%:]`. `masked_lm`: a
        prepared folder in `source_dir`; `squad`: a file in it; the embedded text: train or test;
        `image_folder`: slices of a folder in it too, or as `images.folder.FolderRecords` has it.
      data_dir: folder of prepared sets; None is TFDS's own, `~/tensorflow_datasets`.
      source_dir: folder with the original files, if the set is not prepared yet; None downloads
        them. For `masked_lm`, `squad` and `image_folder` see `split`; for `cifar10_jpeg` it is the
        folder of its file, for `ptb` that of its three.
      in_memory: whether to read the whole split into memory, as arrays or token ids; None does so
        up to `IN_MEMORY_BYTES`. `digits`, questions and embedded text are always in memory,
        photographs never.
      options: for text, the fields of `masked_lm.Options` except the seed, `squad_source.Options`,
        `python_docs.Options`, `python_docs.ClozeOptions`, `streams.Options` or
        `python_docs_words.Options`; for photographs, of `images.source.Options`; for `cifar10` and
        `cifar10_jpeg`, of `images.arrays.ArrayOptions`.
      seed: seed of the random choices in training examples. Evaluation uses 0 instead, so that runs
        with different seeds are measured on the same examples.
      training: whether the split is for training or for evaluation.
      batch_size: examples in a training batch over all processes: the number of streams of `ptb`.

    Returns:
      A source with fields in their stored dtypes (images uint8) and class labels int32.

    Raises:
      UserError: name, split or option is unknown, files are missing or damaged, or there is no
        network.
    """
    # A shell leaves the ~ in --config.data.dir=~/DIR as it is.
    data_dir, source_dir = (
        None if folder is None else os.path.expanduser(folder) for folder in (data_dir, source_dir)
    )
    request = _Request(
        name,
        split,
        data_dir,
        source_dir,
        in_memory,
        dict(options or {}),
        seed if training else 0,
        training,
        batch_size,
    )
    # Before names of one's own, because 'tfds:NAME' has a colon too.
    if name.startswith(_TFDS_PREFIX):
        return _load_tfds(request)
    if own.is_own(name):
        return own_source.load(name, request.given, request._asdict())
    _check_name(name)
    return DATASETS[name](request)


def option_fields(name: str) -> dict[str, dataclasses.Field]:
    """Returns the options of a data set with their types and defaults, by name.

    A set prepared by TFDS gets the options of photographs: only its files show whether it has any.

    Raises:
      UserError: the name is unknown.
    """
    if own.is_own(name) and not name.startswith(_TFDS_PREFIX):
        return own_source.option_fields(name)
    _check_name(name)
    # `seed` is the run's.
    return {f.name: f for f in dataclasses.fields(options_type(name)) if f.name != "seed"}


def _check_name(name: str) -> None:
    if name not in DATASETS and not name.startswith(_TFDS_PREFIX):
        raise UserError(
            f"config.data.name is {name!r}, an unknown data set; known are "
            f"{', '.join(sorted(DATASETS))}, tfds:NAME[/CONFIG] for one prepared by TFDS, and "
            "'package.module:Name' for your own"
        )


# The tokenizer and the decoder of pictures are imported where they are used, to start fast.


def options_type(name: str) -> type:
    """Returns the dataclass of a data set's options."""
    if name in ("image_folder", "imagenet2012") or name.startswith(_TFDS_PREFIX):
        from lamb_tpu.data.images.source import Options as ImageOptions

        return ImageOptions
    if name == "squad":
        from lamb_tpu.data.text import squad_source

        return squad_source.Options
    if name in ("python_docs", "python_docs_cloze"):
        from lamb_tpu.data.text import python_docs

        return python_docs.Options if name == "python_docs" else python_docs.ClozeOptions
    if name == "python_docs_words":
        from lamb_tpu.data.text import python_docs_words

        return python_docs_words.Options
    if name in ("multi30k", "wmt16", "grammar_de_en"):
        from lamb_tpu.data.text import pair_source

        return pair_source.Options
    own = {
        "masked_lm": Options,
        "ptb": streams.Options,
        "cifar10": ArrayOptions,
        "cifar10_jpeg": ArrayOptions,
    }
    return own.get(name, NoOptions)


def check_same_text(train: Source, evaluation: Source) -> None:
    """Refuses two sets of text with different vocabularies or case.

    Raises:
      UserError: they differ; the message names both.
    """
    ours, theirs = train.vocabulary, evaluation.vocabulary
    if ours is None or theirs is None:
        return
    for what, first, second in (
        ("tokens in the vocabulary", len(ours), len(theirs)),
        ("cased", train.cased, evaluation.cased),
    ):
        if first != second:
            raise UserError(
                f"config.data: the training set {title(train)} has {what} = {first}, the "
                f"evaluation set {title(evaluation)} has {second}; prepare both with the same "
                "vocabulary"
            )
    # An id means the same token in both sets only if all tokens agree.
    for number, (token, other) in enumerate(zip(ours.tokens, theirs.tokens)):
        if token != other:
            raise UserError(
                f"config.data: token {number} of the training set {title(train)} is {token!r}, of "
                f"the evaluation set {title(evaluation)} {other!r}; prepare both with the same "
                "vocabulary"
            )


# Sets without options call `request.options()` too, which refuses any that are given.
def _load_own(request: _Request) -> Source:
    request.options()
    return _read_own(request, request.in_memory)


def _read_own(request: _Request, in_memory: bool | None) -> Source:
    builder = functools.partial(BUILDERS[request.name], data_dir=request.data_dir)
    prepare(builder(), request.source_dir)
    # A new builder: one that was made before another process had finished has no splits.
    return _read(request.name, builder(), request.split, in_memory)


def _load_cifar10(request: _Request) -> Source:
    options = request.options()
    augments = request.training and not options.change_nothing
    # Augmentation works on whole arrays, so the set must be in memory.
    plain = _read_own(request, in_memory=True if augments else request.in_memory)
    if not augments:
        return plain
    assert isinstance(plain, ArraySource)  # it is in memory
    return _augmented(plain, options, request.seed)


def _augmented(plain: ArraySource, options: ArrayOptions, seed: int) -> Source:
    return AugmentedArraySource(plain.name, plain.arrays, plain.num_classes, options, seed)


def _load_tfds(request: _Request) -> Source:
    name, data_dir, source_dir = request.name, request.data_dir, request.source_dir
    tfds_name = name.removeprefix(_TFDS_PREFIX)
    if source_dir is not None:
        raise UserError(
            f"data set {name} cannot be prepared from a folder of original files, found "
            f"{source_dir}; prepare it with TFDS and leave the folder out"
        )
    try:
        builder = tfds.builder(tfds_name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"data set {name}: TFDS has no {tfds_name!r} ({first_line})") from error
    if not is_prepared(builder):
        raise UserError(
            f"data set {name} is not prepared in {builder.data_dir}; prepare it once with "
            f"tfds.builder({tfds_name!r}, data_dir=..., file_format='array_record')"
            ".download_and_prepare(), on a machine with TensorFlow where the set needs it"
        )
    if _holds_photographs(builder):
        return _load_tfds_images(request, builder)
    read_options(name, NoOptions, request.given)
    return _read(name, builder, request.split, request.in_memory)


def _holds_photographs(builder: tfds.core.DatasetBuilder) -> bool:
    """Returns whether the images of a set differ in size, so that they must be cropped."""
    features = builder.info.features
    image = features["image"] if "image" in features else None
    # TFDS writes None for a side that differs between examples.
    return isinstance(image, tfds.features.Image) and None in image.shape[:2]


def _read(
    name: str, builder: tfds.core.DatasetBuilder, split: str, in_memory: bool | None
) -> Source:
    records = _open(name, builder, split)
    features = builder.info.features
    labels = [key for key in features if isinstance(features[key], tfds.features.ClassLabel)]
    num_classes = features["label"].num_classes if "label" in labels else None
    folder = str(builder.data_dir)
    source = RecordSource(f"{name}:{split}", records, num_classes, labels, folder)
    if in_memory is None:
        # As decoded, which may be many times the size of the files.
        example_bytes = sum(spec.num_bytes for spec in source.element_spec.values())
        in_memory = len(source) * example_bytes <= IN_MEMORY_BYTES
    return source.read_all() if in_memory else source


def _open(
    name: str,
    builder: tfds.core.DatasetBuilder,
    split: str,
    decoders: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the records of a prepared set, for reading by index."""
    # The files are checked before TFDS opens them, to name the one that is missing.
    infos = builder.info.splits
    parts = slices(name, split, {key: info.num_examples for key, info in infos.items()})
    for path in [path for part, *_ in parts for path in infos[part].filepaths]:
        if not path.exists():
            raise UserError(
                f"data set {name}: {path} is missing; delete {builder.data_dir} and prepare the "
                "set again"
            )
    try:
        return builder.as_data_source(split=split, decoders=decoders)
    except NotImplementedError as error:
        raise UserError(
            f"data set {name}: {builder.data_dir} is prepared as {builder.info.file_format}, which "
            "cannot be read by index; prepare it in another data folder as array_record"
        ) from error


def _load_digits(request: _Request) -> Source:
    request.options()
    return load_digits(request.split)


def _load_masked_lm(request: _Request) -> Source:
    options = request.options(seed=request.seed)
    if request.source_dir is None:
        raise UserError(
            "config.data.dir is missing; for masked_lm it is the folder in which prepared folders "
            f"lie, such as the {request.split!r} that python -m lamb_tpu.data.prepare_text "
            f"--output=DIR/{request.split} makes"
        )
    root = pathlib.Path(request.source_dir)
    if not (root / request.split).is_dir():
        prepared = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
        itself = "; it is a prepared one itself, give the one above" * (root / MANIFEST).exists()
        raise UserError(
            f"{root / request.split} is no folder; a split of masked_lm is the name of a prepared "
            f"one in config.data.dir, which has {', '.join(prepared) or 'none'}{itself}"
        )
    return MaskedLmSource(TokenShards(root / request.split, request.in_memory), options)


def _load_squad(request: _Request) -> Source:
    from lamb_tpu.data.text import squad_source

    options = request.options()
    return squad_source.load_squad(request.split, request.source_dir, options, request.training)


def _load_python_docs(request: _Request) -> Source:
    from lamb_tpu.data.text import python_docs

    options = request.options(seed=request.seed)
    return python_docs.load_python_docs(request.split, options)


def _load_python_docs_cloze(request: _Request) -> Source:
    from lamb_tpu.data.text import python_docs

    options = request.options()
    return python_docs.load_python_docs_cloze(request.split, options, request.training)


def _load_ptb(request: _Request) -> Source:
    return load_ptb(
        request.split, request.source_dir, request.options(), request.batch_size, request.training
    )


def _load_python_docs_words(request: _Request) -> Source:
    from lamb_tpu.data.text.python_docs_words import load_python_docs_words

    options = request.options()
    return load_python_docs_words(request.split, options, request.batch_size, request.training)


def _load_pairs(request: _Request) -> Source:
    from lamb_tpu.data.text import pair_source

    options = request.options()
    return pair_source.load_pairs(
        request.name, request.split, request.source_dir, request.data_dir, options, request.training
    )


def _load_tfds_images(request: _Request, builder: tfds.core.DatasetBuilder) -> Source:
    from lamb_tpu.data.images.records import TfdsRecords
    from lamb_tpu.data.images.source import ImageSource

    options = request.options()
    if options.holdout:
        raise UserError(
            f"config.data.options.holdout={options.holdout} is of image_folder; data set "
            f"{request.name} has splits, such as 'train[:90%]' and 'train[90%:]'"
        )
    features = builder.info.features
    label = features["label"] if "label" in features else None
    if not isinstance(label, tfds.features.ClassLabel):
        raise UserError(f"data set {request.name} has images and no class label named 'label'")
    num_classes = options.num_classes or label.num_classes
    if num_classes < label.num_classes:
        raise UserError(
            f"config.data.options.num_classes is {num_classes}, data set {request.name} has "
            f"{label.num_classes} classes; give 0 or at least as many"
        )
    # Images stay encoded: `ImageSource` decodes only what its crop needs.
    decoders = {"image": tfds.decode.SkipDecoding()}
    source = _open(request.name, builder, request.split, decoders)
    records = TfdsRecords(source, num_classes, str(builder.data_dir))
    return ImageSource(
        f"{request.name}:{request.split}", records, options, request.seed, request.training
    )


def _load_image_folder(request: _Request) -> Source:
    from lamb_tpu.data.images.folder import FolderRecords
    from lamb_tpu.data.images.source import ImageSource

    options = request.options()
    if request.source_dir is None:
        raise UserError(
            "config.data.dir is missing; for image_folder it is the folder DIR of pictures in "
            "DIR/SPLIT/CLASS or DIR/CLASS, or of those that DIR/labels.tsv lists"
        )
    # The option covers both damaged files and wrong lines of a list.
    skip = options.on_bad_record == "skip"
    records = FolderRecords(
        request.source_dir,
        request.split,
        options.num_classes,
        skip,
        options.holdout,
        request.training,
    )
    return ImageSource(
        f"image_folder:{request.split}", records, options, request.seed, request.training
    )


def _load_cifar10_jpeg(request: _Request) -> Source:
    from lamb_tpu.data.images.cifar10_jpeg import load_cifar10_jpeg

    options = request.options()
    plain = load_cifar10_jpeg(request.split, request.source_dir)
    augments = request.training and not options.change_nothing
    return _augmented(plain, options, request.seed) if augments else plain


DATASETS: dict[str, Callable[[_Request], Source]] = {
    "digits": _load_digits,
    **dict.fromkeys(BUILDERS, _load_own),
    "cifar10": _load_cifar10,
    "cifar10_jpeg": _load_cifar10_jpeg,
    "image_folder": _load_image_folder,
    "imagenet2012": _load_tfds,
    "masked_lm": _load_masked_lm,
    "squad": _load_squad,
    **dict.fromkeys(("multi30k", "wmt16", "grammar_de_en"), _load_pairs),
    "python_docs": _load_python_docs,
    "python_docs_cloze": _load_python_docs_cloze,
    "ptb": _load_ptb,
    "python_docs_words": _load_python_docs_words,
}
