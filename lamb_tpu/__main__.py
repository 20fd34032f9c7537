"""Entry point of `python -m lamb_tpu`, which is equivalent to the command `lamb_tpu`."""

from lamb_tpu import command

if __name__ == "__main__":
    command.main()
