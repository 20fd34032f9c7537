"""The end of a command: a message and an exit status for each error and signal."""

import atexit
import contextlib
import functools
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from lamb_tpu import custom, terminal
from lamb_tpu.cluster import signals
from lamb_tpu.errors import Interrupted, Preempted, UserError, printable
from lamb_tpu.files import buckets

_PREEMPTED = "preempted; nothing that was saved is lost, start the same command again"
_INTERRUPTED = "interrupted; nothing that was saved is lost"

# The exit status once the process must end early; empty until then.
leaving: list[int] = []


@atexit.register  # registered before the handlers of JAX, so that it is called after them
def _leave() -> None:
    """Ends the process without calling destructors, which would crash while XLA compiles or computes."""
    if leaving:
        logging.shutdown()
        os._exit(leaving[0])


def run(program: Callable[[], None]) -> None:
    """Runs a program; if it fails or is stopped, prints a message and exits.

    SIGTERM and Ctrl-C raise `Preempted` and KeyboardInterrupt in the main thread. Where Python cannot
    raise an exception, the signal ends the process. The exit status is 2 for an error that the user can
    correct, 130 after Ctrl-C, 75 after SIGTERM, `signals.LOST_PEER` if a process is lost, 1 for a bug.
    """
    signals.ending.clear()
    signals.received.clear()
    with signals.Watcher((end_preempted, _interrupt), _end_for_main_thread):
        # Commands that save before they end replace these handlers.
        signal.signal(signal.SIGTERM, end_preempted)
        # A shell's background job ignores Ctrl-C; do not change that.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, _interrupt)
        _guarded(program)


def _guarded(program: Callable[[], None]) -> None:
    try:
        terminal.check_current_folder()
        program()
    except UserError as error:
        _print(f"error: {error}")
        _end(2)
    except Preempted as preempted:
        _print(str(preempted))
        _end(130 if isinstance(preempted, Interrupted) else os.EX_TEMPFAIL, together=True)
    except KeyboardInterrupt:
        _print(_INTERRUPTED)
        _end(130, together=True)
    except SystemExit as leaving:
        # Flush now: at exit, Python would print a failure as an ignored exception.
        if terminal.is_closed_pipe(terminal.lose_stdout()) and not leaving.code:
            _end(terminal.CLOSED_PIPE)
        raise
    except Exception as error:
        lost_output = terminal.lose_stdout(error)
        if terminal.is_closed_pipe(lost_output):
            _end(terminal.CLOSED_PIPE)
        message = _sentence(error, lost_output)
        _print(traceback.format_exc().rstrip() if message is None else f"error: {message}")
        # Status 2 means an error that the user can correct; bugs and lost processes have other statuses.
        _end(signals.LOST_PEER if _is_of_lost_peer(error) else 1 if message is None else 2)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed, but the exit status still counts
        print(text, file=sys.stderr, flush=True)


def _sentence(error: Exception, lost_output: str | None) -> str | None:
    """Returns a message for an error that is not a bug of the program; None for a bug."""
    # Cut the reason, because XLA's messages can be pages long.
    reason = " ".join(str(error).split())[:300]
    if lost_output is not None:
        return f"standard output cannot be written ({lost_output})"
    if _is_of_lost_peer(error):
        return (
            f"another process of this run has ended, so this one cannot go on ({reason}); nothing "
            "that was saved is lost"
        )
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in reason:
        return (
            f"JAX has no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r} "
            f"({reason}); unset the variable, or give a platform that this machine and jaxlib have"
        )
    if _is_of_jax_import(error):
        return of_environment(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
        return (
            f"out of memory ({reason}); reduce config.batch_size, or increase "
            "config.accumulation_steps; nothing that was saved is lost"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename!r}: {error.strerror}"
    if "gcsfs" in sys.modules and buckets.is_error(error):
        return f"the bucket does not answer ({buckets.reason(error)}); start the same command again"
    blamed = custom.blame(error)
    return None if blamed is None else str(blamed)


def of_environment(error: Exception) -> str:
    """Returns a message for an error in the environment variables that JAX reads on import."""
    reason = printable(" ".join(str(error).split())[:300])
    return f"JAX rejects an environment variable ({reason}); correct or unset the variable"


def _is_of_jax_import(error: Exception) -> bool:
    return isinstance(error, ValueError) and any(
        frame.f_globals.get("__name__") == "jax" and frame.f_code.co_name == "<module>"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _is_of_lost_peer(error: Exception) -> bool:
    """Returns whether a collective failed because another process has ended."""
    if "jax" not in sys.modules:
        return False
    # JAX raises a JaxRuntimeError; NumPy, if it waits for the result, a ValueError.
    of_gloo = re.search("Gloo .*failed|(closed|reset) by peer", str(error), re.DOTALL)
    of_jax = isinstance(error, (sys.modules["jax"].errors.JaxRuntimeError, ValueError))
    return of_jax and of_gloo is not None


def end_preempted(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM: raises `Preempted`; see `_raise`."""
    del frame
    _raise(number, Preempted(_PREEMPTED))


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    _raise(number, KeyboardInterrupt())


def _raise(number: int, exception: BaseException) -> None:
    """Raises `exception` for the signal `number`, and lets a second such signal end the process."""
    if signals.ending.is_set():
        return  # already ending, perhaps because another process received a signal
    signals.ending.set()
    signal.signal(number, signal.SIG_DFL)
    # If the signal arrives in a finalizer or a callback of the garbage collector, Python passes the
    # exception to this hook, and the process would continue.
    sys.unraisablehook = functools.partial(_end_where_unraisable, sys.unraisablehook)
    raise exception


def _end_where_unraisable(
    before: Callable[[Any], None], unraisable: "sys.UnraisableHookArgs"
) -> None:
    if not isinstance(unraisable.exc_value, (Preempted, KeyboardInterrupt)):
        before(unraisable)
        return
    is_preempted = isinstance(unraisable.exc_value, Preempted)
    # Python ignores exceptions in this hook, so `sys.exit` would not end the process.
    _end_for_main_thread(signal.SIGTERM if is_preempted else signal.SIGINT)


def _end_for_main_thread(number: int) -> None:
    """Ends the process after a signal for which no exception can be raised in the main thread."""
    _print(_PREEMPTED if number == signal.SIGTERM else _INTERRUPTED)
    with contextlib.suppress(SystemExit):
        _end(signals.STATUS[signal.Signals(number)], together=True)
    os._exit(signals.STATUS[signal.Signals(number)])


def _end(status: int, together: bool = False) -> NoReturn:
    signals.ending.set()  # ignore the signal with which the launcher ends the other processes
    terminal.lose_stdout()
    # A process must not wait at exit for the other processes, because they wait for it. The launcher
    # does not import JAX, so it waits for nothing.
    if "jax" in sys.modules:
        from lamb_tpu.cluster import distributed

        leaving[:] = [status]
        # JAX's handler would destroy the client while an XLA thread may still be compiling for it.
        if (api := sys.modules.get("jax._src.api")) is not None:
            atexit.unregister(api.clean_up)
        if together:
            distributed.announce_end()
        distributed.leave(status, together)
    sys.exit(status)
