"""Tests of docs/links.py, which checks the links of the built site."""

import pathlib

from docs import links


def test_broken_links_are_listed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "figure.svg").write_text("<svg/>")
    (tmp_path / "index.html").write_text(
        '<a href="below/a%20b.html#one">1</a> <a href="below/a%20b.html#two">2</a> <a href="#top">3</a>'
        '<img src="figure.svg"><img src="gone.png"><a href="https://example.org/#x">4</a>'
        '<a id="top" href="below/">5</a><a href="#">6</a><a href="mailto:a@b.c">7</a>'
    )
    (tmp_path / "below" / "a b.html").write_text('<h1 id="one">1</h1><a href="../index.html">8</a>')
    assert links.broken(tmp_path) == [
        "index.html: no anchor below/a%20b.html#two",
        "index.html: no file gone.png",
        "index.html: no file below/",
    ]
    (tmp_path / "below" / "index.html").write_text('<a name="x"></a><a href="#x">9</a>')
    assert len(links.broken(tmp_path)) == 2


def test_status(tmp_path: pathlib.Path) -> None:
    (tmp_path / "index.html").write_text('<a href="index.html">1</a>')
    assert links.main(str(tmp_path)) == 0
    (tmp_path / "index.html").write_text('<a href="other.html">1</a>')
    assert links.main(str(tmp_path)) == 1
