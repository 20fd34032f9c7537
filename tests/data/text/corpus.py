"""Writing of a prepared folder from token ids, without a tokenizer."""

import hashlib
import json
import pathlib
from collections.abc import Sequence

from lamb_tpu.data.text import shards
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary


def write_folder(
    folder: pathlib.Path,
    documents: Sequence[Sequence[Sequence[int]]],
    num_shards: int = 1,
    vocabulary_size: int = 64,
) -> None:
    """Writes documents, which are lists of sentences of ids; every fourth token begins with `##`."""
    folder.mkdir(exist_ok=True)
    made_up = [
        f"{'##' if number % 4 == 3 else ''}w{number}" for number in range(5, vocabulary_size)
    ]
    Vocabulary([*SPECIAL_TOKENS, *made_up]).write(folder / shards.VOCABULARY)
    size = -(-len(documents) // num_shards)
    described = []
    for number in range(num_shards):
        path = folder / f"text-{number:05}-of-{num_shards:05}.array_record"
        chosen = documents[number * size : (number + 1) * size]
        shards.write_shard(path, chosen, shards.id_dtype(vocabulary_size))
        described.append(
            {
                "name": path.name,
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "counts": _counts(chosen),
            }
        )
    manifest = {
        "settings": {"format": shards.FORMAT, "cased": False},
        "inputs": [],
        "vocabulary": {
            "name": shards.VOCABULARY,
            "size": vocabulary_size,
            "sha256": hashlib.sha256((folder / shards.VOCABULARY).read_bytes()).hexdigest(),
        },
        "counts": _counts(documents),
        "shards": described,
    }
    (folder / shards.MANIFEST).write_text(json.dumps(manifest))


def _counts(documents: list[list[list[int]]]) -> dict[str, int]:
    sentences = [sentence for document in documents for sentence in document]
    counts = {"documents": len(documents), "sentences": len(sentences)}
    return dict.fromkeys(shards.COUNTS, 0) | counts | {"tokens": sum(map(len, sentences))}
