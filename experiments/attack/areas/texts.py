"""Text: corpora, vocabularies, prepared shards, SQuAD, and the Penn Treebank."""

import pathlib
import random

from experiments.attack.bases import BERT, NARROW, SHORT
from experiments.attack.inputs import Input, damage

_PREPARE = ["--input=@/text/corpus/*.txt", "--output=@/out", "--processes=1"]
_COMMANDS: list[tuple[int, str, str, str, list[str]]] = [
    # Relative frequency, file, base, module, arguments.
    (4, "text/corpus/0.txt", "text", "data.prepare_text", [*_PREPARE, "--train-vocab=120"]),
    (2, "text/vocab.txt", "text", "data.prepare_text", [*_PREPARE, "--vocab=@/text/vocab.txt"]),
    (
        2,
        "prepared/train/manifest.json",
        "prepared",
        "data.prepare_text",
        [
            "--input=@/text/corpus/*.txt",
            "--output=@/prepared/train",
            "--processes=1",
            "--train-vocab=120",
            "--documents=blank-lines",
        ],
    ),
    (
        4,
        "prepared/train/*",
        "prepared",
        "train",
        [
            *BERT,
            "--workdir=@/new",
            "--config.data.name=masked_lm",
            "--config.data.dir=@/prepared",
            "--config.data.train_split=train",
            "--config.data.eval_split=train",
            "--config.data.options.vocab_size=120",
            "--config.model.vocab_size=120",
        ],
    ),
    (
        4,
        "text/squad/train-v1.1.json",
        "text",
        "train",
        [
            "--config=bert_squad:smoke",
            "--workdir=@/new",
            "--config.data.name=squad",
            "--config.data.dir=@/text/squad",
            "--config.data.train_split=train-v1.1.json",
            "--config.data.eval_split=dev-v1.1.json",
            *NARROW,
            *SHORT,
        ],
    ),
    (
        3,
        "text/ptb/ptb.train.txt",
        "text",
        "train",
        [
            "--config=ptb:smoke",
            "--workdir=@/new",
            "--config.data.name=ptb",
            "--config.data.dir=@/text/ptb",
            "--config.data.eval_split=valid",
            "--config.data.options={'steps': 8, 'layout': 'tensorflow', 'eval_streams': 2}",
            "--config.batch_size=4",
            *SHORT,
        ],
    ),
]


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a text file and a command that reads it, and damages the file."""
    _, name, base, module, arguments = rng.choices(_COMMANDS, [row[0] for row in _COMMANDS])[0]
    if name.endswith("*"):
        folder = (prepared / name).parent
        name = rng.choice(
            sorted(str(path.relative_to(prepared)) for path in folder.rglob("*") if path.is_file())
        )
    content, change, location = damage(rng, prepared, name)
    return Input(
        "text",
        change,
        f"{module.rpartition('.')[2]} {location}",
        f"lamb_tpu.{module}",
        arguments,
        sorted({base, "text"}),
        {name: content},
    )
