"""A launch as numbered shell commands, printed as a script or run one at a time."""

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from lamb_tpu.errors import out_of_range

_WIDTH = 80
_CONTINUED = " \\\n    "
_INTERRUPTED = 130  # exit status after Ctrl-C


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a launch."""

    title: str
    command: str
    billed: bool = True  # whether machines that cost money may exist once the step has begun
    # Whether the step deletes those machines; such a step is run only on request.
    deletes: bool = False


def join(*parts: str) -> str:
    """Quotes the words of one command for a shell, and wraps a long command before its options.

    >>> print(join("ls", "a b", "--sort=$x"))
    ls 'a b' --sort='$x'
    """
    words = [quote(part) for part in parts]
    line = " ".join(words)
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return _CONTINUED.join(lines)


def command(words: str, *more: str) -> str:
    """Applies `join` to `words`, which is split at spaces, followed by the words `more`.

    >>> print(command("git archive", "--format=tar"))
    git archive --format=tar
    """
    return join(*words.split(), *more)


def in_turn(*commands: str) -> str:
    """Chains commands so that each runs only if the previous command succeeds."""
    return " &&\n".join(commands)


def quote(part: str) -> str:
    """Quotes a word for a shell; in an option, quotes only the value, for readability."""
    option = re.match(r"--[\w.-]+=", part)
    return option[0] + shlex.quote(part[option.end() :]) if option else shlex.quote(part)


def script(steps: Sequence[Step], start: int = 1) -> str:
    """Returns step number `start`, counted from 1, and all later steps as a shell script."""
    _check_start(steps, start)
    return "\n\n".join(
        f"# {number}. {step.title}\n{step.command}"
        for number, step in enumerate(steps, start=1)
        if number >= start
    )


def run(steps: Sequence[Step], start: int, delete: bool, again: Sequence[str]) -> int:
    """Prints and runs step number `start` and the later steps; stops after a step that fails.

    Args:
      steps: all steps of the launch.
      start: number of the first step to run, from 1.
      delete: whether to also run the steps that delete machines.
      again: command line of the launch; after a failure, it is printed with the failed step's --from-step.

    Returns:
      The exit status: 0, or 1 if a step failed, or 130 after Ctrl-C.

    Raises:
      UserError: there is no step with that number.
    """
    _check_start(steps, start)
    rest = [step for step in steps if step.deletes]
    for number, step in enumerate(steps, start=1):
        if number < start or (step.deletes and not delete):
            continue
        print(f"# {number}. {step.title}\n{step.command}\n", flush=True)
        status = _execute(step.command)
        if status:
            how = "was interrupted" if status == _INTERRUPTED else f"failed with status {status}"
            text = (
                f"step {number} ({step.title}) {how}; continue from there with: "
                + _continuation(again, number)
            )
            if step.billed and rest:
                text += f"\n{_cost(rest)}"
            print(f"error: {text}", file=sys.stderr, flush=True)
            return _INTERRUPTED if status == _INTERRUPTED else 1
    if rest and not delete:
        print(_cost(rest), file=sys.stderr, flush=True)
    return 0


def _check_start(steps: Sequence[Step], start: int) -> None:
    if not 1 <= start <= len(steps):
        raise out_of_range("--from-step", start, f"1 to {len(steps)}")


def _execute(command: str) -> int:
    """Runs a command in bash; returns its exit status, or 130 after Ctrl-C. Failures inside pipes count."""
    try:
        status = subprocess.run(["bash", "-o", "pipefail", "-c", command]).returncode
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status if status >= 0 else 128 - status


def _continuation(again: Sequence[str], number: int) -> str:
    at = again.index("--") if "--" in again else len(again)
    options, words = [], iter(again[:at])
    for word in words:
        if word == "--from-step":
            next(words)  # skip the value of --from-step
        elif not word.startswith("--from-step="):
            options.append(word)
    return shlex.join([*options, f"--from-step={number}", *again[at:]])


def _cost(rest: Sequence[Step]) -> str:
    commands = " && ".join(step.command.replace(_CONTINUED, " ") for step in rest)
    return f"the machines cost money until this deletes them: {commands}"
