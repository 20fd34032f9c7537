"""What two processes compute together in tests: `python -m tests.job MODE FOLDER [WORKDIR]`."""

import json
import pathlib
import sys

from lamb_tpu import distributed


def evaluate() -> None:
    """Metrics of a checkpoint on sets of several sizes, in batches of several sizes."""
    import jax

    from lamb_tpu.checkpoint import Checkpoints
    from lamb_tpu.evaluate import make_evaluator
    from lamb_tpu.run import prepare
    from tests.test_evaluate import config, listing

    found = []
    for examples, batch_size in (
        (997, 7), (997, 96), (997, 501), (997, 2000), (5, 4), (5, 64), (1, 1)
    ):
        run = listing(prepare(config(eval__batch_size=batch_size), sys.argv[3]), examples)
        if not found:
            with Checkpoints(run.folder.checkpoints, 1, writing=False) as checkpoints:
                state, _ = checkpoints.restore(12, run.abstract_state)
        metrics = make_evaluator(run)(state)
        found.append((examples, batch_size, {name: float(x) for name, x in metrics.items()}))
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found))


def desync() -> None:
    """Parameters that are equal, of which one device's and of which one process' are not."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from lamb_tpu.desync import make_desync_check
    from lamb_tpu.errors import UserError

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())

    def copies(value: np.ndarray, others: set[jax.Device]) -> jax.Array:
        parts = [
            jax.device_put(value + (device in others), device) for device in jax.local_devices()
        ]
        return jax.make_array_from_single_device_arrays(value.shape, whole, parts)

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


def preempt() -> None:
    """Polls until a signal to process 1 ends both, through several runs and at different speeds."""
    import os
    import signal
    import time

    import jax

    from lamb_tpu.errors import Preempted
    from lamb_tpu.preemption import Preemption

    index, polls = jax.process_index(), 0
    try:
        while polls < 10_000:
            with Preemption() as preemption:
                for _ in range(20):
                    polls += 1
                    if (index, polls) == (1, 10):
                        os.kill(os.getpid(), signal.SIGTERM)
                    preemption.poll()
                    time.sleep(0.02 + 0.03 * index)
    except Preempted:
        (folder / f"{index}.txt").write_text(str(polls))
        sys.exit(os.EX_TEMPFAIL)


if __name__ == "__main__":
    mode, folder = globals()[sys.argv[1]], pathlib.Path(sys.argv[2])
    distributed.initialize()
    mode()
