"""Fills the gaps of a text with the words that a pre-trained BERT expects there.

  python -m lamb_tpu.predict --checkpoint=DIR \\
      --text='The capital of France is [MASK].'

DIR is the workdir of a masked_lm run, or a folder with Hugging Face's config.json,
model.safetensors and vocab.txt. A workdir's newest checkpoint is read; with phases DIR may be the
folder of all of them or of one. Neither the data set nor the memory for training is needed. A word
that begins with ## continues the word before it.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    flags.DEFINE_string("checkpoint", None, "Workdir of a run, or a folder of Hugging Face's.")
    flags.DEFINE_string("text", None, "The text, with [MASK] at each gap.")
    flags.DEFINE_integer("top", 5, "Number of words to print for each gap.")
    flags.DEFINE_bool("json", False, "Print one JSON object instead.")
    cli.answer_help()

import dataclasses
import json
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer
from lamb_tpu.errors import UserError
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.run.weights import open_weights

MASK = "[MASK]"


class Word(NamedTuple):
    """A word for a gap: its token, and the network's probability of it."""

    word: str
    probability: float


def predict(folder: str, text: str, top: int = 5) -> list[list[Word]]:
    """Returns the most probable words of each gap, best first.

    Args:
      folder: a workdir, or a folder in Hugging Face's layout; see the module.
      text: text with `[MASK]` at each gap.
      top: number of words for each gap.

    Raises:
      UserError: the folder has no weights, no vocabulary or one of another size, or the network
        has no head for masked words; the text has no gap or is too long.
    """
    if top < 1:
        raise UserError(f"--top is {top}; it must be at least 1")
    # Standard output holds the answer alone.
    weights = open_weights(folder, "--checkpoint", report=lambda told: print(told, file=sys.stderr))
    if weights.unfinished:
        print(f"the run has not ended ({weights.unfinished})", file=sys.stderr)
    config, found = weights.bert(), weights.text()
    if config is None or "mlm" not in config.heads:
        network = "no BERT" if config is None else f"a BERT with the heads {config.heads}"
        raise UserError(
            f"--checkpoint {weights.folder} is {network}; only one with the head 'mlm', as the "
            "task masked_lm trains it, fills gaps"
        )
    if found is None:
        raise UserError(f"--checkpoint {weights.folder} has no vocab.txt; put the network's there")
    vocabulary, cased = found
    if len(vocabulary) != config.vocab_size:
        raise UserError(
            f"{weights.folder}/vocab.txt has {len(vocabulary):,} words, the network "
            f"{config.vocab_size:,}; put the network's own there"
        )
    # A vocabulary of unknown case counts as uncased, as in transformers and in an export.
    ids = encode(text, vocabulary, bool(cased))
    if len(ids) > config.max_positions:
        raise UserError(
            f"--text has {len(ids):,} tokens with [CLS] and [SEP], the network takes at most "
            f"{config.max_positions:,}"
        )
    gaps = np.flatnonzero(ids == vocabulary.mask_id)
    if not len(gaps):
        raise UserError(f"--text has no {MASK}; write it where a word is to be found")
    probabilities = _probabilities(config, weights.params(), ids, gaps)
    # Stable, so that words of equal probability come in the order of the vocabulary.
    best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
    return [
        [Word(vocabulary.tokens[index], float(row[index])) for index in indices]
        for row, indices in zip(probabilities, best, strict=True)
    ]


def encode(text: str, vocabulary: Vocabulary, cased: bool) -> np.ndarray:
    """Returns the ids of a text with gaps, between [CLS] and [SEP], int32 (tokens,)."""
    tokenizer = make_tokenizer(vocabulary, cased)
    ids = [vocabulary.cls_id]
    # The tokenizer would take [MASK] for a word between brackets, so the text is cut there first.
    for number, part in enumerate(text.split(MASK)):
        ids += [vocabulary.mask_id] if number else []
        ids += tokenizer.encode(part).ids
    return np.array([*ids, vocabulary.sep_id], np.int32)


def _probabilities(
    config: BertConfig, params: Any, ids: np.ndarray, gaps: np.ndarray
) -> np.ndarray:
    """Returns the probabilities of all words at each gap, float32 (gaps, words)."""
    # float32 is slower than bfloat16 but more exact, and one text takes little time.
    module = dataclasses.replace(config, dtype="float32", remat="none").module()
    # A batch of one text without padding, all of it one segment.
    inputs = {
        "input_ids": ids[None],
        "token_type_ids": np.zeros_like(ids)[None],
        "attention_mask": np.ones(ids.shape, bool)[None],
        "masked_positions": gaps[None].astype(np.int32),
    }

    @jax.jit
    def forward(params: Any, inputs: dict[str, jax.Array]) -> jax.Array:
        outputs: Any = module.apply({"params": params}, inputs, train=False)
        return jax.nn.softmax(outputs["mlm_logits"][0])

    return np.asarray(forward(params, inputs))


def describe(text: str, gaps: list[list[Word]]) -> str:
    """Returns the text, and below it a line for each word of each gap."""
    width = max(len(word.word) for words in gaps for word in words)
    lines = [text]
    for number, words in enumerate(gaps, start=1):
        for rank, (word, probability) in enumerate(words):
            label = "" if rank else MASK + (f" {number}" if len(gaps) > 1 else "")
            lines.append(f"{label:<{len(MASK) + 4}}{word:<{width}}  {probability:6.1%}")
    return "\n".join(lines)


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    gaps = predict(values.checkpoint, values.text, values.top)
    if values.json:
        found = [[word._asdict() for word in words] for words in gaps]
        print(json.dumps({"text": values.text, "gaps": found}))
    else:
        print(describe(values.text, gaps))


if __name__ == "__main__":
    cli.run_main(main, required=("checkpoint", "text"))
