"""A run that kills itself: `python -m tests.killing MODULE NAME FOLDER [UPDATE SECONDS]`.

It trains `MODULE.config(NAME)`. With UPDATE and SECONDS, SIGKILL comes so long after the first
update that follows at least UPDATE completed ones has begun.
"""

import importlib
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

from lamb_tpu import data
from lamb_tpu import train as train_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.run.updating import Updating, make_updating


def killing(update: int, seconds: float) -> None:
    """Has the run killed; see the module."""

    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)

    def make(run: Run, loader: data.TrainLoader, *more: Any, **named: Any) -> Updating:
        each = make_updating(run, loader, *more, **named)

        def updated(state: TrainState, step: int) -> tuple[TrainState, Any]:
            if step >= update and killer.ident is None:
                killer.start()
            return each(state, step)

        return Updating(updated, each.sent_bytes)

    train_lib.make_updating = make


if __name__ == "__main__":
    module, name, folder, *moment = sys.argv[1:]
    if moment:
        killing(int(moment[0]), float(moment[1]))
    config = importlib.import_module(module).config(name)
    train_lib.train(config, pathlib.Path(folder), quiet=True)
