"""The vocabulary beside saved weights, and whether it keeps case."""

import json
import pathlib

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading, writing

VOCABULARY = "vocab.txt"
SETTINGS = "text.json"
_OF_TRANSFORMERS = "tokenizer_config.json"


def save(folder: pathlib.Path, vocabulary: Vocabulary, cased: bool) -> None:
    """Writes `vocab.txt` and `text.json`, {"cased": ...}, into a folder that exists."""
    writing.replace(folder / VOCABULARY, vocabulary.text())
    writing.replace(folder / SETTINGS, json.dumps({"cased": cased}) + "\n")


def read(path: str | pathlib.Path) -> tuple[Vocabulary, bool | None]:
    """Reads the vocabulary, and whether it keeps case and accents (None if unknown).

    Args:
      path: path of a `vocab.txt`, or of its folder: a workdir, or a folder of Hugging Face's
        transformers.

    Raises:
      UserError: there is no vocabulary, or the file with its case cannot be read.
    """
    if buckets.is_remote(path):
        path = buckets.parse(path, "the vocabulary of")
    else:
        path = pathlib.Path(path).expanduser()
    file = path / VOCABULARY if path.is_dir() else path
    vocabulary = Vocabulary.read(file)
    # transformers' tokenizer of BERT removes case unless `do_lower_case` is false.
    for name in (SETTINGS, _OF_TRANSFORMERS):
        beside = file.with_name(name)
        if not beside.is_file():
            continue
        try:
            settings = reading.read_json(beside)
            cased = (
                settings["cased"] if name == SETTINGS else not settings.get("do_lower_case", True)
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{beside} cannot be read ({type(error).__name__}: {error}); it tells whether "
                f"{file.name} keeps case"
            ) from error
        return vocabulary, bool(cased)
    return vocabulary, None
