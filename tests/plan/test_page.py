"""The page of a plan: complete in itself, with its pictures, kernels and collectives."""

import dataclasses
import html.parser
import pathlib
import re

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan import page
from lamb_tpu.plan.page import check_page, write_page
from tests.cost.test_hosts import fabric
from tests.plan.test_report import plan

PROGRAM = """HloModule f, is_scheduled=true

FileNames
1 "/x/<model>.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=62 end_line=62 column=41 end_column=41}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%g (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %c = f32[8] convolution(%p, %p)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %a = f32[8] fusion(%x), calls=%g, metadata={op_name="jit(train_step)/m/dot" \
stack_frame_id=1}, backend_config={"estimated_cycles":"94000000"}
}
"""


class Tags(html.parser.HTMLParser):
    """Collects the tags and the addresses of a page."""

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
    found = Tags(text)
    # Nothing is fetched: links lead to parts of the page's own pictures.
    assert all(link.startswith("#") for link in found.links)
    assert "script" not in found.tags and found.tags.count("svg") == 3
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert not re.search(r'<svg[^>]* (?:width|height)="', text)
    assert "fits (32 % of memory); 7,038 updates" in text
    assert "m/dot" in text and "/x/&lt;model&gt;.py:62" in text
    assert "matrix products and convolutions" in text
    assert "x ring of 32, y ring of 32" in text and "Strategy" in text
    assert "<th>a step</th><td>120 ms (110 to 150)</td>" in text
    assert "<th>validated</th><td>the interval covered 19 of 21 runs of programs left out" in text
    # The same plan makes the same page.
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
    assert "one link of 10 Gb/s each way for the 8 devices of each" in text
    assert "the computation, 83% of a step" in text
    assert "x ring of 32, y ring of 32, 4 hosts" in text
    # The time between hosts is on no axis of the torus.
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
def test_where_a_page_may_lie(tmp_path: pathlib.Path, name: str) -> None:
    assert check_page(str(tmp_path / "plan.html")) == tmp_path / "plan.html"
    with pytest.raises(UserError, match="must be a .html file in a folder that exists"):
        check_page(str(tmp_path / name))
