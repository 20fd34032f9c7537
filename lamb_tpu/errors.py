"""Exceptions with messages for the user: a mistake, and a run that was asked to end."""


class UserError(Exception):
    """A mistake in a config, a path or a file, described in one clear sentence.

    The message names the key or path, the value found and what would be right. Command-line
    entry points print it without a traceback and exit with status 2.
    """


class Preempted(BaseException):
    """The run was asked to end by SIGTERM and will resume when it is started again.

    Command-line entry points print the message and exit with status 75, `os.EX_TEMPFAIL`. Like
    KeyboardInterrupt it is not an Exception, so that handlers of failures do not catch it.
    """


class Interrupted(Preempted):
    """The run was asked to end by Ctrl-C, and has saved as for SIGTERM; the exit status is 130."""
