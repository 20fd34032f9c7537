"""Draws random texts of the repository for a review, or counts words that docs/style.md replaces.

  python docs/texts.py --seed=1                    60 docstrings, 35 comments, 25 messages, 30 paragraphs
  python docs/texts.py --seed=2 --docstrings=5 --comments=0 --messages=0 --paragraphs=0
  python docs/texts.py --count

Each text is printed with its file and line.
"""

import argparse
import ast
import collections
import io
import pathlib
import random
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = ("lamb_tpu", "configs", "experiments", "tests")
NUMBERS = {"docstring": 60, "comment": 35, "message": 25, "paragraph": 30}


class Text(NamedTuple):
    """A text of the repository.

    Attributes:
      type: 'docstring', 'comment', 'message' or 'paragraph'.
      where: the file and the line, 'FILE:LINE'.
      text: the content.
    """

    type: str
    where: str
    text: str


def files(*suffixes: str) -> Iterator[pathlib.Path]:
    """Yields the files in Git's index that have one of these suffixes."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if name.endswith(suffixes) and (ROOT / name).exists():
            yield ROOT / name


def of_code(path: pathlib.Path) -> Iterator[Text]:
    """Yields the docstrings, comments and error messages of a Python file."""
    source, name = path.read_text(), str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield Text("docstring", f"{name}:{node.body[0].lineno}", text)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            strings = [
                ast.get_source_segment(source, argument) or ""
                for argument in [*node.exc.args, *(word.value for word in node.exc.keywords)]
            ]
            if any('"' in string for string in strings):
                yield Text("message", f"{name}:{node.lineno}", "\n".join(strings))
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and lines[-1][0] != token.start[0] - 1:
                yield _comment(name, lines)
                lines = []
            lines.append((token.start[0], token.string.lstrip("#! ")))
    if lines:
        yield _comment(name, lines)


def _comment(name: str, lines: list[tuple[int, str]]) -> Text:
    return Text("comment", f"{name}:{lines[0][0]}", "\n".join(line for _, line in lines))


def of_page(path: pathlib.Path) -> Iterator[Text]:
    """Yields the paragraphs of a Markdown page, without code, tables and headings."""
    text = re.sub(
        r"```.*?```", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.S
    )
    line = 1
    for block in re.split(r"(\n{2,})", text):
        if len(block.split()) > 4 and not block.lstrip().startswith(("#", "|", "<", "!", "    ")):
            yield Text("paragraph", f"{path.relative_to(ROOT)}:{line}", block.strip())
        line += block.count("\n")


def all_texts() -> list[Text]:
    """Returns every text of the package, the recipes, the experiments and the pages."""
    found: list[Text] = []
    for path in files(".py"):
        if path.relative_to(ROOT).parts[0] in CODE:
            found += of_code(path)
    for path in files(".md"):
        # Skip the report: its generated pages repeat the same sentences for every table.
        if "report" not in path.relative_to(ROOT).parts:
            found += of_page(path)
    return found


def words() -> list[str]:
    """Returns the words and phrases in the second column of the table in docs/style.md."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "style.md").read_text(), re.M)
    return [word for row in rows[2:] for word in row.split(", ")]


def counts(texts: list[Text], of: Iterable[str]) -> dict[str, collections.Counter[str]]:
    """Counts each word and its plural in each type of text, except in backticks.

    Some of these words also have a meaning in which they are right, so the counts need not reach 0.
    """
    found: dict[str, collections.Counter[str]] = {word: collections.Counter() for word in of}
    for text in texts:
        prose = re.sub(r"`[^`]*`", "", text.text).lower()
        for word in found:
            found[word][text.type] += len(re.findall(rf"\b{word}s?\b", prose))
    return found


def draw(texts: list[Text], numbers: Mapping[str, int], seed: int) -> list[Text]:
    """Draws random texts; `numbers` has the number of texts to draw of each type."""
    drawing = random.Random(seed)
    found: list[Text] = []
    for type_, number in numbers.items():
        of_type = [text for text in texts if text.type == type_]
        found += drawing.sample(of_type, min(number, len(of_type)))
    return found


def main() -> None:
    """Prints random texts, or with --count the counts of words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draw")
    for type_, number in NUMBERS.items():
        parser.add_argument(f"--{type_}s", type=int, default=number, metavar="N")
    parser.add_argument("--count", action="store_true", help="count words instead of drawing texts")
    given = parser.parse_args()
    texts = all_texts()
    if given.count:
        print(f"{'':12}" + "".join(f"{type_:>12}" for type_ in NUMBERS))
        for word, found in counts(texts, words()).items():
            print(f"{word:12}" + "".join(f"{found[type_]:12,}" for type_ in NUMBERS))
        return
    numbers = {type_: getattr(given, f"{type_}s") for type_ in NUMBERS}
    for text in draw(texts, numbers, given.seed):
        print(f"--- {text.type} {text.where}\n{text.text}\n")


if __name__ == "__main__":
    main()
