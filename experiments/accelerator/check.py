"""Describes the machine, and checks its data, a smoke run, and its numerical results.

LAMB updates and gradients are computed in float32 with full precision, on the accelerator and on the
CPU of the same machine. The results must agree.
"""

import importlib.metadata
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.accelerator import lines
from experiments.bench.step_networks import NETWORKS, Network, bert, config_of
from lamb_tpu import cli, data, optim, overrides
from lamb_tpu.run.build import prepare
from lamb_tpu.store import checkout
from lamb_tpu.train import train

_PACKAGES = ("jax", "flax", "optax", "numpy", "torch", "timm", "transformers")
# Relative tolerance: the order of summation changes gradients of convolutions and products.
_CLOSE = 1e-3


def machine() -> dict[str, Any]:
    """Returns the hardware, the package versions and the commit."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "backend": device.platform,
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": checkout.commit(),
        **versions,
    }


def difference(compute: Callable[[], Any]) -> float:
    """Returns the largest relative difference between `compute()` on the accelerator and on the CPU."""
    gradients = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            gradients.append(jax.device_get(compute()))
    leaves = zip(*map(jax.tree.leaves, gradients), strict=True)
    return max(
        float(np.max(np.abs(ours - theirs)) / (np.max(np.abs(theirs)) + 1e-12))
        for ours, theirs in leaves
    )


def lamb_update() -> Any:
    """Returns parameters of separate and of stacked layers after three LAMB updates."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (300, 200), "layers": (4, 50, 60), "bias": (200,)}
    params, grads = (
        {key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()}
        for _ in range(2)
    )
    rules = [("layers", {"layer_axes": (0,)}), ("bias", {"decay": False, "adapt": False}), ("", {})]
    tx = optim.lamb(0.1, weight_decay=0.01, rules=rules)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def gradient(network: Network) -> Callable[[], Any]:
    """Returns a function that computes a network's loss and gradient at fixed parameters."""
    run = prepare(config_of(network), None)
    task, batch = run.plain_task, run.train_set.gather(np.arange(network.batch))
    with jax.default_device(jax.devices("cpu")[0]):
        start = jax.device_get(jax.jit(task.init)(jax.random.key(0), batch))
    params, model_state = start["params"], {k: v for k, v in start.items() if k != "params"}

    def compute() -> Any:
        def loss(params: Any) -> Any:
            terms, _ = task.loss(params, model_state, batch, jax.random.key(1))
            return sum(terms.values()) / network.batch

        return jax.jit(jax.value_and_grad(loss))(params)

    return compute


def main(options: Any) -> None:
    """Runs all checks, even after a check fails."""
    output = lines.Lines(options.out, "check")
    output.add("machine", **machine())

    def smoke() -> dict[str, Any]:
        config = overrides.load("mnist_lenet:smoke", {"log.tensorboard": False})
        with tempfile.TemporaryDirectory() as folder:
            train(config, pathlib.Path(folder), quiet=True)
        return {}

    def read() -> dict[str, Any]:
        mnist = data.load("mnist", "train", source_dir=str(options.data / "mnist"))
        jpeg = data.load("cifar10_jpeg", "test", source_dir=str(options.data / "cifar10"))
        return {"mnist": len(mnist), "cifar10_jpeg": len(jpeg)}

    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "data": read,
        "smoke run": smoke,
        "LAMB": lambda: {"difference": difference(lamb_update)},
        "LeNet-5": lambda: {
            "difference": difference(gradient(NETWORKS["LeNet-5"]._replace(batch=64)))
        },
        "BERT": lambda: {"difference": difference(gradient(bert(2, 128, 8)))},
    }
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            values = check()
            problem = "" if values.get("difference", 0.0) <= _CLOSE else "too different"
        except Exception as error:  # the next check must still run
            values, problem = {}, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        seconds = round(time.perf_counter() - began, 2)
        output.add(name, **values, seconds=seconds, problem=problem)


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]
    cli.run_main(lambda: main(lines.parse("check", given)))
