"""Sentences of a small German grammar with their English translations, for tests and smoke runs.

A sentence has an adverb, a subject, a verb and an object. German articles and adjectives change
with the noun's gender and case, and a leading adverb moves the verb before the subject. Therefore
translating word by word does not suffice: words must be reordered.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from lamb_tpu.data.hashing import below, words
from lamb_tpu.data.text.pairs import Pair

SPLITS = ("train", "test")
_TEST_EVERY = 8  # on average, one in 8 sentences of the set is in the test split
_SHARE = 4  # on average, one in 4 possible sentences is in the set

# German noun, its gender, English noun.
_PEOPLE = (
    ("Mann", "m", "man"),
    ("Junge", "m", "boy"),
    ("Lehrer", "m", "teacher"),
    ("Frau", "f", "woman"),
    ("Nachbarin", "f", "neighbour"),
    ("Kind", "n", "child"),
    ("Mädchen", "n", "girl"),
)
_THINGS = (
    ("Hund", "m", "dog"),
    ("Ball", "m", "ball"),
    ("Apfel", "m", "apple"),
    ("Katze", "f", "cat"),
    ("Tasche", "f", "bag"),
    ("Blume", "f", "flower"),
    ("Buch", "n", "book"),
    ("Haus", "n", "house"),
    ("Fahrrad", "n", "bicycle"),
)
_VERBS = (
    ("sieht", "sees"),
    ("sucht", "looks for"),
    ("findet", "finds"),
    ("malt", "paints"),
    ("kauft", "buys"),
    ("trägt", "carries"),
)
_ADJECTIVES = (("", ""), ("klein", "small"), ("rot", "red"), ("alt", "old"), ("schön", "beautiful"))
_ADVERBS = (("", ""), ("heute", "today"), ("oft", "often"), ("am Abend", "in the evening"))
_NOMINATIVE = {"m": "der", "f": "die", "n": "das"}
_ACCUSATIVE = {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")}


def read(split: str) -> Iterator[Pair]:
    """Yields the pairs of a split, `train` or `test`; the splits have no pair in common."""
    choices = (_ADVERBS, _PEOPLE, _VERBS, _ADJECTIVES, _THINGS)
    size = math.prod(map(len, choices))
    # The seed is fixed, so that the set has the same sentences in every run.
    draws = below(words(0, np.arange(size)), _SHARE * _TEST_EVERY)
    for draw, chosen in zip(draws.tolist(), itertools.product(*choices), strict=True):
        if draw % _SHARE == 0 and (draw == 0) == (split == "test"):
            yield _pair(*chosen)


def _pair(
    adverb: tuple[str, str],
    person: tuple[str, str, str],
    verb: tuple[str, str],
    adjective: tuple[str, str],
    thing: tuple[str, str, str],
) -> Pair:
    article, ending = _ACCUSATIVE[thing[1]]
    described = f"{adjective[0]}{ending} {thing[0]}" if adjective[0] else thing[0]
    who, what = f"{_NOMINATIVE[person[1]]} {person[0]}", f"{article} {described}"
    order = (adverb[0], verb[0], who, what) if adverb[0] else (who, verb[0], what)
    german = " ".join(order)
    noun = f"{adjective[1]} {thing[2]}".strip()
    english = " ".join(
        ("the", person[2], verb[1], "an" if noun[0] in "aeiou" else "a", noun, adverb[1])
    ).strip()
    return Pair(*(text[0].upper() + text[1:] + "." for text in (german, english)))
