"""Time of a training step in lamb_tpu and in PyTorch, for each network of `step_networks`.

  python -m experiments.bench.step --write
  python -m experiments.bench.step --platform=gpu --write

Times the full update (forward, backward and LAMB) in float32: ours, and PyTorch's in eager mode and
compiled by torch.compile, with timm's Lamb. The extras `bench` and `interchange` install PyTorch, timm
and transformers. The contenders alternate in one process, so that other load affects all of them. Read
the ratios, not the milliseconds. On a CPU, a second table splits our time by type of operation;
`cpu_profile` explains how, and why some networks are slower here. On a GPU, the two libraries may use
TensorFloat-32 for matrix products.
"""

import importlib
import os
import pathlib
import statistics
import time
from typing import Any

import jax
from absl import flags

from experiments.bench import cpu_profile, peers
from experiments.bench.step_networks import NETWORKS, PLATFORMS, Network
from experiments.bench.step_update import Update, ours
from lamb_tpu import cli
from lamb_tpu.cluster import cpu_devices
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.errors import UserError

_FORMS = ("eager", "compiled")


def theirs(network: Network, form: str) -> Update | None:
    """Returns a function that makes one PyTorch update on JAX's platform; None if a package is missing."""
    try:
        torch, timm = importlib.import_module("torch"), importlib.import_module("timm.optim")
        module = network.peer(torch)
    except ImportError:
        return None
    torch.set_num_threads(num_cores())
    torch.set_float32_matmul_precision("high")  # as JAX does on a GPU; no effect on a CPU
    device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")
    module = module.to(device)
    optimizer = peers.lamb(timm, module.parameters(), True, lr=1e-3, weight_decay=0.01)
    if network.pixels:
        # PyTorch recommends this layout for convolutions.
        module = module.to(memory_format=torch.channels_last)
        x = torch.rand(network.batch, network.channels, network.pixels, network.pixels)
        x = x.to(device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(10, (network.batch,), device=device)

        def loss(module: Any) -> Any:
            return torch.nn.functional.cross_entropy(module(x), labels)
    else:
        ids = torch.randint(8192, (network.batch, 128), device=device)
        labels = torch.full_like(ids, -100)
        labels[:, ::6] = ids[:, ::6]
        pairs = torch.randint(2, (network.batch,), device=device)

        def loss(module: Any) -> Any:
            return module(input_ids=ids, labels=labels, next_sentence_label=pairs).loss

    module.train()
    run = torch.compile(module) if form == "compiled" else module

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(run).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return update


def contenders(network: Network) -> dict[str, Update]:
    """Maps each installed contender to a function that makes an update."""
    updates: dict[str, Update | None] = {"ours": ours(network)}
    updates |= {form: theirs(network, form) for form in _FORMS}
    return {name: update for name, update in updates.items() if update is not None}


def measure(network: Network, rounds: int) -> dict[str, float]:
    """Returns each contender's median seconds per update; after a warm-up, the contenders take turns."""
    updates = contenders(network)
    for update in updates.values():
        update()
        update()
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(rounds):
        for name, update in updates.items():
            for _ in range(2):  # time the second; the first refills the caches
                began = time.perf_counter()
                update()
                taken = time.perf_counter() - began
            seconds[name].append(taken)
    return {name: statistics.median(times) for name, times in seconds.items()}


def row(name: str, network: Network, seconds: dict[str, float]) -> str:
    """Returns a line of the table."""
    peers = [seconds[form] for form in _FORMS if form in seconds]
    cells = [f"{1e3 * seconds[key]:,.0f}" if key in seconds else "-" for key in ("ours", *_FORMS)]
    ratio = f"{seconds['ours'] / min(peers):.2f}" if peers else "-"
    shape = f"{network.batch} x {network.pixels or 128}"
    return f"| {name} | {shape} | {' | '.join(cells)} | {ratio} |"


def main() -> None:
    """Measures every network, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    if values.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        cpu_devices.make(values.devices)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
    if jax.default_backend() != values.platform:
        platform = jax.default_backend()
        raise UserError("--platform", values.platform, "is not available here", f"use {platform}")
    names = values.networks or PLATFORMS[values.platform]
    chosen = "".join(f" --networks={name}" for name in values.networks)
    versions = []
    for package in ("torch", "timm", "transformers"):
        try:
            versions.append(f"{package} {importlib.import_module(package).__version__}")
        except ImportError:
            versions.append(f"{package} not installed")
    lines = [
        f"One update with LAMB in float32: jax {jax.__version__}, {', '.join(versions)}, "
        f"{num_cores()} cores, {values.devices} x {jax.devices()[0].device_kind}. Medians of "
        f"{values.rounds} updates. The ratio is our time divided by that of PyTorch's faster form.",
        f"Command: `python -m experiments.bench.step --platform={values.platform}"
        f" --rounds={values.rounds} --devices={values.devices}{chosen}`",
        "",
        "| network | batch x pixels or tokens | ours, ms | PyTorch eager, ms | PyTorch compiled, ms | "
        "ratio |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        lines.append(row(name, NETWORKS[name], measure(NETWORKS[name], values.rounds)))
        print(lines[-1], flush=True)
    if values.platform == "cpu":
        print("\n".join(table := ["", *cpu_profile.lines(names)]), flush=True)
        lines += table
    if values.write:
        page = pathlib.Path(__file__).with_name(f"step_{values.platform}.md")
        page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    flags.DEFINE_enum("platform", "cpu", list(PLATFORMS), "Platform to measure on.")
    flags.DEFINE_integer("rounds", 5, "Timed updates of each contender.", lower_bound=1)
    flags.DEFINE_integer("devices", 1, "Number of CPU devices.", lower_bound=1)
    flags.DEFINE_multi_enum(
        "networks", [], list(NETWORKS), "Networks to measure (default: all that suit the platform)."
    )
    flags.DEFINE_bool("write", False, "Whether to write step_PLATFORM.md beside this file.")
    cli.run_main(main)
