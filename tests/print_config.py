"""Checks and prints the config of a command line, for tests of pages.

Imports only what --config needs, so that it is fast enough to check many command lines.
"""

from lamb_tpu import cli


def _unused() -> None:
    raise AssertionError("--print-config is missing; add it to the command")


if __name__ == "__main__":
    cli.define_config_flag()
    cli.run_main(_unused, required=["config"])
