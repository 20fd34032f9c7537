"""Tests of docs/texts.py: which texts it reads, and that a seed determines the draw."""

import pathlib
import textwrap

import pytest

from docs import texts

CODE = textwrap.dedent('''
    """Reads a file."""

    def load(name):
        """Returns its lines.

        In order.
        """
        # The file may be missing:
        # a new run has none.
        if not name:
            raise ValueError(f"name={name!r} is empty; give a path")
        return name  # as it is
''')


def test_texts_of_code(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(CODE)
    assert sorted(texts.of_code(tmp_path / "a.py")) == [
        ("comment", "a.py:13", "as it is"),
        ("comment", "a.py:9", "The file may be missing:\na new run has none."),
        ("docstring", "a.py:2", "Reads a file."),
        ("docstring", "a.py:5", "Returns its lines.\n\nIn order."),
        ("message", "a.py:12", 'f"name={name!r} is empty; give a path"'),
    ]


def test_paragraphs_of_a_page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    code, table = "```sh\nls\n\nrm\n```", "| a | b |"
    page = (
        f"# Title\n\nA first paragraph of text.\n\n{code}\n\n{table}\n\nThe second one is here.\n"
    )
    (tmp_path / "a.md").write_text(page)
    assert [text[1:] for text in texts.of_page(tmp_path / "a.md")] == [
        ("a.md:3", "A first paragraph of text."),
        ("a.md:13", "The second one is here."),
    ]


def test_words_are_counted_outside_of_code() -> None:
    given = [texts.Text("comment", "", "`output` which was told No folder, pieces")]
    actual = texts.counts(given, ["told", "no folder", "piece", "anew"])
    assert [each["comment"] for each in actual.values()] == [1, 1, 1, 0]


def test_words_are_those_of_the_page() -> None:
    actual = texts.words()
    assert {"told", "tell", "one's own", "no folder", "in any case"} <= set(actual)
    assert not {"not", "---"} & set(actual) and len(actual) == len(set(actual)) > 25


def test_a_seed_draws_the_same_texts() -> None:
    given = [texts.Text("comment", f"a:{line}", "") for line in range(50)]
    first, again, other = (texts.draw(given, {"comment": 9}, seed) for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == 9
    assert len(texts.draw(given, {"comment": 99, "message": 3}, 0)) == 50
