"""Time of a training step on a CPU, ours beside PyTorch's, for each network of `cpu_networks`.

  python -m experiments.bench.cpu_step --write

Times the whole update (forward, backward and LAMB) in float32: ours, PyTorch's as it stands and by
torch.compile, with timm's Lamb. The extras `bench` and `interchange` install PyTorch, timm and
transformers. The contenders take turns in one process, so that what else the machine does falls on
all of them; read the ratios and not the milliseconds. A second table has the time of ours by kind
of operation; `cpu_profile` says how it is taken and what keeps a network behind.
"""

import importlib
import pathlib
import statistics
import time
from typing import Any

import jax
from absl import flags

from experiments.bench import cpu_profile
from experiments.bench.cpu_networks import NETWORKS, Network
from experiments.bench.cpu_update import Update, ours
from lamb_tpu import cli
from lamb_tpu.cluster import cpu_devices
from lamb_tpu.cluster.host import num_cores

_FORMS = ("eager", "compiled")


def theirs(network: Network, form: str) -> Update | None:
    """One update of PyTorch's; None if a package is not installed."""
    try:
        torch, timm = importlib.import_module("torch"), importlib.import_module("timm.optim")
        module = network.peer(torch)
    except ImportError:
        return None
    torch.set_num_threads(num_cores())
    optimizer = timm.Lamb(module.parameters(), lr=1e-3, weight_decay=0.01, foreach=True)
    if network.pixels:
        # PyTorch's own advice for convolutions on CPUs.
        module = module.to(memory_format=torch.channels_last)
        x = torch.rand(network.batch, network.channels, network.pixels, network.pixels)
        x = x.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(10, (network.batch,))

        def loss(module: Any) -> Any:
            return torch.nn.functional.cross_entropy(module(x), labels)
    else:
        ids = torch.randint(8192, (network.batch, 128))
        labels = torch.full_like(ids, -100)
        labels[:, ::6] = ids[:, ::6]
        pairs = torch.randint(2, (network.batch,))

        def loss(module: Any) -> Any:
            return module(input_ids=ids, labels=labels, next_sentence_label=pairs).loss

    module.train()
    run = torch.compile(module) if form == "compiled" else module

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(run).backward()
        optimizer.step()

    return update


def contenders(network: Network) -> dict[str, Update]:
    """Returns the update of each row that is installed."""
    found: dict[str, Update | None] = {"ours": ours(network)}
    found |= {form: theirs(network, form) for form in _FORMS}
    return {name: update for name, update in found.items() if update is not None}


def measure(network: Network, rounds: int) -> dict[str, float]:
    """Returns the median seconds of an update of each contender, in turns after a warm-up."""
    updates = contenders(network)
    for update in updates.values():
        update()
        update()
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(rounds):
        for name, update in updates.items():
            for _ in range(2):  # the first of them warms what the others have pushed out
                began = time.perf_counter()
                update()
                taken = time.perf_counter() - began
            seconds[name].append(taken)
    return {name: statistics.median(times) for name, times in seconds.items()}


def row(name: str, network: Network, seconds: dict[str, float]) -> str:
    """Returns a line of the table."""
    peers = [seconds[form] for form in _FORMS if form in seconds]
    cells = [
        f"{1e3 * seconds[key]:,.0f}" if key in seconds else "-"
        for key in ("ours", *_FORMS)
    ]
    ratio = f"{seconds['ours'] / min(peers):.2f}" if peers else "-"
    shape = f"{network.batch} x {network.pixels or 128}"
    return f"| {name} | {shape} | {' | '.join(cells)} | {ratio} |"


def main() -> None:
    """Measures every network, prints the table and writes it if asked."""
    values = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")
    cpu_devices.make(values.devices)
    names = values.networks or list(NETWORKS)
    chosen = "".join(f" --networks={name}" for name in values.networks)
    versions = []
    for package in ("torch", "timm", "transformers"):
        try:
            versions.append(f"{package} {importlib.import_module(package).__version__}")
        except ImportError:
            versions.append(f"{package} not installed")
    lines = [
        f"One update with LAMB, float32: jax {jax.__version__}, {', '.join(versions)}, "
        f"{num_cores()} cores, {values.devices} device(s). Medians of {values.rounds}; the ratio "
        "is to PyTorch's faster form, and below 1 ours is ahead.",
        f"Command: `python -m experiments.bench.cpu_step --rounds={values.rounds}"
        f" --devices={values.devices}{chosen}`",
        "",
        "| network | batch | ours, ms | PyTorch eager, ms | compiled, ms | ratio |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        lines.append(row(name, NETWORKS[name], measure(NETWORKS[name], values.rounds)))
        print(lines[-1], flush=True)
    print("\n".join(table := ["", *cpu_profile.lines(names)]), flush=True)
    lines += table
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 5, "Timed updates of each contender.", lower_bound=1)
    flags.DEFINE_integer("devices", 1, "Devices of the CPU.", lower_bound=1)
    flags.DEFINE_multi_enum("networks", [], list(NETWORKS), "Those to measure; default all.")
    flags.DEFINE_bool("write", False, "Whether to write cpu_step.md beside this file.")
    cli.run_main(main)
