"""The folders of data sets: each folder's config key, its content, and commands that make it.

All texts about these folders are here, except for the error messages of the readers, so that
commands can print what a run needs before anything is loaded.
"""

from typing import NamedTuple

_TFDS = (
    'import tensorflow_datasets as tfds; tfds.builder("{name}", data_dir="{folder}", '
    'file_format="array_record").download_and_prepare()'
)
_TFDS_NAMES = {"imagenet2012": "imagenet2012", "wmt16": "wmt16_translate/de-en"}
_EMBEDDED = ("digits", "python_docs", "python_docs_cloze", "python_docs_words", "grammar_de_en")
_IDX = (
    "the original files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
    "t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz"
)
# Content of the folder, for sets that are read from original files.
_FILES = {
    "mnist": _IDX,
    "fashion_mnist": _IDX,
    "cifar10": "the original archive cifar-10-binary.tar.gz",
    "cifar10_jpeg": (
        "cifar10_jpeg_q75.npz, CIFAR-10 as JPEGs (lamb_tpu/data/images/cifar10_jpeg.py describes "
        "its arrays)"
    ),
    "squad": "{train} and {evaluation} from https://rajpurkar.github.io/SQuAD-explorer",
    "ptb": "ptb.train.txt, ptb.valid.txt and ptb.test.txt, Mikolov's files of the Penn Treebank",
    "multi30k": (
        "train, val and test_2016_flickr as .de.gz and .en.gz, from "
        "https://github.com/multi30k/dataset"
    ),
    "image_folder": (
        "images in SPLIT/CLASS/..., or images that labels.tsv lists; python -m "
        "lamb_tpu.check_images --dir={folder} checks the images"
    ),
}
_DOWNLOADED = ("mnist", "fashion_mnist", "cifar10")


class DataFolder(NamedTuple):
    """The folder from which a data set is read."""

    key: str  # the config key of the folder, 'data.dir' or 'data.prepared_dir'
    holds: str  # its content, in words
    commands: tuple[tuple[str, ...], ...] = ()  # to make the folder; () if the user must do so
    downloaded: bool = False  # whether the set is downloaded if no folder is given


def key_of(name: str) -> str:
    """Returns the config key of a data set's folder.

    >>> key_of("squad"), key_of("imagenet2012")
    ('data.dir', 'data.prepared_dir')
    """
    return "data.prepared_dir" if name in _TFDS_NAMES or name.startswith("tfds:") else "data.dir"


def folder_of(
    name: str,
    folder: str,
    splits: tuple[str, str] = ("train", "validation"),
    vocab_size: int = 30_522,
) -> DataFolder | None:
    """Describes the folder of a data set; returns None for a set bundled with the package.

    Args:
      name: config.data.name.
      folder: path of the folder, shown in the text and the commands.
      splits: config.data.train_split and config.data.eval_split.
      vocab_size: config.model.vocab_size, for prepared text.
    """
    if name in _EMBEDDED:
        return None
    key = key_of(name)
    if key == "data.prepared_dir":
        tfds_name = _TFDS_NAMES.get(name, name.removeprefix("tfds:"))
        return DataFolder(
            key,
            f"{tfds_name}, prepared once by TFDS on a machine with TensorFlow",
            (("python", "-c", _TFDS.format(name=tfds_name, folder=folder)),),
        )
    if name == "masked_lm":
        return _text(folder, splits, vocab_size)
    holds = _FILES.get(name, f"the files of {name}").format(
        folder=folder, train=splits[0], evaluation=splits[1]
    )
    return DataFolder(key, holds, downloaded=name in _DOWNLOADED)


def _text(folder: str, splits: tuple[str, str], vocab_size: int) -> DataFolder:
    train, validation = splits
    vocabulary = f"a vocabulary of {vocab_size:,} tokens trained on {train}"
    flag = f"--train-vocab={vocab_size}"
    if vocab_size == 30_522:  # the size of BERT's public uncased vocabulary
        vocabulary, flag = "BERT's vocabulary of 30,522 tokens", "--vocab=vocab.txt"
    prepare = "python", "-m", "lamb_tpu.prepare_text"
    held_out = f"--vocab={folder}/{train}/vocab.txt"
    return DataFolder(
        "data.dir",
        f"text in {train} and {validation}, prepared with {vocabulary}",
        (
            (*prepare, "--input=TEXT/*.txt", flag, f"--output={folder}/{train}"),
            (*prepare, "--input=HELD_OUT/*.txt", held_out, f"--output={folder}/{validation}"),
        ),
    )
