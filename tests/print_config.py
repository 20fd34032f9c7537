"""The command line of a config alone, for tests of pages: checks it and shows it, and ends.

Of the package's commands it imports only what --config needs, so that many lines can be checked.
"""

from lamb_tpu import cli


def _unused() -> None:
    raise AssertionError("needs --print_config")


if __name__ == "__main__":
    cli.define_config_flag()
    cli.run_main(_unused, required=["config"])
