"""The vocabulary stored with weights, and whether it keeps case."""

import json
import pathlib

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError, shown
from lamb_tpu.files import buckets, reading, writing

VOCABULARY = "vocab.txt"
SETTINGS = "text.json"
_OF_TRANSFORMERS = "tokenizer_config.json"


def save(folder: pathlib.Path, vocabulary: Vocabulary, cased: bool) -> None:
    """Writes `vocab.txt` and `text.json`, {"cased": ...}, into an existing folder."""
    writing.replace(folder / VOCABULARY, vocabulary.text())
    writing.replace(folder / SETTINGS, json.dumps({"cased": cased}) + "\n")


def read(path: str | pathlib.Path) -> tuple[Vocabulary, bool | None]:
    """Returns a vocabulary, and whether it keeps case and accents (None if unknown).

    `path` is a `vocab.txt`, or the folder that contains it: a workdir, or the folder of a model in
    the format of Hugging Face transformers.
    """
    if buckets.is_remote(path):
        path = buckets.parse(path, "the vocabulary of")
    else:
        path = pathlib.Path(path).expanduser()
    file = path / VOCABULARY if path.is_dir() else path
    vocabulary = Vocabulary.read(file)
    # In transformers, BERT's tokenizer lowercases unless `do_lower_case` is false.
    for name in (SETTINGS, _OF_TRANSFORMERS):
        beside = file.with_name(name)
        try:
            settings = reading.read_json(beside)
            value = settings["cased"] if name == SETTINGS else settings.get("do_lower_case", True)
            if not isinstance(value, bool):
                raise ValueError(f"its value {shown(value)} must be true or false")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            problem = f"does not say whether {file.name} keeps case ({cause})"
            raise UserError(beside, ..., problem, "correct or remove this file") from error
        return vocabulary, value if name == SETTINGS else not value
    return vocabulary, None
