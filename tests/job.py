"""A computation of two processes for tests: `python -m tests.job MODE FOLDER [WORKDIR]`."""

import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

from lamb_tpu.cluster import distributed
from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.errors import Interrupted, Preempted, UserError


def evaluate() -> None:
    import jax

    from lamb_tpu.run.build import prepare
    from lamb_tpu.run.evaluator import make_evaluator
    from lamb_tpu.store.checkpoint import Checkpoints
    from tests.run.test_evaluator import config, listing

    actual = []
    for examples, batch_size in (
        (997, 7),
        (997, 96),
        (997, 501),
        (997, 2000),
        (5, 4),
        (5, 64),
        (1, 1),
    ):
        run = listing(prepare(config(eval__batch_size=batch_size), sys.argv[3]), examples)
        if not actual:
            with Checkpoints(run.folder.checkpoints, 1, writes=False) as checkpoints:
                state, _ = checkpoints.restore(12, run.abstract_state)
        metrics = make_evaluator(run)(state)
        actual.append((examples, batch_size, {name: float(x) for name, x in metrics.items()}))
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(actual))


def desync() -> None:
    """Checks parameters three times: all equal, different on one device, and different in one process."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from lamb_tpu.errors import UserError
    from lamb_tpu.watch.desync import make_desync_check

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())

    def copies(value: np.ndarray, others: set[jax.Device]) -> jax.Array:
        arrays = [
            jax.device_put(value + (device in others), device) for device in jax.local_devices()
        ]
        return jax.make_array_from_single_device_arrays(value.shape, replicated, arrays)

    def params(kernel: set[jax.Device], bias: set[jax.Device]) -> dict:
        values = {"kernel": np.ones((4, 3), np.float32), "bias": np.zeros(3, np.float32)}
        others = {"kernel": kernel, "bias": bias}
        return {"dense": {name: copies(values[name], others[name]) for name in values}}

    last, of_one = jax.devices()[-1], {d for d in jax.devices() if d.process_index == 1}
    check = make_desync_check(params(set(), set()), mesh)
    with (folder / f"{jax.process_index()}.txt").open("w") as log:
        check(params(set(), set()), 1)
        print("equal", file=log)
        for step, wrong in ((2, params({last}, set())), (3, params(set(), of_one))):
            try:
                check(wrong, step)
            except UserError as error:
                print(error, file=log)


def preempt(
    send: Callable[[Preemption], None] = lambda _: _signal(signal.SIGTERM), polls_of_a_run: int = 20
) -> None:
    """Polls in successive runs, more slowly in process 1, until a signal to process 1 ends both processes."""
    import jax

    index, polls = jax.process_index(), 0
    try:
        while polls < 10_000:
            with Preemption() as preemption:
                for _ in range(polls_of_a_run):
                    polls += 1
                    if (index, polls) == (1, 10):
                        send(preemption)
                    preemption.poll()
                    time.sleep(0.02 + 0.03 * index)
    except (Preempted, UserError) as error:
        (folder / f"{index}.txt").write_text(str(polls))
        if isinstance(error, UserError):
            if index == 0:
                print(f"error: {error}", file=sys.stderr)
            distributed.leave(2)
        sys.exit(130 if isinstance(error, Interrupted) else os.EX_TEMPFAIL)


def interrupt() -> None:
    preempt(lambda _: _signal(signal.SIGINT))


def fail() -> None:
    """Polls as in `preempt`, but in a single run, until process 1 fails; process 0 reports the failure."""
    preempt(lambda preemption: preemption.fail(UserError("its disk is full")), 10_000)


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)


def saves() -> None:
    """Saves 60 times; counts file descriptors and threads after the 10th and the 60th save."""
    import threading

    import jax
    import jax.numpy as jnp

    from lamb_tpu.parallel import mesh as mesh_lib
    from lamb_tpu.store.checkpoint import Checkpoints

    replicated = mesh_lib.replicated(mesh_lib.make_mesh({"data": -1}))
    actual = []
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        for step in range(1, 61):
            weights = jax.jit(lambda x: jnp.full((4, 4), x), out_shardings=replicated)(float(step))
            checkpoints.save(step, {"weights": weights}, {})
            if step in (10, 60):
                checkpoints.wait()
                actual.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(actual))


if __name__ == "__main__":
    mode, folder = globals()[sys.argv[1]], pathlib.Path(sys.argv[2])
    distributed.initialize()
    mode()
