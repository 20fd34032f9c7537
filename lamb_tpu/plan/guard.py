"""A crash of the TPU compiler, told in one sentence."""

import os
import signal
import sys
from types import FrameType

# A failed check of the compiler aborts the process; the kernel kills one that needs too much.
_CRASHES = {
    signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP,
}


def guard() -> None:
    """Goes on in a child process, and waits for it here; returns in the child only.

    The compiler is a library in this process: where it crashes, no exception is raised. Call this
    before threads are started. If the child crashes, the exit status is 2 after a sentence; else it
    is the child's.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        os.kill(child, number)

    # The terminal sends Ctrl-C to the child too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = told(-status) if status < 0 else ""
    if text:
        print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(2 if text else status if status >= 0 else 128 - status)


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
