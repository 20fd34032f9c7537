"""WordPiece with BERT's normaliser, and vocabularies for it, by Hugging Face `tokenizers`."""

from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from lamb_tpu.data.text.vocabulary import CONTINUES, SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError

_MAX_WORD_CHARACTERS = 200  # longer words become [UNK], as in the original code
_MAX_CHARACTERS = 1000  # in a trained vocabulary; rarer characters become [UNK]
_MAX_WORDS = 2**20  # distinct words held before their characters are counted, to bound memory


def make_tokenizer(vocabulary: Vocabulary, cased: bool) -> Tokenizer:
    """Returns a tokenizer that splits as the original BERT code and adds no special tokens.

    The text `[MASK]` is punctuation around a word, as in the original.

    Args:
      vocabulary: the vocabulary.
      cased: keep case and accents; otherwise both are removed.
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
    """Trains a vocabulary for `make_tokenizer`, see `train_pieces`.

    Raises:
      UserError: see `train_pieces`.
    """
    tokenizer = make_tokenizer(Vocabulary(SPECIAL_TOKENS), cased)
    return train_pieces(read, size, tokenizer, "--train-vocab")


def train_pieces(
    read: Callable[[], Iterable[str]], size: int, tokenizer: Tokenizer, key: str
) -> Vocabulary:
    """Trains a vocabulary of at most `size` tokens: special tokens, characters, then pieces.

    The trainer of `tokenizers` numbers the characters in an order that changes from run to run, and
    so does its choice among pieces of equal count. Here it gets the characters already numbered, so
    that the same text gives the same vocabulary.

    Args:
      read: yields the text, in parts; called twice.
      size: number of tokens.
      tokenizer: of WordPiece, with the special tokens; it is changed.
      key: name of `size`, for the error message.

    Raises:
      UserError: `size` has no room for the special tokens and the characters of the text.
    """
    given = [*SPECIAL_TOKENS, *_characters(read(), tokenizer)]
    if len(given) > size:
        raise UserError(
            f"{key}={size} is too few: the special tokens and single characters of this "
            f"text are {len(given):,}"
        )
    # Special tokens keep their order in the vocabulary. The characters are given as such, so the
    # trainer needs no alphabet of its own.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=given, limit_alphabet=0, show_progress=False
    )
    tokenizer.train_from_iterator(read(), trainer)
    # `get_vocab` has no order; the ids give it.
    ids = tokenizer.get_vocab()
    return Vocabulary(sorted(ids, key=ids.__getitem__))


def _characters(parts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    """Returns the most frequent characters of a text, and `##` with those within words."""
    words, frequencies, within = Counter[str](), Counter[str](), set[str]()

    # A word is split once, however often it occurs.
    def count_characters() -> None:
        for text, count in words.items():
            for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
                for character in word:
                    frequencies[character] += count
                within.update(word[1:])
        words.clear()

    for part in parts:
        words.update(tokenizer.normalizer.normalize_str(part).split())
        if len(words) >= _MAX_WORDS:
            count_characters()
    count_characters()
    by_frequency = sorted(frequencies, key=lambda item: (-frequencies[item], item))
    kept = sorted(by_frequency[:_MAX_CHARACTERS])
    return kept + [CONTINUES + character for character in kept if character in within]
