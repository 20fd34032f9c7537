"""A program in which process 0 cannot handle signals, as during compilation, and process 1 waits.

Run it with `python -m lamb_tpu.launch local --module=tests.deaf -- --folder=X`. A long library call
stands in for the compiler: Python calls no signal handlers during the call.
"""

import hashlib
import os
import pathlib

from absl import flags

from lamb_tpu import cli
from lamb_tpu.cluster import distributed


def main() -> None:
    distributed.initialize_from_flags()
    (pathlib.Path(flags.FLAGS.folder) / str(os.getpid())).touch()
    index, _ = distributed.index_and_count()
    if index == 0:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # takes half an hour
    distributed.meet()


if __name__ == "__main__":
    flags.DEFINE_string("folder", None, "Receives a file named after each process.")
    cli.define_process_flags()
    cli.run_main(main, required=["folder"])
