"""Runs the TPU compiler in a child process, to report its crashes and to end it after a signal."""

import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from lamb_tpu.cluster import children

# Signals of a crash. A failed compiler assertion aborts the process.
_CRASHES = {
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
}
# Exit status and message after a signal that asks the command to end. Other commands use the same.
_ENDINGS = {
    signal.SIGINT: (130, "interrupted; nothing that was saved is lost"),
    signal.SIGTERM: (
        os.EX_TEMPFAIL,
        "preempted; nothing that was saved is lost, start the same command again",
    ),
}
# A terminal sends Ctrl-C to the child too. If the child still runs after this time, the parent also
# sends the signal.
_SHARED_SECONDS = 0.3
# Time that the child has to end after a signal, before it is killed.
_GRACE_SECONDS = 1.0

# Keys of programs that crashed the compiler in earlier children.
crashed: set[str] = set()
_SIZE = 64
_compiling = mmap.mmap(-1, _SIZE)  # key of the program being compiled; shared with children


@contextlib.contextmanager
def compiling(key: str) -> Iterator[None]:
    """Records the program being compiled, in case of a crash, and restores the default signal handlers.

    Python would call its signal handlers only when the compiler returns, minutes later. The key of
    the program has at most 64 ASCII characters.
    """
    _compiling[:] = key.encode().ljust(_SIZE, b"\0")
    try:
        with children.default_signals():
            yield
    finally:
        _compiling[:] = bytes(_SIZE)


def guard(goes_on: bool = False) -> None:
    """Forks a child that continues the program, while this process waits and then exits.

    Returns only in the child. The compiler is a library, so its crash kills the process without an
    exception. Call this before any thread is started. If the child crashes, this process prints an
    error and exits with status 2; otherwise it exits with the child's status. After SIGTERM or
    Ctrl-C the child has a second to end before it is killed. If this process is killed, the child
    ends too.

    If `goes_on` is true, a crash starts another child, with the key of the offending program in `crashed`.
    """
    parent = os.getpid()
    while True:
        sys.stdout.flush()
        # Block signals until `_wait` handles them; an earlier signal would orphan the child.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
        child = os.fork()
        if not child:
            children.follow_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return
        status, asked = _wait(child, mask)
        if asked is not None and status < 0:  # the child was killed before it could print
            asked_status, line = _ENDINGS[signal.Signals(asked)]
            print(line, file=sys.stderr, flush=True)
            os._exit(asked_status)
        text = explain(-status) if status < 0 else ""
        key = bytes(_compiling).rstrip(b"\0").decode()
        goes_on = goes_on and bool(text and key) and key not in crashed
        if text:
            end = "; continuing without this program" * goes_on
            print(f"error: {text}{end}", file=sys.stderr, flush=True)
        if not goes_on:
            os._exit(2 if text else status if status >= 0 else 128 - status)
        crashed.add(key)
        _compiling[:] = bytes(_SIZE)


def _wait(child: int, mask: set[int | signal.Signals]) -> tuple[int, int | None]:
    """Waits for a child, with the signal mask `mask`; after a signal to this process, ends the child.

    Returns the child's exit status, which is -N if signal N ended the child, and the first signal that
    asked this process to end, or None.
    """
    asked: list[int] = []
    steps: list[
        tuple[int, float]
    ] = []  # signals to send to the child, each with the pause after it

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the child has just ended
            os.kill(child, number)

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)
        if len(asked) > 1:
            send(signal.SIGKILL)
            return
        steps.extend([(number, _GRACE_SECONDS), (signal.SIGKILL, 0)])
        if number == signal.SIGINT:
            signal.setitimer(signal.ITIMER_REAL, _SHARED_SECONDS)
        else:
            step()

    def step(*_: object) -> None:
        number, seconds = steps.pop(0)
        send(number)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGALRM, step), (signal.SIGINT, ask), (signal.SIGTERM, ask))
        # A background job of a shell ignores Ctrl-C.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)
    return status, asked[0] if asked else None


def explain(number: int) -> str:
    """Explains a signal that ended the compiler's process; '' if it is not a crash.

    >>> explain(signal.SIGTERM)
    ''
    """
    if number == signal.SIGKILL:
        return (
            "the process with the TPU compiler was killed, often because the machine has too "
            "little memory; use a machine with more memory, or plan a smaller program, for example "
            "with scanned layers (config.model.scan_layers)"
        )
    if number == signal.SIGABRT:
        return (
            "the TPU compiler crashed (SIGABRT); change the mesh, config.parallel.backend or the "
            "model's options, or install another libtpu"
        )
    if number in _CRASHES:
        # Unlike SIGABRT, this is not a failed assertion about the program: no config key is to blame.
        return (
            f"the TPU compiler crashed ({signal.Signals(number).name}); this is a fault of libtpu "
            "and not of the config: install another libtpu, or plan another slice"
        )
    return ""
