"""A launch as numbered shell commands: shown as a script, or run one at a time."""

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from lamb_tpu.errors import UserError

_WIDTH = 80
_CONTINUED = " \\\n    "
_INTERRUPTED = 130  # exit status after Ctrl-C


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a launch.

    Attributes:
      title: what the command does, in one line.
      command: text for a shell.
      billed: whether machines that cost money may exist once it has begun.
      deletes: whether it ends those machines; such a step is run only on request.
    """

    title: str
    command: str
    billed: bool = True
    deletes: bool = False


def join(*parts: str) -> str:
    """Returns the words of one command quoted for a shell, over several lines where they are long.

    >>> print(join("ls", "a b", "--sort=$x"))
    ls 'a b' --sort='$x'
    """
    words = [quote(part) for part in parts]
    line = " ".join(words)
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    # Broken before options.
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return _CONTINUED.join(lines)


def quote(part: str) -> str:
    """Returns a word quoted for a shell; of an option only its value, which is easier to read."""
    option = re.match(r"--[\w.-]+=", part)
    return option[0] + shlex.quote(part[option.end() :]) if option else shlex.quote(part)


def script(steps: Sequence[Step], start: int = 1) -> str:
    """Returns the steps from number `start` on as the text of a shell script.

    Args:
      steps: all steps of the launch.
      start: number of the first step to show, from 1.

    Raises:
      UserError: there is no step of that number.
    """
    _check_start(steps, start)
    return "\n\n".join(
        f"# {number}. {step.title}\n{step.command}"
        for number, step in enumerate(steps, start=1)
        if number >= start
    )


def run(steps: Sequence[Step], start: int, delete: bool, again: Sequence[str]) -> int:
    """Runs the steps from number `start` on, each shown before, up to the first that fails.

    Args:
      steps: all steps of the launch.
      start: number of the first step to run, from 1.
      delete: whether to run the steps that delete machines too.
      again: the command line of the launch, which a message repeats with another --from-step.

    Returns:
      0, or the exit status for a step that failed: 1, or 130 after Ctrl-C.

    Raises:
      UserError: there is no step of that number.
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
            text = f"step {number} ({step.title}) {how}; go on from there with: " + _go_on(
                again, number
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
        raise UserError(f"--from-step is {start}; the steps have the numbers 1 to {len(steps)}")


def _execute(command: str) -> int:
    """Runs a command as the shell of a user would; Ctrl-C goes to it too."""
    try:
        status = subprocess.run(["bash", "-o", "pipefail", "-c", command]).returncode
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status if status >= 0 else 128 - status


def _go_on(again: Sequence[str], number: int) -> str:
    at = again.index("--") if "--" in again else len(again)
    own, words = [], iter(again[:at])
    for word in words:
        if word == "--from-step":
            next(words)  # its value
        elif not word.startswith("--from-step="):
            own.append(word)
    return shlex.join([*own, f"--from-step={number}", *again[at:]])


def _cost(rest: Sequence[Step]) -> str:
    commands = " && ".join(step.command.replace(_CONTINUED, " ") for step in rest)
    return f"the machines cost money until this deletes them: {commands}"
