"""Child processes that end with their parent, even if the parent is killed.

Code that starts a process uses this module, so that no process is left behind.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1  # option of Linux's prctl
_POLL_SECONDS = 0.5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Load the function now: between fork and exec, a child should do as little as possible.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def follow_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes this process get the signal `number` when its parent ends.

    On Linux, the kernel sends the signal when the thread that started this process ends. Elsewhere,
    a thread checks twice a second whether the parent has ended. `parent` is the parent's process
    id, which must be read before this process is started.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(number))
    else:
        threading.Thread(target=_poll, args=(parent, number), name="parent", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before `prctl`
        os.kill(os.getpid(), number)


def _poll(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), number)


def following(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for `Popen`: the child gets the signal `number` when this process ends.

    Returns None except on Linux: elsewhere, an arbitrary program cannot be tied to its parent.
    """
    if _prctl is None:
        return None
    parent = os.getpid()
    return lambda: follow_parent(parent, number)


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP end the process at once during the block.

    Use this around long library calls, during which Python runs no signal handlers. Ignored signals,
    such as SIGHUP under nohup, stay ignored.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if callable(handler := signal.getsignal(number)):
                before[number] = handler
                signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
