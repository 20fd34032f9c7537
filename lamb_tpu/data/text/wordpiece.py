"""WordPiece with BERT's normaliser, and training of vocabularies, with Hugging Face `tokenizers`."""

from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from lamb_tpu.data.text.vocabulary import CONTINUES, SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError

_MAX_WORD_CHARACTERS = 200  # longer words become [UNK], as in the original code
_MAX_CHARACTERS = 1000  # in a trained vocabulary; rarer characters become [UNK]
_MAX_WORDS = 2**20  # distinct words held before their characters are counted, to bound memory


def make_tokenizer(vocabulary: Vocabulary, cased: bool) -> Tokenizer:
    """Returns a tokenizer that splits text as the original BERT code does; adds no special tokens.

    As in the original, the text `[MASK]` is split into punctuation and a word. Unless `cased`, case
    and accents are removed.
    """
    model = models.WordPiece(
        vocabulary.ids,
        unk_token=SPECIAL_TOKENS[1],
        continuing_subword_prefix=CONTINUES,
        max_input_chars_per_word=_MAX_WORD_CHARACTERS,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def train_vocabulary(read: Callable[[], Iterable[str]], size: int, cased: bool) -> Vocabulary:
    """Trains a vocabulary for `make_tokenizer`; see `train_segments`."""
    tokenizer = make_tokenizer(Vocabulary(SPECIAL_TOKENS), cased)
    return train_segments(read, size, tokenizer, "--train-vocab")


def train_segments(
    read: Callable[[], Iterable[str]], size: int, tokenizer: Tokenizer, key: str
) -> Vocabulary:
    """Trains a vocabulary of at most `size` tokens: special tokens, characters, then longer tokens.

    By default, the trainer of `tokenizers` numbers characters differently in each run, and it chooses
    differently among tokens of equal count. To make the vocabulary a function of the text, the
    trainer is given the characters in a fixed order.

    `read`, which yields the text in segments, is called twice. The tokenizer must have the special
    tokens; training changes the tokenizer. Raises a UserError with `key`, the name of `size`, if
    `size` is too small.
    """
    given = [*SPECIAL_TOKENS, *_characters(read(), tokenizer)]
    if len(given) > size:
        few = f"the {len(given):,} special tokens and single characters of this text"
        raise UserError(key, size, f"is less than {few}", f"use at least {len(given)}")
    # The trainer keeps the order of its special tokens, so the characters are passed as special
    # tokens, and the trainer needs no alphabet.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=given, limit_alphabet=0, show_progress=False
    )
    tokenizer.train_from_iterator(read(), trainer)
    # `get_vocab` is unordered, so the tokens are sorted by their ids.
    ids = tokenizer.get_vocab()
    return Vocabulary(sorted(ids, key=ids.__getitem__))


def _characters(parts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    """Returns a text's most frequent characters, then those within words with the prefix `##`."""
    words, frequencies, within = Counter[str](), Counter[str](), set[str]()

    # Splits each distinct word once.
    def count_characters() -> None:
        for text, count in words.items():
            for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
                for character in word:
                    frequencies[character] += count
                within.update(word[1:])
        words.clear()

    for text_part in parts:
        words.update(tokenizer.normalizer.normalize_str(text_part).split())
        if len(words) >= _MAX_WORDS:
            count_characters()
    count_characters()
    by_frequency = sorted(frequencies, key=lambda item: (-frequencies[item], item))
    frequent = sorted(by_frequency[:_MAX_CHARACTERS])
    return frequent + [CONTINUES + character for character in frequent if character in within]
