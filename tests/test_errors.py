"""Tests that the fields of an error form one sentence, without characters that a terminal acts on."""

import ast
import copy
import pathlib
import pickle
import re
import unicodedata
from typing import Any

import pytest

from lamb_tpu import errors
from lamb_tpu.errors import CONTROLS, ArgumentError, Preempted, UserError, naming, printable
from tests.raising import rejected

ODD = {
    "\n": r"\n",
    "\r": r"\r",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b2J": r"\x9b2J",
    "\u202egpj": r"\u202egpj",
    "\u2028": r"\u2028",
    "\udcff": r"\udcff",
    "\0": r"\x00",
    "\x7f": r"\x7f",
    "\ufeff": r"\ufeff",
}


@pytest.mark.parametrize("text", ODD)
def test_controls_are_escaped(text: str) -> None:
    assert printable(f"a{text}b") == f"a{ODD[text]}b" == str(UserError(f"a{text}b"))


def test_other_text_stays() -> None:
    text = "tab\t, é, 名前, شبكة, emoji 👩\u200d🔬, \\n"
    assert printable(text) == text == str(UserError(text))
    assert str(UserError()) == ""
    # `Preempted` prints its message unchanged, because the message comes from the program.
    assert str(Preempted("a\nb")) == "a\nb"


def test_the_classes_of_characters_are_complete() -> None:
    known = re.compile(f"[{CONTROLS}]")
    missing = [
        chr(code)
        for code in range(0x110000)
        if (
            unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp")
            or unicodedata.bidirectional(chr(code))
            in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        )
        and not known.match(chr(code))
    ]
    assert missing == ["\t", "\n"]


def test_a_long_message_loses_its_middle() -> None:
    text = f"config.name={'7' * 10_000} is too long; give a shorter one"
    output = str(UserError(text))
    assert (
        len(output) < 4100
        and output.startswith("config.name=777")
        and text.endswith(output[-1000:])
    )
    assert "(6,0" in output


@pytest.mark.parametrize(
    "fields, text",
    [
        (
            ("config.n", 0, "is out of range", "use at least 1"),
            "config.n=0 is out of range; use at ",
        ),
        (("config.n", "a\nb", "is odd"), r"config.n='a\nb' is odd"),
        (("config.n", None, "is odd"), "config.n=None is odd"),
        (("--out", pathlib.Path("a b"), "is a file", "go"), "--out='a b' is a file; go"),
        (("/a b/x: n", 3, "is odd"), "/a b/x: n=3 is odd"),
        (("label of 3", 12, "is odd", "go"), "label of 3 is 12, which is odd; go"),
        (("/nowhere\n", ..., "holds no run", "go"), r"/nowhere\n holds no run; go"),
        (("loss became nan", ..., ", at the rate 1"), "loss became nan, at the rate 1"),
        (("config.x", ..., ": b1 is 2", "use 1"), "config.x: b1 is 2; use 1"),
        (("config.n", [[1] * 1000]), f"config.n=[{str([1] * 1000)[:96]}..."),
    ],
)
def test_fields_make_one_sentence(fields: tuple[Any, ...], text: str) -> None:
    error = UserError(*fields)
    assert str(error).startswith(text) and str(error).endswith(fields[-1] if fields[3:] else "")
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(same) == str(error) and same.args == error.args
        assert (same.key, same.problem) == (error.key, error.problem)


def test_shared_errors() -> None:
    with rejected("config.n", "b", "is unknown", "use a, '' or c"):
        raise errors.unknown("config.n", "b", ["a", "", "c"])
    with rejected("config.n", 5, "is not divisible by the 8 devices", "use 8"):
        raise errors.not_divisible("config.n", 5, 8, "the 8 devices")
    with rejected("/x", ..., "cannot be read (No such file or directory)", "go"):
        raise errors.unreadable("/x", FileNotFoundError(2, "No such file or directory", "/x"), "go")
    with rejected("/x", ..., "is no text (KeyError)", "go"):
        raise errors.unreadable("/x", KeyError(), "go", "is no text")
    assert errors.listed([]) == "nothing"


def test_naming_puts_the_key_first_and_keeps_the_fields() -> None:
    with rejected("config.x", ..., ": two words", "three") as caught, naming("config.x"):
        raise ValueError("two\n  words; three")
    assert str(caught.value) == "config.x: two words; three"
    with rejected("config.x.y", 3, "is bad", "go"), naming("config.x"):
        raise UserError("config.x.y", 3, "is bad", "go")
    with rejected("config.x.y", 3, "is bad", "go"), naming("config.x"):
        raise ArgumentError("y", 3, "is bad", "go")
    with rejected("config.x: data", ..., "is bad", "go"), naming("config.x"):
        raise UserError("data", ..., "is bad", "go")
    with rejected("config.x.y", ..., "=3 is bad", "go"), naming("config.x", {"y"}):
        raise ValueError("y=3 is bad; go")
    with rejected("config.x.y", ..., "[1]=3 is bad"), naming("config.x", {"y"}):
        raise ValueError("y[1]=3 is bad")
    with rejected("config.x", ..., ": z=3 is bad"), naming("config.x", {"y"}):
        raise ValueError("z=3 is bad")
    with pytest.raises(KeyError), naming("config.x"):
        raise KeyError


@pytest.mark.parametrize(
    "expected",
    [
        ("config.y", 3, "is bad", "go"),
        ("config.x", 4, "is bad", "go"),
        ("config.x", 3, "is worse", "go"),
        ("config.x", 3, "is bad", "stay"),
        ("*ig.y", 3, "is bad", "go"),
    ],
)
def test_rejected_compares_each_field(expected: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match="expected|==|fields"), rejected(*expected):
        raise UserError("config.x", 3, "is bad", "go")
    with rejected("*ig.x", 3, "bad", "g"):
        raise UserError("config.x", 3, "is bad", "go")


NAMES = ("UserError", "ArgumentError", "Diverged")


def test_errors_have_fields() -> None:
    sentences = []
    for path in pathlib.Path(errors.__file__).parent.rglob("*.py"):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if re.search(r"(UserError|Diverged)\(", text) else ()
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMES:
                is_spread = any(isinstance(value, ast.Starred) for value in node.args)
                if len(node.args) + len(node.keywords) == 1 and not is_spread:
                    sentences.append(f"{path}:{node.lineno}")
    assert sentences == []
