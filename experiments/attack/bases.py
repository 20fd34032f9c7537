"""Prepared folders, such as a run, text, images or cached plans. A bad input is a damaged copy of them."""

import json
import pathlib
import struct
import subprocess
import sys
import zlib

import numpy as np
from matplotlib import image

from lamb_tpu.cluster import children
from lamb_tpu.command import MODULES

TABLE = """\
title = "Digits by optimizer"
source = "Table 9"
known = "recalled"
metric = {key = "accuracy", label = "test accuracy, %", digits = 1, factor = 100.0}
cells = [
  {name = "lamb", argument = "optimizer=lamb", published = {accuracy = 93.0}},
  {name = "adamw", argument = "optimizer=adamw", published = {accuracy = 92.5}, known = "seen"},
  {name = "lars", published = {accuracy = "diverged"}, unknown = "settings not published"},
]

[scales.small]
config = "digits:batch=128"
examples = 1_437
overrides = {duration = "4 steps", "log.every" = "2 steps", "log.tensorboard" = false}
seeds = 1
minutes = {cpu = 0.03}

[tuning]
key = "optimizer.learning_rate"
factors = [0.5, 1, 2]
overrides = {"data.train_split" = "train[:80%]", "data.eval_split" = "train[80%:]"}
seeds = 1
"""
PAPER = 'title = "A small paper"\narxiv = "0000.00000"\nname = "Small"\n'
# Overrides that shorten a run to a second.
SHORT = (
    "--config.duration=4 steps",
    "--config.checkpoint.every=2 steps",
    "--config.eval.every=2 steps",
    "--config.log.every=1 steps",
    "--config.log.tensorboard=false",
)
# Overrides that reduce BERT to one narrow layer and small batches.
NARROW = (
    "--config.model.num_layers=1",
    "--config.model.hidden_size=16",
    "--config.model.num_heads=2",
    "--config.model.intermediate_size=16",
    "--config.batch_size=4",
    "--config.eval.batch_size=64",
)
BERT = (
    "--config=bert_pretrain:smoke,phase=1",
    "--config.duration=1 steps",
    *NARROW,
    "--config.log.tensorboard=false",
    "--config.checkpoint.every=1 steps",
)
SENTENCES = (
    "The cat sat on the mat. It was a warm day, and nobody came.",
    "A dog ran over the hill. The hill was green.",
    "Nobody knows the reason. The reason is not known.",
)


def prepare(folder: pathlib.Path) -> None:
    """Writes all prepared folders below `folder`."""
    _text(folder)
    _images(folder / "images")
    _papers(folder / "papers")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "recipe.py").write_text(
        "import importlib.util, pathlib\n"
        "from lamb_tpu.config import recipe_path\n\n\n"
        "def get_config(argument=None):\n"
        "    spec = importlib.util.spec_from_file_location('r', recipe_path('digits'))\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "    config = module.get_config('smoke')\n"
        "    config.duration = '2 steps'\n"
        "    return config\n"
    )
    commands = [
        ["train", "--config=digits:smoke", f"--workdir={folder / 'run'}", *SHORT],
        [
            "train",
            "--config=digits:smoke",
            f"--workdir={folder / 'run2'}",
            *SHORT,
            "--config.optimizer.learning_rate=0.02",
        ],
        ["train", *BERT, f"--workdir={folder / 'bert'}"],
        ["export", f"--workdir={folder / 'bert'}", f"--output={folder / 'exported'}"],
        [
            "reproduce",
            "run",
            "small/digits",
            f"--papers={folder / 'papers'}",
            f"--runs={folder / 'papers.runs'}",
            f"--carry={folder / 'papers' / 'carried.json'}",
        ],
        [
            "prepare_text",
            f"--input={folder / 'text' / 'corpus' / '*.txt'}",
            "--train-vocab=120",
            f"--output={folder / 'prepared' / 'train'}",
            "--processes=1",
            "--documents=blank-lines",
        ],
        ["plan", "--config=digits", "--topology=v3-8", f"--cache={folder / 'plans'}"],
        [
            "sweep",
            "--config=digits:smoke",
            "--search=optimizer.learning_rate=0.01,0.02",
            f"--workdir={folder / 'sweep'}",
            *SHORT,
        ],
    ]
    for name, *arguments in commands:
        done = subprocess.run(
            [sys.executable, "-m", MODULES[name], *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            preexec_fn=children.following(),
        )
        if done.returncode:
            print(f"note: {name} failed to make a base: {done.stderr[-500:]}", file=sys.stderr)


def _papers(folder: pathlib.Path) -> None:
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "paper.toml").write_text(PAPER)
    (folder / "small" / "digits.toml").write_text(TABLE)


def _text(folder: pathlib.Path) -> None:
    corpus, ptb, squad = (folder / "text" / name for name in ("corpus", "ptb", "squad"))
    for each in (corpus, ptb, squad):
        each.mkdir(parents=True)
    for number in range(2):
        (corpus / f"{number}.txt").write_text("\n\n".join(SENTENCES * 4) + "\n")
    (folder / "text" / "vocab.txt").write_text(
        "\n".join(
            [
                "[PAD]",
                "[UNK]",
                "[CLS]",
                "[SEP]",
                "[MASK]",
                *"abcdefghijklmnopqrstuvwxyz.,",
                *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
            ]
        )
        + "\n"
    )
    for split in ("train", "valid", "test"):
        rows = [" ".join(f"w{(7 * row + word) % 29}" for word in range(20)) for row in range(40)]
        (ptb / f"ptb.{split}.txt").write_text("".join(f" {row} \n" for row in rows))
    context = " ".join(SENTENCES)
    questions = [
        {
            "id": f"q{number}",
            "question": "Who ran over the hill?",
            "answers": [{"text": "A dog", "answer_start": context.index("A dog")}],
        }
        for number in range(64)
    ]
    document = json.dumps(
        {
            "version": "1.1",
            "data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}],
        }
    )
    for split in ("train", "dev"):
        (squad / f"{split}-v1.1.json").write_text(document)


def _images(folder: pathlib.Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        for split, count in (("train", 16), ("validation", 4)):
            below = folder / split / name
            below.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 255, (40, 48, 3), np.uint8)
                ending = ("png", "jpg")[number % 2]
                image.imsave(below / f"{number:02}.{ending}", pixels)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Returns a PNG whose header gives this size, even if `data` has a different number of pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )
