"""The one exception for mistakes a user can make and mend."""


class UserError(Exception):
    """A mistake in a config, a path or a file, told in one clear sentence.

    The message names the key or path, the value found and what would be right. Command-line
    entry points print it without a traceback and exit with status 2.
    """
