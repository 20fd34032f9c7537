"""The bundled German and English sentences: agreement, word order, and disjoint splits."""

from lamb_tpu.data.text import grammar
from lamb_tpu.data.text.pairs import Pair


def test_splits() -> None:
    train, test = (list(grammar.read(split)) for split in grammar.SPLITS)
    assert len(train) == len(set(train)) == 1687 and len(test) == len(set(test)) == 255
    assert not set(train) & set(test)
    # The training split has every word of the test split.
    words = {word for pair in train for text in pair for word in text.rstrip(".").split()}
    assert {word for pair in test for text in pair for word in text.rstrip(".").split()} <= words


def test_articles_and_order() -> None:
    everything = {pair for split in grammar.SPLITS for pair in grammar.read(split)}
    known = {
        Pair("Der Mann sieht einen Hund.", "The man sees a dog."),
        Pair("Das Mädchen trägt ein rotes Haus.", "The girl carries a red house."),
        Pair(
            "Heute sucht die Frau ein schönes Fahrrad.",
            "The woman looks for a beautiful bicycle today.",
        ),
        Pair("Der Mann sieht einen Apfel.", "The man sees an apple."),
    }
    assert known <= everything
    assert list(grammar.read("test")) == list(grammar.read("test"))
    assert next(grammar.read("train")) == ("Der Mann sieht einen Hund.", "The man sees a dog.")
