"""A run whose batch is decided and which kills itself: `python -m tests.deciding RULE FOLDER ...`.

With UPDATE and SECONDS behind FOLDER, SIGKILL comes so long after the first update that follows at
least UPDATE completed ones has begun.
"""

import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu import train as train_lib
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from lamb_tpu.run.updating import Updating, make_updating
from tests import tiny

RULES: dict[str, dict[str, Any]] = {
    "noise_scale": {"decay": 0.5}, "simigrad": {"target": 0.5},
}


def config(name: str) -> ConfigDict:
    """7,680 examples, first in batches of 64, in quanta of 32."""
    rule = {"name": name, "lower": 32, "upper": 128, "interval": 3, "scaling": "sqrt"}
    return tiny.digits(
        accumulation_steps=4, duration="120 steps", batch_rule=ConfigDict(rule | RULES[name]),
        checkpoint__every="256 examples", checkpoint__keep=3, eval__every="2560 examples",
        log__every="96 examples",
    )


def killing(update: int, seconds: float) -> None:
    """Has the run killed; see the module."""

    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)

    def make(run: Run, loader: data.TrainLoader, *more: Any) -> Updating:
        each = make_updating(run, loader, *more)

        def updated(state: TrainState, step: int) -> tuple[TrainState, Any]:
            if step >= update and killer.ident is None:
                killer.start()
            return each(state, step)

        return updated

    train_lib.make_updating = make


if __name__ == "__main__":
    rule, folder, *moment = sys.argv[1:]
    if moment:
        killing(int(moment[0]), float(moment[1]))
    train_lib.train(config(rule), pathlib.Path(folder), quiet=True)
