"""Runs `lamb_tpu.train` and ends it after one update: `python -m tests.first_update ARGUMENTS`."""

import os
import runpy
from typing import Any

from lamb_tpu.watch import observers as observers_lib
from lamb_tpu.watch.observer import Observer, Observers

DONE = "the first update is done"
_make = observers_lib.make_observers


class _Ends(Observer):
    """Ends the process after an update, without saves and evaluations."""

    def updated(self, step: int, state: Any) -> None:
        state.step.block_until_ready()
        print(f"{DONE}: {int(state.step)}", flush=True)
        os._exit(0)


def _with_end(*arguments: Any) -> Observers:
    return Observers([*_make(*arguments)._all, _Ends()])


if __name__ == "__main__":
    observers_lib.make_observers = _with_end
    runpy.run_module("lamb_tpu.train", run_name="__main__")
