"""A crash of the TPU compiler, told in one sentence."""

import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

# A failed check of the compiler aborts the process; the kernel kills one that needs too much.
_CRASHES = {
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
}
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)

# Keys of the programs on which the compiler crashed, in the process that goes on.
crashed: set[str] = set()
_SIZE = 64
_compiling = mmap.mmap(-1, _SIZE)  # the key of the program in the compiler; shared with children


@contextlib.contextmanager
def compiling(key: str) -> Iterator[None]:
    """Names the program that the compiler has, in case that it crashes.

    Args:
      key: of at most 64 ASCII characters.
    """
    _compiling[:] = key.encode().ljust(_SIZE, b"\0")
    try:
        yield
    finally:
        _compiling[:] = bytes(_SIZE)


def guard(goes_on: bool = False) -> None:
    """Goes on in a child process, and waits for it here; returns in a child only.

    The compiler is a library in this process: where it crashes, no exception is raised. Call this
    before threads are started. If the child crashes, the exit status is 2 after a sentence; else it
    is the child's.

    Args:
      goes_on: whether to start again in another child after a crash, with the program that the
        compiler had in `crashed`. For a command that plans many programs.
    """
    while True:
        sys.stdout.flush()
        # Held back until the parent passes them on, so that none leaves a child without a parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        child = os.fork()
        if not child:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return
        status = _wait(child, mask)
        text = told(-status) if status < 0 else ""
        key = bytes(_compiling).rstrip(b"\0").decode()
        goes_on = goes_on and bool(text and key) and key not in crashed
        if text:
            end = "; going on without this program" * goes_on
            print(f"error: {text}{end}", file=sys.stderr, flush=True)
        if not goes_on:
            os._exit(2 if text else status if status >= 0 else 128 - status)
        crashed.add(key)
        _compiling[:] = bytes(_SIZE)


def _wait(child: int, mask: set[int | signal.Signals]) -> int:
    """Returns the exit status of a child; negative for the signal that ended it.

    Args:
      child: its process.
      mask: of the signals that are blocked, once those to the child are passed on.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        os.kill(child, number)

    # The terminal sends Ctrl-C to the child too.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])
    return status


def told(number: int) -> str:
    """Returns what a signal that ended the compiler's process means; '' if someone sent it.

    >>> told(signal.SIGTERM)
    ''
    """
    if number == signal.SIGKILL:
        return (
            "the process with the TPU compiler was killed, often because the machine has too "
            "little memory; give it more, or plan a smaller program, such as one with scanned "
            "layers (config.model.scan_layers)"
        )
    if number in _CRASHES:
        return (
            f"the TPU compiler crashed ({signal.Signals(number).name}); change the mesh, "
            "config.parallel.backend or the model's options, or install another libtpu"
        )
    return ""
