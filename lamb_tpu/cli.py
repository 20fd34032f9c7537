"""Command lines: flags, the config file with its overrides, and errors as one sentence."""

import functools
import itertools
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from lamb_tpu import own, terminal
from lamb_tpu.config import check_keys, check_values, recipe_folder, recipe_path, section_of
from lamb_tpu.errors import Interrupted, Preempted, UserError
from lamb_tpu.files import buckets

# The arguments that ml_collections searches for overrides. `_parse_flags` removes those that
# `run.overrides` reads.
_ARGV: list[str] = []
_UNITS = {"s": 1, "m": 60, "h": 3600}


def define_config_flag() -> None:
    """Defines --config; call before `run_main`."""
    flags.disclaim_key_flags()  # so that --help lists them as flags of the program
    config_flags.DEFINE_config_file(
        "config",
        help_string="The recipe's file, with its argument after a colon, for example "
        "configs/mnist_lenet.py:batch=4096, or only the name of a shipped recipe, "
        "mnist_lenet:batch=4096. Any key can be overridden, and any argument of its optimizer, "
        "model, task and data set: --config.optimizer.b2=0.98.",
        lock_config=True,
        sys_argv=_ARGV,
    )
    flags.DEFINE_bool("print_config", False, "Print the config with all its defaults, and end.")


def define_run_flags(workdir: str) -> None:
    """Defines --config and --workdir, with the help text of the latter; call before `run_main`."""
    define_config_flag()
    flags.DEFINE_string("workdir", None, workdir)


def define_trust_flag() -> None:
    """Defines --trust_workdir, for commands that take a run's config from its folder."""
    flags.disclaim_key_flags()
    flags.DEFINE_bool(
        "trust_workdir",
        False,
        "Without --config, follow every name of custom code in the config.json of --workdir, such "
        "as 'optax:adabelief'; by default only names of classes and functions that your own "
        "modules define. Such a name can run any program: give this flag only for a folder whose "
        "author you trust.",
    )


def define_process_flags() -> None:
    """Defines --coordinator_address, --num_processes, --process_id and --cpu_devices."""
    flags.disclaim_key_flags()
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "HOST:PORT at which process 0 listens, the same for all processes. This flag and the next "
        "two are found automatically on TPU VMs and GKE, under SLURM, Open MPI and "
        "lamb_tpu.launch; they are also read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
        "JAX_PROCESS_ID.",
    )
    flags.DEFINE_integer(
        "num_processes", None, "Number of the run's processes; 1 looks for no others."
    )
    flags.DEFINE_integer("process_id", None, "Id of this process, from 0.")
    flags.DEFINE_integer(
        "cpu_devices",
        None,
        "Devices to make of a CPU, to try out what a run does on many; it must divide the batch. "
        "One device uses every core and is the fastest. Default: JAX_NUM_CPU_DEVICES, or else 1.",
        lower_bound=1,
    )


def answer_help() -> None:
    """Prints the help and exits if --help was given.

    A command defines its flags and calls this before it imports JAX and the like, which takes
    seconds.
    """
    help_asked = [item for item in sys.argv if re.fullmatch(r"-{1,2}(h|help|helpfull)", item)]
    if help_asked:
        # absl heads the help with the docstring of the main module.
        program = sys.modules["__main__"]
        program.__doc__ = terminal.fit_docstring(program.__doc__ or "")

        def show() -> int:
            app.usage(shorthelp="helpfull" not in help_asked[0], writeto_stdout=True)
            return 0  # absl's own help flag exits with 1

        terminal.run_and_exit(show)


def _parse_flags(argv: list[str], required: Sequence[str]) -> list[str]:
    # Asked again for commands that have not asked before their imports.
    answer_help()
    try:
        if "config" in flags.FLAGS:
            return _parse_with_config(argv, required)
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from None
    _check_given(rest, required)
    return rest


def _parse_with_config(argv: list[str], required: Sequence[str]) -> list[str]:
    """Parses flags that include --config, and applies and checks its overrides."""
    from lamb_tpu.run import overrides  # late: it imports every optimizer, model, task and data set

    # A --flagfile is expanded first, so that overrides inside it are found too.
    everything = [argv[0], *flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)]
    own, argv = overrides.take(_with_path(everything))
    _ARGV[:] = argv
    try:
        rest = flags.FLAGS(argv)
    except (UserError, Preempted, KeyboardInterrupt):
        raise
    except BaseException:  # a config file can raise anything
        # ml_collections reports a bad file or key in its own words. These two calls find the cause
        # again and name it; any other error is raised as it is.
        _check_overrides(argv, _load_config_file(argv))
        raise
    config = flags.FLAGS["config"].value
    if not isinstance(config, ConfigDict) and (flags.FLAGS["config"].present or own):
        _load_config_file(argv)  # raises; ml_collections would raise an OSError only at first use
    if config is not None:
        overrides.apply(config, own)
        _check_phases(everything, config)
    # A config is printed without a workdir.
    if flags.FLAGS.print_config:
        required = ["config"]
    _check_given(rest, required)
    return rest


def _with_path(argv: list[str]) -> list[str]:
    """Returns the command line with the path of a recipe that --config names without folder."""
    found = list(argv)
    for number, item in enumerate(argv):
        if item in ("-config", "--config") and number + 1 < len(argv):
            number, flag, value = number + 1, "", argv[number + 1]
        elif item.startswith(("-config=", "--config=")):
            flag, _, value = item.partition("=")
            flag += "="
        else:
            continue
        # The file ends at the first colon; the rest is the recipe's argument.
        path, colon, argument = value.partition(":")
        found[number] = flag + recipe_path(path) + colon + argument
    return found


def _check_given(rest: Sequence[str], required: Sequence[str]) -> None:
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}; flags start with --, see --help")
    for name in flags.FLAGS:  # an empty path would be the current folder
        flag = flags.FLAGS[name]
        # Keys of the config may be empty, and a required flag that is empty counts as missing
        # below.
        if (
            flag.present
            and flag.value == "" != flag.default
            and not name.startswith("config.")
            and name not in required
        ):
            raise UserError(f"--{name} is empty; give a value, or leave it out")
    for name in required:
        if not flags.FLAGS[name].value:
            raise UserError(f"--{name} is missing; see --help")


def _load_config_file(argv: list[str]) -> ConfigDict:
    """Returns the config that --config names, without overrides.

    Raises:
      UserError: there is no such config, or its file fails.
    """
    # Both forms, --config=FILE and --config FILE; the last one counts, as in absl.
    values = [
        item.partition("=")[2] if "=" in item else following
        for item, following in itertools.zip_longest(argv, argv[1:])
        if re.fullmatch(r"-{1,2}config(=.*)?", item)
    ]
    if not values or not values[-1]:
        raise UserError("--config is missing; see --help")
    return load_recipe(values[-1])


def load_recipe(recipe: str) -> ConfigDict:
    """Returns the config of a recipe as --config takes it: a file, or a name; then ':argument'.

    Raises:
      UserError: there is no such config, or its file fails.
    """
    path, colon, argument = recipe.partition(":")
    path = recipe_path(path)
    if not os.path.isfile(path):
        shipped = ", ".join(sorted(file.stem for file in recipe_folder().glob("*.py")))
        raise UserError(
            f"--config names the file {path!r}, which does not exist; shipped recipes, which need "
            f"no folder, are {shipped}"
        )
    try:
        get_config = runpy.run_path(path)["get_config"]
        config = get_config(argument) if colon else get_config()
    except (UserError, Preempted, KeyboardInterrupt):
        raise
    except BaseException as error:
        # The innermost line within the config file is the one to show. A file with a syntax error
        # did not run, so it has no frame; the error has the line.
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
    if not isinstance(config, (ConfigDict, dict)):
        raise UserError(
            f"the get_config of the config file {path} returns {config!r}; it must return a "
            "ConfigDict, such as lamb_tpu.config.base_config() with some values changed"
        )
    return ConfigDict(config)


def seconds(key: str, text: str | None) -> float | None:
    """Parses the time of an option, such as '90m', '2h' or '1.5h'.

    Raises:
      UserError: it is no such time.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or not float(match[1]):
        raise UserError(
            f"{key} is {text!r}; give a number above 0 with a unit, such as 30s, 90m or 2h"
        )
    return float(match[1]) * _UNITS[match[2]]


def _check_overrides(argv: list[str], config: ConfigDict) -> None:
    """Raises a UserError for an override of an unknown key."""
    for item in argv:
        # absl sets a boolean to False by --noconfig.KEY.
        override = re.match(r"-{1,2}(?:no)?config\.([^=]*)", item)
        if override:
            section_of(config, override[1])


def _check_phases(argv: list[str], config: ConfigDict) -> None:
    """Raises a UserError for an override without effect, because every phase sets the key."""
    phases = config.get("phases") or {}
    for item in argv:
        override = re.match(r"-{1,2}(?:no)?config\.([^=]*)", item)
        if phases and override and all(_sets(phases[name], override[1]) for name in phases):
            own = " and ".join(f"--config.phases.{name}.{override[1]}" for name in phases)
            raise UserError(
                f"--config.{override[1]} changes nothing, because every phase of the config sets "
                f"it; give {own}"
            )


def _sets(phase: object, key: str) -> bool:
    """Returns whether a phase sets a dotted key; of a section it may set some keys alone."""
    for part in key.split("."):
        if not isinstance(phase, ConfigDict) or part not in phase:
            return False
        phase = phase[part]
    return not isinstance(phase, ConfigDict)


def run_main(main: Callable[[], None], required: Sequence[str] = ()) -> None:
    """Parses the command line, runs `main()` and exits.

    A `UserError` is printed as one sentence, without a traceback, and the exit status is 2. A
    command without its own handling of SIGTERM ends at once, as by Ctrl-C, but with status 75,
    which means: start it again.

    Args:
      main: the command; it reads its flags from `absl.flags.FLAGS`.
      required: names of flags that must be given.
    """

    def call(argv: Sequence[str]) -> None:
        del argv
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs a great deal at INFO
        # This import would bring JAX to commands that do without it, such as the launcher.
        if "jax" in sys.modules:
            from lamb_tpu.optim.quiet import hush_libtpu

            hush_libtpu()
        if "config" in flags.FLAGS and flags.FLAGS.print_config:
            _print_config()
        else:
            with own.calling():
                main()
        sys.stdout.flush()  # a failure can be reported here, but not at exit

    # A command that saves before it ends replaces this handler.
    signal.signal(signal.SIGTERM, _end_preempted)
    logging.set_verbosity(logging.ERROR)  # ml_collections would warn of what is an error below
    try:
        app.run(call, flags_parser=lambda argv: _parse_flags(argv, required))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _end(2)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        # All processes of a run are preempted together, so they may wait for each other at exit.
        sys.exit(130 if isinstance(preempted, Interrupted) else os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        print("interrupted; nothing that was saved is lost", file=sys.stderr)
        _end(130)
    except Exception as error:
        told = _sentence(error)
        if told is None:
            traceback.print_exc()
        else:
            print(f"error: {told}", file=sys.stderr)
        # Status 2 means a mistake of the user's, which a bug or a lost process is not.
        _end(1 if told is None or _is_of_lost_peer(error) else 2)


def _sentence(error: Exception) -> str | None:
    """Returns one sentence for an error that is not a bug of the program; None for a bug."""
    lost_output = terminal.lose_stdout(error)
    # XLA's messages can be pages long.
    reason = " ".join(str(error).split())[:300]
    if lost_output is not None:
        return f"standard output cannot be written ({lost_output})"
    if _is_of_lost_peer(error):
        return (
            f"another process of this run has ended, so this one cannot go on ({reason}); nothing "
            "that was saved is lost"
        )
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
        return (
            f"out of memory ({reason}); make config.batch_size smaller, or "
            "config.accumulation_steps larger; nothing that was saved is lost"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename!r}: {error.strerror}"
    if "gcsfs" in sys.modules and buckets.is_error(error):
        return f"the bucket does not answer ({buckets.reason(error)}); start the same command again"
    return own.blame(error)


def _print_config() -> None:
    from lamb_tpu.run import overrides

    config = flags.FLAGS.config
    check_keys(config)
    check_values(config)
    print(overrides.describe(config))


def _is_of_lost_peer(error: Exception) -> bool:
    """Returns whether a collective failed because another process is no longer there."""
    if "jax" not in sys.modules:
        return False
    # The type depends on who waits for the result: JAX raises its own, NumPy a ValueError.
    of_gloo = re.search("Gloo .*failed|(closed|reset) by peer", str(error), re.DOTALL)
    of_jax = isinstance(error, (sys.modules["jax"].errors.JaxRuntimeError, ValueError))
    return of_jax and of_gloo is not None


def _end_preempted(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    signal.signal(number, signal.SIG_DFL)  # the second signal ends the process
    text = "preempted; nothing that was saved is lost, start the same command again"
    if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        # The signal came while the processes connected, before JAX listened, so only this process
        # knows of it. The others would wait for it in the run, and it for them at its exit.
        print(text, file=sys.stderr)
        _end(os.EX_TEMPFAIL)
    # An exception in a finalizer or a callback of the garbage collector, where the signal may come,
    # goes to this hook and ends nothing.
    sys.unraisablehook = functools.partial(_end_where_unraisable, sys.unraisablehook)
    raise Preempted(text)


def _end_where_unraisable(
    before: Callable[[Any], None], unraisable: "sys.UnraisableHookArgs"
) -> None:
    if not isinstance(unraisable.exc_value, Preempted):
        before(unraisable)
        return
    print(unraisable.exc_value, file=sys.stderr, flush=True)
    # Python ignores exceptions in this hook too, so `sys.exit` would not end the process.
    os._exit(os.EX_TEMPFAIL)


def _end(status: int) -> NoReturn:
    # One process of several must not wait for the others, which wait for it. The launcher does not
    # use JAX, so it need not import it.
    if "jax" in sys.modules:
        from lamb_tpu.cluster import distributed

        distributed.leave(status)
    sys.exit(status)
