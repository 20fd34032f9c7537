"""Fills the gaps in a text with the words that a pre-trained BERT predicts.

  python -m lamb_tpu.predict --checkpoint=DIR \\
      --text='The capital of France is [MASK].'

DIR is the workdir of a masked_lm run, or a folder with Hugging Face's config.json,
model.safetensors and vocab.txt. The newest checkpoint of a workdir is read. For a run with phases,
DIR may be the folder of all phases or of one phase. Neither the data set nor the memory for training
is needed. A word that begins with ## continues the previous word.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # answer --help before the imports below, which take seconds
    flags.DEFINE_string("checkpoint", None, "Workdir of a run, or folder in Hugging Face's format.")
    flags.DEFINE_string("text", None, "The text, with [MASK] at each gap.")
    flags.DEFINE_integer("top", 5, "Number of words to print for each gap.", 1, 10_000)
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
from lamb_tpu.errors import ABSENT, UserError, out_of_range
from lamb_tpu.models.bert import BertConfig
from lamb_tpu.run.weights import open_weights
from lamb_tpu.types import Params

MASK = "[MASK]"


class Word(NamedTuple):
    """A word for a gap: its token and its probability."""

    word: str
    probability: float


def predict(folder: str, text: str, top: int = 5) -> list[list[Word]]:
    """Returns the most probable words of each gap, best first.

    Args:
      folder: a workdir, or a folder in Hugging Face's layout; see the module's docstring.
      text: text with `[MASK]` at each gap.
      top: number of words for each gap.

    Raises:
      UserError: the folder has no weights, no BERT that predicts masked words, or no vocabulary that
        fits; or the text is too long or has no gap.
    """
    if top < 1:
        raise out_of_range("--top", top, "at least 1")
    # Standard output holds only the answer.
    weights = open_weights(folder, "--checkpoint", report=lambda line: print(line, file=sys.stderr))
    if weights.unfinished:
        print(f"the run has not ended ({weights.unfinished})", file=sys.stderr)
    config, saved_text = weights.bert(), weights.text()
    if config is None or "mlm" not in config.heads:
        network = "not a BERT" if config is None else f"a BERT with the heads {config.heads}"
        problem = f"is {network}, which cannot fill gaps"
        remedy = "use a BERT with the head 'mlm', which the task masked_lm trains"
        raise UserError(f"--checkpoint {weights.folder}", ABSENT, problem, remedy)
    if saved_text is None:
        remedy = "copy the network's vocab.txt into it"
        raise UserError(f"--checkpoint {weights.folder}", ABSENT, "has no vocab.txt", remedy)
    vocabulary, cased = saved_text
    if len(vocabulary) != config.vocab_size:
        problem = f"has {len(vocabulary):,} words, but the network has {config.vocab_size:,}"
        remedy = "replace it with the network's vocab.txt"
        raise UserError(f"{weights.folder}/vocab.txt", ABSENT, problem, remedy)
    # If it is unknown whether the vocabulary is cased, treat it as uncased, like transformers.
    ids = encode(text, vocabulary, bool(cased))
    if len(ids) > config.max_positions:
        problem = f"has {len(ids):,} tokens, including [CLS] and [SEP]"
        remedy = f"use at most {config.max_positions:,}, the limit of the network"
        raise UserError("--text", ABSENT, problem, remedy)
    gaps = np.flatnonzero(ids == vocabulary.mask_id)
    if not len(gaps):
        raise UserError("--text", ABSENT, f"has no {MASK}", "write it in place of a word")
    probabilities = _probabilities(config, weights.params(), ids, gaps)
    # Stable: words of equal probability stay in the order of the vocabulary.
    best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
    return [
        [Word(vocabulary.tokens[index], float(row[index])) for index in indices]
        for row, indices in zip(probabilities, best, strict=True)
    ]


def encode(text: str, vocabulary: Vocabulary, cased: bool) -> np.ndarray:
    """Returns the token ids of a text with gaps, from [CLS] to [SEP]: int32 (tokens,)."""
    tokenizer = make_tokenizer(vocabulary, cased)
    ids = [vocabulary.cls_id]
    # The tokenizer would treat [MASK] as a word in brackets, so split the text there first.
    for number, part in enumerate(text.split(MASK)):
        ids += [vocabulary.mask_id] if number else []
        ids += tokenizer.encode(part).ids
    return np.array([*ids, vocabulary.sep_id], np.int32)


def _probabilities(
    config: BertConfig, params: Params, ids: np.ndarray, gaps: np.ndarray
) -> np.ndarray:
    """Returns the probabilities of all words at each gap, float32 (gaps, words)."""
    # float32 is slower than bfloat16 but more accurate, and one text takes little time.
    module = dataclasses.replace(config, dtype="float32", remat="none").module()
    # A batch of one text without padding, as one segment.
    inputs = {
        "input_ids": ids[None],
        "token_type_ids": np.zeros_like(ids)[None],
        "attention_mask": np.ones(ids.shape, bool)[None],
        "masked_positions": gaps[None].astype(np.int32),
    }

    @jax.jit
    def forward(params: Params, inputs: dict[str, jax.Array]) -> jax.Array:
        outputs: Any = module.apply({"params": params}, inputs, train=False)
        return jax.nn.softmax(outputs["mlm_logits"][0])

    return np.asarray(forward(params, inputs))


def describe(text: str, gaps: list[list[Word]]) -> str:
    """Returns the text, followed by a line for each word of each gap."""
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
        answers = [[word._asdict() for word in words] for words in gaps]
        print(json.dumps({"text": values.text, "gaps": answers}))
    else:
        print(describe(values.text, gaps))


if __name__ == "__main__":
    cli.run_main(main, required=("checkpoint", "text"))
