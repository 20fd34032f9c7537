"""The arguments for `lamb_tpu.train`, as far as the launcher reads them."""

import re
from collections.abc import Sequence

from lamb_tpu.errors import UserError


def workdir(arguments: Sequence[str]) -> str | None:
    """Returns the value of --workdir, or None. The last one counts, as in absl.

    >>> workdir(["--config=digits", "--workdir", "runs/a"])
    'runs/a'
    """
    # Arguments are joined by NUL, which none can contain, so that one pattern finds both
    # --workdir=DIR and --workdir DIR.
    found = re.findall(r"(?:^|\0)--?workdir[=\0]([^\0]+)", "\0".join(arguments))
    return found[-1] if found else None


def needed_workdir(arguments: Sequence[str]) -> str:
    """Returns the value of --workdir.

    Raises:
      UserError: there is none.
    """
    found = workdir(arguments)
    if found is None:
        raise UserError("--workdir is missing among the arguments behind --; see --help")
    return found
