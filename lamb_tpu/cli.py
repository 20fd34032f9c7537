"""Command lines: flags, the config file with its overrides, and errors told in one sentence."""

import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from lamb_tpu.errors import UserError


def define_run_flags() -> None:
    """Defines --config and --workdir; call before `run_main`."""
    flags.disclaim_key_flags()  # they are the program's: its --help shows them
    config_flags.DEFINE_config_file(
        "config",
        help_string="The recipe, with its argument after a colon, for example "
        "configs/mnist_lenet.py:batch=4096. Any key can be overridden: "
        "--config.optimizer.learning_rate=0.002.",
        lock_config=True,
    )
    flags.DEFINE_string(
        "workdir",
        None,
        "Folder for checkpoints, metrics and the resolved config. A folder that already holds a "
        "run of the same config is resumed.",
    )


def _parse_flags(argv: list[str], required: Sequence[str]) -> list[str]:
    help_asked = [item for item in argv if re.fullmatch(r"-{1,2}(h|help|helpfull)", item)]
    if help_asked:
        return app.parse_flags_with_usage([argv[0], *help_asked])
    for item in argv:
        path = re.fullmatch(r"-{1,2}config=([^:]*)(:.*)?", item)
        if path and not os.path.isfile(path[1]):
            raise UserError(f"--config names the file {path[1]!r}, which does not exist")
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from None
    except (AttributeError, KeyError, TypeError) as error:
        if "since the config is locked" in str(error):
            raise UserError(f"the config file sets an unknown key: {error}") from None
        _check_overrides(argv)
        raise
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}; flags start with --, see --help")
    for name in required:
        if not flags.FLAGS[name].value:
            raise UserError(f"--{name} is missing; see --help")
    return rest


def _check_overrides(argv: list[str]) -> None:
    """Raises a UserError for an override whose key the config does not have."""
    is_override = re.compile(r"-{1,2}(?:no)?config\.([^=]*)").match
    plain = [item for item in argv if not is_override(item)]
    saved, sys.argv = sys.argv, plain  # config_flags looks for overrides there
    try:
        flags.FLAGS.unparse_flags()
        flags.FLAGS(plain)
    finally:
        sys.argv = saved
    for override in filter(None, map(is_override, argv)):
        node, path = flags.FLAGS.config, "config"
        for part in override[1].split("."):
            if not isinstance(node, ConfigDict) or part not in node:
                known = ", ".join(node) if isinstance(node, ConfigDict) else "no keys"
                raise UserError(f"{path}.{part} is unknown; {path} has: {known}")
            node, path = node[part], f"{path}.{part}"


def run_main(main: Callable[[], None], required: Sequence[str] = ()) -> None:
    """Parses the command line, runs `main()` and exits.

    A `UserError` is printed as one sentence, without a traceback, and exits with status 2.

    Args:
      main: reads its flags from `absl.flags.FLAGS`.
      required: names of flags that must be given.
    """

    def call(argv: Sequence[str]) -> None:
        del argv
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells a great deal at INFO
        main()

    try:
        app.run(call, flags_parser=lambda argv: _parse_flags(argv, required))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
