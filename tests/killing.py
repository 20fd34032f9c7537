"""A run that kills itself: `python -m tests.killing MODULE NAME FOLDER [UPDATE SECONDS]`.

Trains `MODULE.config(NAME)`. If UPDATE and SECONDS are given, the run sends itself SIGKILL SECONDS
after it has started the first update that follows at least UPDATE completed updates.
"""

import importlib
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

from lamb_tpu import data, training
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.run.updating import Updating, make_updating
from lamb_tpu.train import train


def killing(update: int, seconds: float) -> None:
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

    training.make_updating = make


if __name__ == "__main__":
    module, name, folder, *moment = sys.argv[1:]
    if moment:
        killing(int(moment[0]), float(moment[1]))
    config = importlib.import_module(module).config(name)
    train(config, pathlib.Path(folder), quiet=True)
