"""Starts runs whose processes may differ, for example in PYTHONPATH: `python -m tests.hosts FILE`.

FILE contains a list of runs. A run is a list of {argv, env, cwd, fresh}, one for each process. With
`fresh`, the process is a new interpreter, which may have another PYTHONPATH; without it, the process
is a fork of this process. FILE receives {status, stdout, stderr} of each process.
"""

import json
import os
import pathlib
import runpy
import socket
import sys
import tempfile
import time
from typing import Any

SECONDS = 300.0  # limit for a run, after which its processes are killed


def start(process: dict[str, Any], index: int, count: int, port: int) -> bool:
    """Turns this fork into a process of a run; returns True, because the caller must run the program."""
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        **process["env"],
    }
    os.chdir(process["cwd"])
    if process["fresh"]:
        os.execv(sys.executable, [sys.executable, "-m", *process["argv"]])
    sys.path.insert(0, process["cwd"])
    sys.argv = process["argv"]
    return True


def main(path: pathlib.Path) -> bool:
    actual = []
    for run in json.loads(path.read_text()):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children, files = [], []
        for index, process in enumerate(run):
            files.append((tempfile.TemporaryFile(), tempfile.TemporaryFile()))
            children.append(os.fork())
            if not children[-1]:
                os.dup2(files[-1][0].fileno(), 1)
                os.dup2(files[-1][1].fileno(), 2)
                return start(process, index, len(run), port)
        statuses: dict[int, int] = {}
        began = time.monotonic()
        while len(statuses) < len(run):
            late = time.monotonic() - began > SECONDS
            for child in set(children) - statuses.keys():
                if late:
                    os.kill(child, 9)
                ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        outputs = []
        for pair in files:
            for file in pair:
                file.seek(0)
            outputs.append([file.read().decode(errors="replace") for file in pair])
        actual.append(
            [
                {"status": statuses[child], "stdout": out, "stderr": err}
                for child, (out, err) in zip(children, outputs, strict=True)
            ]
        )
        path.write_text(json.dumps(actual))
    return False


if __name__ == "__main__":
    if main(pathlib.Path(sys.argv[1])):
        module = sys.argv[0]
        sys.argv[0] = f"{module.replace('.', '/')}.py"
        runpy.run_module(module, run_name="__main__", alter_sys=True)
