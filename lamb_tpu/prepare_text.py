"""Entry point of `python -m lamb_tpu.prepare_text`; runs `lamb_tpu.data.prepare_text`."""

from lamb_tpu import command

if __name__ == "__main__":
    command.run("prepare_text")
