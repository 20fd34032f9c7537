"""Code for commands with absl flags: defining and parsing flags, config overrides, and error reports."""

import contextlib
import importlib
import io
import itertools
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from lamb_tpu import config_file, custom, ending, limits, terminal
from lamb_tpu.config import recipe_folder, recipe_path
from lamb_tpu.errors import Preempted, UserError, hint, out_of_range, shown
from lamb_tpu.files import reading
from lamb_tpu.spec import parse, section_of

# Command-line words for ml_collections: all except the overrides that `overrides` parses.
_ARGV: list[str] = []
_UNITS = {"s": 1, "m": 60, "h": 3600}


def define_config_flag() -> None:
    """Defines --config and --print-config; call before `run_main`."""
    flags.disclaim_key_flags()  # so that --help lists the flags below as flags of the program
    config_flags.DEFINE_config_file(
        "config",
        help_string="Recipe: a file, or the name of a shipped recipe, with its arguments after a "
        "colon, such as configs/mnist_lenet.py:batch=4096 or mnist_lenet:batch=4096. Override any "
        "key, and any argument of the optimizer, model, task and data set, with flags such as "
        "--config.optimizer.b2=0.98.",
        lock_config=True,
        sys_argv=_ARGV,
    )
    flags.DEFINE_bool("print_config", False, "Print the config with all defaults, and exit.")


def define_run_flags(workdir: str) -> None:
    """Defines --config and --workdir; `workdir` is the help text of --workdir."""
    define_config_flag()
    flags.DEFINE_string("workdir", None, workdir)


def define_trust_flag() -> None:
    """Defines --trust-workdir, for commands that read a run's config from its workdir."""
    flags.disclaim_key_flags()
    flags.DEFINE_bool(
        "trust_workdir",
        False,
        "Import every custom component that the config.json of --workdir names, such as "
        "'optax:adabelief'. By default, only classes and functions that your own modules define "
        "are imported, because other names could run any program. Give this flag only if you "
        "trust the author of the folder. It has no effect with --config.",
    )


def define_process_flags() -> None:
    """Defines --coordinator-address, --num-processes, --process-id and --cpu-devices."""
    flags.disclaim_key_flags()
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "HOST:PORT at which process 0 listens; the same for all processes. The values of this flag, "
        "--num-processes and --process-id are detected on TPU VMs and GKE, and under SLURM, Open "
        "MPI and lamb_tpu.launch. The environment variables JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID also set them.",
    )
    flags.DEFINE_integer(
        "num_processes",
        None,
        "Number of processes of the run; 1 turns off the detection of other processes.",
        upper_bound=limits.MAX_NODES,
    )
    flags.DEFINE_integer(
        "process_id", None, "Index of this process, from 0.", upper_bound=limits.MAX_NODES
    )
    flags.DEFINE_integer(
        "cpu_devices",
        None,
        "Number of devices to simulate on a CPU, to try out a run on many devices. The batch must "
        "be divisible by this number. One device uses all cores and is the fastest. Default: "
        "JAX_NUM_CPU_DEVICES, or else 1.",
        lower_bound=1,
        upper_bound=limits.MAX_CPU_DEVICES,
    )


def answer_help() -> None:
    """Prints the help and exits if --help was given; call after defining flags, before slow imports.

    From this call until `run_main`, Ctrl-C ends the process without a traceback.
    """
    if terminal.collecting:
        raise terminal.CollectedParser(None)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _answer_help()
    try:
        importlib.import_module("jax")
    except ValueError as error:  # JAX reads its environment variables during the import
        print(f"error: {ending.of_environment(error)}", file=sys.stderr)
        sys.exit(2)


def _answer_help() -> None:
    help_asked = [item for item in sys.argv if re.fullmatch(r"-{1,2}(h|help|helpfull)", item)]
    if help_asked:
        # absl begins the help with the docstring of the main module.
        program = sys.modules["__main__"]
        program.__doc__ = terminal.fit_docstring(program.__doc__ or "")

        def show() -> int:
            with contextlib.redirect_stdout(io.StringIO()) as text:
                app.usage(shorthelp="helpfull" not in help_asked[0], writeto_stdout=True)
            # Remove the name of the file that defines the flags, and empty defaults.
            help_text = re.sub(r"(?m)^flags:\n\n/.*\.py:$", "flags:", text.getvalue())
            print(
                terminal.dashed(re.sub(r"\n    \(default: '(None|false)?'\)", "", help_text)),
                end="",
            )
            return 0  # absl's own help flag exits with 1

        terminal.run_and_exit(show)


def _parse_flags(argv: list[str], required: Sequence[str]) -> list[str]:
    # Check the original words too: some commands remove their arguments from `argv`.
    terminal.check_words([*sys.orig_argv, *argv])
    _answer_help()  # for commands that did not call `answer_help`
    argv = terminal.respell(argv, _spellings())
    _check_flag_files(argv)
    try:
        if "config" in flags.FLAGS:
            return _parse_with_config(argv, required)
        rest = flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        near = hint(f"--{error.flagname}", [f"--{name}" for name in flags.FLAGS])
        name, remedy = (terminal.dashed(text) for text in (f"--{error.flagname}", near))
        raise UserError(name, problem="is unknown", remedy=f"see --help{remedy}") from None
    except flags.Error as error:
        subject, _, problem = terminal.dashed(str(error)).partition(": ")
        problem = f": {problem}" if problem else ""
        raise UserError(subject, problem=problem, remedy="see --help") from None
    _check_given(rest, required)
    return rest


def _spellings() -> list[str]:
    """Returns the names of all flags, including negated ones such as nojson."""
    off = [f"no{name}" for name in flags.FLAGS if flags.FLAGS[name].boolean]
    return [*flags.FLAGS, *off]


def _parse_with_config(argv: list[str], required: Sequence[str]) -> list[str]:
    """Parses the flags of a command that has --config; applies and checks the config overrides."""
    from lamb_tpu import overrides  # late: it imports every optimizer, model, task and data set

    # Expand a --flagfile first, because it may contain overrides.
    everything = [argv[0], *flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)]
    everything = terminal.respell(everything, _spellings())
    taken, argv = overrides.take(_with_path(everything))
    _ARGV[:] = argv
    try:
        rest = flags.FLAGS(argv)
    except (UserError, Preempted, KeyboardInterrupt):
        raise
    except BaseException as error:  # a config file can raise anything
        if isinstance(error, flags.Error) and not re.search(r"--config=|config\.", str(error)):
            raise
        # ml_collections' message about a bad file or key does not help a user. The next call raises a
        # UserError for either; any other error is raised again.
        _check_overrides(argv, _load_config_file(argv))
        raise
    config = flags.FLAGS["config"].value
    if not isinstance(config, ConfigDict) and (flags.FLAGS["config"].present or taken):
        _load_config_file(
            argv
        )  # raises; ml_collections would raise an OSError later, at the first use
    if config is not None:
        overrides.apply(config, taken)
        _check_phases(everything, config)
    # --print-config needs no workdir.
    if flags.FLAGS.print_config:
        required = ["config"]
    _check_given(rest, required)
    return rest


def _with_path(argv: list[str]) -> list[str]:
    """Replaces the name of a shipped recipe in --config with the recipe's path."""
    words = list(argv)
    for number, item in enumerate(argv):
        if item in ("-config", "--config") and number + 1 < len(argv):
            number, flag, value = number + 1, "", argv[number + 1]
        elif item.startswith(("-config=", "--config=")):
            flag, _, value = item.partition("=")
            flag += "="
        else:
            continue
        # The path ends at the first colon; the recipe's argument follows.
        path, colon, argument = value.partition(":")
        _check_ends("--config", recipe_path(path))
        words[number] = flag + recipe_path(path) + colon + argument
    return words


def _check_flag_files(argv: Sequence[str]) -> None:
    for item, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if re.fullmatch(r"-{1,2}flagfile(=.*)?", item):
            _check_ends("--flagfile", item.partition("=")[2] if "=" in item else following)


def _check_ends(flag: str, path: str) -> None:
    """Rejects a pipe, a socket or a device: reading it could block forever or never end."""
    try:
        category = reading.kind(path)
    except OSError:
        return  # absl and ml_collections report it
    if category in ("a pipe", "a socket", "a device"):
        raise UserError(flag, path, f"is {category}, not a file", "give a file")


def _check_given(rest: Sequence[str], required: Sequence[str]) -> None:
    if rest[1:]:
        problem, remedy = "is unexpected", "start each flag with --; see --help"
        raise UserError(f"the argument {shown(rest[1])}", problem=problem, remedy=remedy)
    for name in flags.FLAGS:  # an empty path would mean the current folder
        flag = flags.FLAGS[name]
        # Config keys may be empty. The next loop reports an empty required flag as missing.
        if (
            flag.present
            and flag.value == "" != flag.default
            and not name.startswith("config.")
            and name not in required
        ):
            remedy = "give a value, or omit the flag"
            raise UserError(terminal.dashed(f"--{name}"), problem="is empty", remedy=remedy)
    for name in required:
        if not flags.FLAGS[name].value:
            flag_name = terminal.dashed(f"--{name}")
            raise UserError(flag_name, problem="is missing", remedy="see --help")


def _load_config_file(argv: list[str]) -> ConfigDict:
    """Returns the config that --config names, without overrides."""
    # Both forms, --config=FILE and --config FILE. The last flag counts, as in absl.
    values = [
        item.partition("=")[2] if "=" in item else following
        for item, following in itertools.zip_longest(argv, argv[1:])
        if re.fullmatch(r"-{1,2}config(=.*)?", item)
    ]
    if not values or not values[-1]:
        raise UserError("--config", problem="is missing", remedy="see --help")
    return load_recipe(values[-1])


def load_recipe(recipe: str) -> ConfigDict:
    """Returns the config of `recipe`: a file or a shipped recipe's name, optionally with ':argument'."""
    path, colon, argument = recipe.partition(":")
    path = recipe_path(path)
    if not os.path.isfile(path):
        shipped = sorted(file.stem for file in recipe_folder().glob("*.py"))
        near = hint(os.path.basename(path).removesuffix(".py"), shipped, "--config=")
        remedy = f"give a file, or one of the shipped recipes {', '.join(shipped)}{near}"
        raise UserError("--config", path, "does not exist", remedy)
    try:
        get_config = runpy.run_path(path)["get_config"]
        config = get_config(argument) if colon else get_config()
    except (UserError, Preempted, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise config_file.failure(path, error) from error
    if not isinstance(config, (ConfigDict, dict)):
        raise UserError(
            f"the config file {path}",
            problem=f": get_config returns {shown(config)}",
            remedy="return a ConfigDict, such as lamb_tpu.config.base_config() with some values "
            "changed",
        )
    return ConfigDict(config)


def seconds(key: str, text: str | None) -> float | None:
    """Converts an option's duration, such as '90m', '2h' or '1.5h', to seconds; None stays None."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    duration = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not duration:
        remedy = "give a number with a unit, such as 30s, 90m or 2h"
        raise UserError(key, text, "is not a time above 0", remedy)
    if duration > limits.MAX_SECONDS:
        hours = limits.MAX_SECONDS // 3_600
        raise out_of_range(key, text, f"at most {hours}h (ten years)")
    return duration


def _check_overrides(argv: list[str], config: ConfigDict) -> None:
    """Rejects an override that names an unknown key or has a value of the wrong type."""
    from lamb_tpu import field_types

    for item in argv:
        # --noconfig.KEY sets a boolean to False.
        override = re.match(r"-{1,2}(?:no)?config\.([^=]*)(?:=(.*))?", item, re.DOTALL)
        if override:
            key, text = override.groups()
            default = section_of(config, key)[key.rpartition(".")[2]]
            if text is not None and default is not None and not isinstance(default, ConfigDict):
                field_types.convert(f"config.{key}", text, type(default), default)


def _check_phases(argv: list[str], config: ConfigDict) -> None:
    """Rejects an override that has no effect because every phase sets the key."""
    phases = config.get("phases") or {}
    for item in argv:
        override = re.match(r"-{1,2}(?:no)?config\.([^=]*)", item)
        if phases and override and all(_sets(phases[name], override[1]) for name in phases):
            flags_of_phases = " and ".join(
                f"--config.phases.{name}.{override[1]}" for name in phases
            )
            problem = "has no effect, because every phase of the config sets it"
            raise UserError(
                f"--config.{override[1]}", problem=problem, remedy=f"give {flags_of_phases}"
            )


def _sets(phase: object, key: str) -> bool:
    """Returns whether a phase sets a dotted key; False if the key is a section."""
    for part in key.split("."):
        if not isinstance(phase, ConfigDict) or part not in phase:
            return False
        phase = phase[part]
    return not isinstance(phase, ConfigDict)


def run_main(main: Callable[[], None], required: Sequence[str] = ()) -> None:
    """Parses the command line, runs `main()`, which reads absl's flags, and exits.

    Prints a `UserError` as one sentence without a traceback, and exits with status 2. SIGTERM ends
    the command at once, unless the command handles it; status 75 then asks the caller to start the
    command again.
    """

    def call(argv: Sequence[str]) -> None:
        del argv
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs a lot at INFO
        # Only if JAX is loaded: this import would load JAX in commands that do not use it.
        if "jax" in sys.modules:
            from lamb_tpu.optim.quiet import hush_libtpu

            hush_libtpu()
        if "config" in flags.FLAGS and flags.FLAGS.print_config:
            _print_config()
        else:
            with custom.calling():
                main()
        sys.stdout.flush()  # a failure can still be reported here, but not at exit

    terminal.open_missing()
    terminal.protect()
    logging.set_verbosity(
        logging.ERROR
    )  # hide ml_collections' warnings about errors reported below
    ending.run(lambda: app.run(call, flags_parser=lambda argv: _parse_flags(argv, required)))


def run_command(main: Callable[[list[str]], int | None]) -> None:
    """Runs `main`, a command without absl flags, with the command-line words; exits with its status."""
    words = sys.argv[1:]
    del sys.argv[1:]

    def call() -> None:
        if status := main(words):
            sys.exit(status)

    run_main(call)


def _print_config() -> None:
    from lamb_tpu import overrides

    config = flags.FLAGS.config
    parse(config)
    print(overrides.describe(config))
