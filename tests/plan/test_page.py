"""The page of a plan: self-contained, with figures, kernels and collectives."""

import dataclasses
import html.parser
import os
import pathlib
import re
from collections.abc import Callable

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan import page
from lamb_tpu.plan.page import check_page, write_page
from tests.cost.test_hosts import fabric
from tests.cost.test_operations import program
from tests.plan.test_report import plan
from tests.raising import rejected

PROGRAM = program().text.replace("linen", "<linen>")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to("nowhere/a.html"),
        lambda path: path.symlink_to("/dev/full"),
        lambda path: path.symlink_to(path),
    ],
)
def test_a_page_that_cannot_be_written(
    make: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    make(tmp_path / "a.html")
    with pytest.raises(UserError, match="^--html .*/a.html (cannot be written|is a )"):
        check_page(str(tmp_path / "a.html"))


class Tags(html.parser.HTMLParser):
    """Collects the tags and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_a_page(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.html"
    write_page([("", plan(program=PROGRAM))], path)
    text = path.read_text()
    actual = Tags(text)
    # Nothing is fetched: all links refer to elements of the inline figures.
    assert all(link.startswith("#") for link in actual.links)
    assert "script" not in actual.tags and actual.tags.count("svg") == 3
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert not re.search(r'<svg[^>]* (?:width|height)="', text)
    assert "fits (32 % of memory); 7,038 updates" in text
    assert "jvp(N)/dot_general" in text and "flax/&lt;linen&gt;/linear.py:7" in text
    assert "matrix products and convolutions" in text
    assert "x ring of 32, y ring of 32" in text and "Strategy" in text
    assert "<th>a step</th><td>120 ms (110 to 150)</td>" in text
    assert "<th>validated</th><td>the interval covered 19 of 21 runs if their program is" in text
    # The page is deterministic.
    write_page([("", plan(program=PROGRAM))], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_hosts_with_slow_links(tmp_path: pathlib.Path) -> None:
    slow = plan(
        program=PROGRAM,
        network=fabric(10),
        collectives=tuple(
            each._replace(route=each.route._replace(hosts=4)) for each in plan().collectives or ()
        ),
    )
    write_page([("", slow)], tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "the 8 devices of each share one link of 10 Gb/s in each direction" in text
    assert "the computation, 83% of a step" in text
    assert "x ring of 32, y ring of 32, 4 hosts" in text
    # The time between hosts is not counted for any axis of the torus.
    assert "x: not used" in text.replace("<!-- ", "").replace(" -->", "")


def test_phases_and_a_step_that_does_not_fit(tmp_path: pathlib.Path) -> None:
    crowded = plan(
        fits=False,
        memory=None,
        times=None,
        collectives=None,
        cycles=None,
        message="RESOURCE_EXHAUSTED: <no> room\nmore",
    )
    write_page([("phase_1", plan()), ("phase_2", crowded)], tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "<h2>phase_1</h2>" in text and "<h2>phase_2</h2>" in text
    assert "RESOURCE_EXHAUSTED: &lt;no&gt; room" in text and "more</p>" not in text


def test_time_along_the_axes() -> None:
    made = plan()
    assert page._axis_times(made) == ({"x": 0.025, "y": 0.025}, {"x", "y"})
    [one] = made.collectives or ()
    axes = (one.route.axes[0]._replace(is_ring=False),)
    line = one._replace(route=one.route._replace(axes=axes))
    both = dataclasses.replace(made, collectives=(one, line))
    assert page._axis_times(both) == ({"x": 0.05, "y": 0.025}, {"x", "y"})


@pytest.mark.parametrize("name", ["plan.txt", "missing/plan.html"])
def test_check_page(tmp_path: pathlib.Path, name: str) -> None:
    assert check_page(str(tmp_path / "plan.html")) == tmp_path / "plan.html"
    with rejected("--html", problem="is not a .html file in an existing folder"):
        check_page(str(tmp_path / name))
