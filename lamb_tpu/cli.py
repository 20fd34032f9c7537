"""Command lines: flags, the config file with its overrides, and errors told in one sentence."""

import itertools
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from lamb_tpu import terminal
from lamb_tpu.errors import Preempted, UserError


def define_config_flag() -> None:
    """Defines --config; call before `run_main`."""
    flags.disclaim_key_flags()  # they are the program's: its --help shows them
    config_flags.DEFINE_config_file(
        "config",
        help_string="The recipe, with its argument after a colon, for example "
        "configs/mnist_lenet.py:batch=4096. Any key it has can be overridden: "
        "--config.optimizer.learning_rate=0.002.",
        lock_config=True,
    )


def define_run_flags(workdir: str) -> None:
    """Defines --config and --workdir, with the help text of the latter; call before `run_main`."""
    define_config_flag()
    flags.DEFINE_string("workdir", None, workdir)


def _parse_flags(argv: list[str], required: Sequence[str]) -> list[str]:
    help_asked = [item for item in argv if re.fullmatch(r"-{1,2}(h|help|helpfull)", item)]
    if help_asked:
        program = sys.modules["__main__"]
        program.__doc__ = terminal.fit_docstring(program.__doc__ or "")
        app.usage(shorthelp="helpfull" not in help_asked[0], writeto_stdout=True)
        sys.exit(0)  # absl's own help flag exits with 1
    try:
        rest = flags.FLAGS(argv)
    except UserError:
        raise
    except Exception as error:  # a config file can raise anything
        if "config" in flags.FLAGS:
            _check_overrides(argv, _load_config_file(argv))
        if isinstance(error, flags.Error):
            raise UserError(f"{error}; see --help") from None
        raise
    config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    if config is not None and not isinstance(config, ConfigDict):
        _load_config_file(argv)  # raises: ml_collections holds an OSError back until first use
    if config is not None:
        _check_phases(argv, config)
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}; flags start with --, see --help")
    for name in required:
        if not flags.FLAGS[name].value:
            raise UserError(f"--{name} is missing; see --help")
    return rest


def _load_config_file(argv: list[str]) -> ConfigDict:
    """The config that --config names, without overrides; a UserError says why there is none."""
    values = [
        item.partition("=")[2] if "=" in item else following
        for item, following in itertools.zip_longest(argv, argv[1:])
        if re.fullmatch(r"-{1,2}config(=.*)?", item)
    ]
    if not values or not values[-1]:
        raise UserError("--config is missing; see --help")
    path, colon, argument = values[-1].partition(":")
    if not os.path.isfile(path):
        raise UserError(f"--config names the file {path!r}, which does not exist")
    try:
        get_config = runpy.run_path(path)["get_config"]
        return get_config(argument) if colon else get_config()
    except UserError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        line = getattr(error, "lineno", lines[-1] if lines else None)
        # ml_collections appends the whole config, with the keys it has, to its first sentence.
        text = str(error.args[0] if error.args else "").partition(" Other fields present")[0]
        raise UserError(
            f"the config file {path} fails{f' at line {line}' if line else ''}: "
            f"{type(error).__name__}: {' '.join(text.split())}"
        ) from error


def _check_overrides(argv: list[str], config: ConfigDict) -> None:
    """Raises a UserError for an override whose key the config does not have."""
    for item in argv:
        override = re.match(r"-{1,2}(?:no)?config\.([^=]*)", item)
        node, path = config, "config"
        for part in override[1].split(".") if override else ():
            if not isinstance(node, ConfigDict) or part not in node:
                known = ", ".join(node) if isinstance(node, ConfigDict) else "no keys"
                own_fields = ("config.optimizer", "config.model", "config.task",
                              "config.data.options")
                added = "" if path not in own_fields else (
                    "; what the config file leaves at its default has to be added there first"
                )
                raise UserError(f"{path}.{part} is unknown; {path} has: {known}{added}")
            node, path = node[part], f"{path}.{part}"


def _check_phases(argv: list[str], config: ConfigDict) -> None:
    """Raises a UserError for an override that nothing heeds, for each phase sets the key itself."""
    phases = config.get("phases") or {}
    for item in argv:
        override = re.match(r"-{1,2}(?:no)?config\.([^=]*)", item)
        if phases and override and all(_has(phases[name], override[1]) for name in phases):
            own = " and ".join(f"--config.phases.{name}.{override[1]}" for name in phases)
            raise UserError(
                f"--config.{override[1]} changes nothing, for every phase of the config has its "
                f"own; give {own}"
            )


def _has(config: object, key: str) -> bool:
    """Whether a dotted key is in a config."""
    for part in key.split("."):
        if not isinstance(config, ConfigDict) or part not in config:
            return False
        config = config[part]
    return True


def run_main(main: Callable[[], None], required: Sequence[str] = ()) -> None:
    """Parses the command line, runs `main()` and exits.

    A `UserError` is printed as one sentence, without a traceback, and exits with status 2. SIGTERM
    ends what has no handling of its own at once, like Ctrl-C, but with status 75: start it again.

    Args:
      main: reads its flags from `absl.flags.FLAGS`.
      required: names of flags that must be given.
    """

    def call(argv: Sequence[str]) -> None:
        del argv
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax tells a great deal at INFO
        _hush_libtpu()
        main()

    signal.signal(signal.SIGTERM, _end_preempted)
    try:
        app.run(call, flags_parser=lambda argv: _parse_flags(argv, required))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _end(2)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        # All processes of a run are preempted together, so here they may wait for each other.
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        print("interrupted; nothing that was saved is lost", file=sys.stderr)
        _end(130)
    except Exception as error:
        if _is_of_lost_peer(error):
            reason = " ".join(str(error).split())
            print(
                f"error: another process of this run has ended, so this one cannot go on "
                f"({reason}); nothing that was saved is lost", file=sys.stderr,
            )
        else:
            traceback.print_exc()
        _end(1)


def _is_of_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because the process at the other end is no longer there."""
    if "jax" not in sys.modules or not isinstance(error, sys.modules["jax"].errors.JaxRuntimeError):
        return False
    return re.search("(closed|reset) by peer", str(error)) is not None


def _hush_libtpu() -> None:
    """Where libtpu is installed and there is no TPU, as for planning, spares its complaints."""
    # JAX sets this when it is imported and finds no TPU; it tries libtpu all the same.
    if "jax" in sys.modules and os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v3-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _end_preempted(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process
    text = "preempted; nothing that was saved is lost, start the same command again"
    if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        # It came while the processes met, before JAX listened: only this one knows of it, and the
        # others would wait for it in the run while it waits for them at its end.
        print(text, file=sys.stderr)
        _end(os.EX_TEMPFAIL)
    raise Preempted(text)


def _end(status: int) -> NoReturn:
    # One process of several must not wait for the others, who wait for it. The launcher, which
    # has none of JAX, is spared the import.
    if "jax" in sys.modules:
        from lamb_tpu import distributed

        distributed.leave(status)
    sys.exit(status)
