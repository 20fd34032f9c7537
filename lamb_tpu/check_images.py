"""Entry point of `python -m lamb_tpu.check_images`; runs `lamb_tpu.data.images.check`."""

from lamb_tpu import command

if __name__ == "__main__":
    command.run("check_images")
