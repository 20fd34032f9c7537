"""One update of a network of `step_networks`, on a batch that stays on the devices."""

from collections.abc import Callable

import jax
import numpy as np

from experiments.bench.step_networks import Network, config_of
from lamb_tpu.run.build import prepare

Update = Callable[[], None]


def ours(network: Network) -> Update:
    """Returns a function that makes one update with our step, on all devices."""
    run = prepare(config_of(network), None)
    state, step = run.first_state(), run.make_train_step()
    batch = run.shard_batch(run.train_set.gather(np.arange(network.batch)))

    def update() -> None:
        nonlocal state
        state, sums = step(state, batch)
        jax.block_until_ready((state, sums))

    return update
