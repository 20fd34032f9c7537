"""Runs many command lines, each in a fork of one process that has imported what they need.

`python -m tests.commands FILE` reads a list of [module, argument, ...] from FILE, runs each as
`python -m module argument ...` and writes {status, stdout, stderr, seconds} of each into FILE.
Starting Python and JAX anew would take two seconds a line.
"""

import json
import os
import pathlib
import runpy
import sys
import tempfile
import time

SECONDS = 60.0  # for one; then it is killed


def main(path: pathlib.Path) -> list[str] | None:
    """Runs the lines in forks; returns in each fork its line, and in the process itself None."""
    found = []
    for line in json.loads(path.read_text()):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.monotonic()
            child = os.fork()
            if not child:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                return line
            ended, status = 0, 0
            while not ended and time.monotonic() - began < SECONDS:
                time.sleep(0.02)
                ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                os.kill(child, 9)
                _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            found.append(
                {
                    "status": os.waitstatus_to_exitcode(status),
                    "stdout": out.read().decode(errors="replace"),
                    "stderr": err.read().decode(errors="replace"),
                    "seconds": time.monotonic() - began,
                }
            )
    path.write_text(json.dumps(found))
    return None


if __name__ == "__main__":
    # What the commands import, but none of them: as `__main__` they are to be imported anew.
    import matplotlib.figure

    import lamb_tpu.cli
    import lamb_tpu.run.overrides
    import lamb_tpu.run.phases
    import lamb_tpu.run.weights
    import lamb_tpu.store.checkpoint
    import lamb_tpu.watch.best
    import lamb_tpu.watch.progress

    line = main(pathlib.Path(sys.argv[1]))
    if line is not None:
        sys.argv = [f"{line[0].replace('.', '/')}.py", *line[1:]]
        runpy.run_module(line[0], run_name="__main__", alter_sys=True)
