"""Text that fits a terminal of 80 columns and 24 rows."""

import textwrap

COLUMNS, ROWS = 80, 24


def fit(text: str) -> str:
    """Breaks lines longer than `COLUMNS` between words; their further lines are indented by 4 more.

    A word is never broken, so that a path can be copied. Lines that fit are left alone.

    >>> print(fit("arrays taken: " + ", ".join(f"layer_{i}/kernel" for i in range(6))))
    arrays taken: layer_0/kernel, layer_1/kernel, layer_2/kernel, layer_3/kernel,
        layer_4/kernel, layer_5/kernel
    """
    return "\n".join(_fit_line(line) for line in text.split("\n"))


def fit_docstring(text: str) -> str:
    """Refills the paragraphs, and the items that begin with '- ', that have a line too long.

    Other lines that are indented, such as commands, are left alone.
    """
    blocks: list[list[str]] = []
    for line in text.split("\n"):
        if blocks and _goes_on(blocks[-1][0], line):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return "\n".join(_refill(block) for block in blocks)


def _fit_line(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return _fill(line, f"{indent}    ") if len(line) > COLUMNS else line


def _goes_on(first: str, line: str) -> bool:
    """Whether a line goes on with the paragraph or item that begins with `first`."""
    if not first or not line:
        return False
    if first.startswith("- "):
        return line.startswith("  ")
    return not first.startswith(" ") and not line.startswith((" ", "- "))


def _refill(block: list[str]) -> str:
    if max(map(len, block)) <= COLUMNS or block[0].startswith(" "):
        return "\n".join(block)
    hanging = "  " if block[0].startswith("- ") else ""
    return _fill(" ".join(line.strip() for line in block), hanging)


def _fill(line: str, indent: str) -> str:
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
