"""Prints a script that completes commands, flags, recipes and config keys in bash or zsh.

eval "$(lamb_tpu completion bash)"
lamb_tpu completion zsh > ~/.zfunc/_lamb_tpu
"""

import argparse
import runpy
import sys
from collections.abc import Collection

from lamb_tpu import cli, command, terminal

_NOTE = """\
The script takes seconds to generate. To load it in every new shell, write it to
a file once:

  mkdir -p ~/.local/share/bash-completion/completions
  lamb_tpu completion bash > ~/.local/share/bash-completion/completions/lamb_tpu

For zsh, ~/.zfunc must be in fpath before ~/.zshrc calls compinit. After an
update, generate the script again.
"""
# bash splits --flag=value into three words, but shtab's function expects two. Drop the '='.
_EQUALS = """
_lamb_tpu() {
  local words=() position=0 index
  for index in "${!COMP_WORDS[@]}"; do
    if [[ ${COMP_WORDS[index]} == = ]]; then
      (( index == COMP_CWORD )) || continue
      words+=("")
    else
      words+=("${COMP_WORDS[index]}")
    fi
    (( index > COMP_CWORD )) || position=$(( ${#words[@]} - 1 ))
  done
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$position
  _shtab_lamb_tpu
}
complete -o bashdefault -F _lamb_tpu lamb_tpu
"""


def script(shell: str) -> str:
    """Returns the completion script of a shell."""
    import shtab

    text = shtab.complete(_parser(), shell)
    return f"{text}\n{_EQUALS}" if shell == "bash" else text


def _parser() -> argparse.ArgumentParser:
    """Returns a parser with a subparser for each command."""
    parser = argparse.ArgumentParser("lamb_tpu")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, module in command.MODULES.items():
        subparser = commands.add_parser(
            name, parents=[_of_command(module)], add_help=False, help=command.summary(module)
        )
        _complete_values(subparser)
    return parser


def _of_command(module: str) -> argparse.ArgumentParser:
    """Returns a parser with a command's options, from absl or argparse, without running the command."""
    from absl import flags

    before, arguments = set(flags.FLAGS), sys.argv
    sys.argv, terminal.collecting = ["lamb_tpu"], True
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except terminal.CollectedParser as collected:
        return collected.parser or _of_flags(set(flags.FLAGS) - before)
    finally:
        sys.argv, terminal.collecting = arguments, False
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)  # the next command may define the same flag
    raise AssertionError(f"{module} parses no arguments")


def _of_flags(names: Collection[str]) -> argparse.ArgumentParser:
    """Returns a parser with absl flags as options; if --config is among them, config keys are options too."""
    from absl import flags

    from lamb_tpu.config import base_config, flatten, recipe_folder

    parser = argparse.ArgumentParser()
    for flag in (flags.FLAGS[name] for name in sorted(names)):
        text = " ".join(flag.help.split())
        if flag.boolean:
            parser.add_argument(f"--{flag.name.replace('_', '-')}", action="store_true", help=text)
            continue
        action = parser.add_argument(f"--{flag.name.replace('_', '-')}", help=text)
        action.choices = getattr(flag.parser, "enum_values", None)
        if flag.name == "config":
            action.choices = sorted(file.stem for file in recipe_folder().glob("*.py"))
            for key, value in flatten(base_config()).items():
                parser.add_argument(f"--config.{key}", help=f"default {value!r}")
    return parser


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Makes the shell complete file names for options without a type or choices, except config keys."""
    import shtab

    for action in parser._actions:
        takes_text = action.nargs != 0 and action.type is None and action.choices is None
        if takes_text and not action.dest.startswith("config."):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_values(each)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.completion",
        description=(__doc__ or "").partition("\n")[0],
        epilog=_NOTE,
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Prints the script."""
    print(script(options.shell))


if __name__ == "__main__":
    cli.run_command(lambda words: main(_parse(words)))
