"""Time of a training step, ours beside PyTorch's, for each network of `step_networks`.

  python -m experiments.bench.step --write
  python -m experiments.bench.step --platform=gpu --write

Times the whole update (forward, backward and LAMB) in float32: ours, PyTorch's as it stands and by
torch.compile, with timm's Lamb. The extras `bench` and `interchange` install PyTorch, timm and
transformers. The contenders take turns in one process, so that what else the machine does falls on
all of them; read the ratios and not the milliseconds. On a CPU a second table has the time of ours
by kind of operation; `cpu_profile` says how it is taken and what keeps a network behind. On a GPU
both libraries may round the factors of products to TensorFloat-32.
"""

import importlib
import os
import pathlib
import statistics
import time
from typing import Any

import jax
from absl import flags

from experiments.bench import cpu_profile
from experiments.bench.step_networks import NETWORKS, PLATFORMS, Network
from experiments.bench.step_update import Update, ours
from lamb_tpu import cli
from lamb_tpu.cluster import cpu_devices
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.errors import UserError

_FORMS = ("eager", "compiled")


def theirs(network: Network, form: str) -> Update | None:
    """One update of PyTorch's on JAX' platform; None if a package is not installed."""
    try:
        torch, timm = importlib.import_module("torch"), importlib.import_module("timm.optim")
        module = network.peer(torch)
    except ImportError:
        return None
    torch.set_num_threads(num_cores())
    torch.set_float32_matmul_precision("high")  # as JAX on a GPU; nothing changes on a CPU
    device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")
    module = module.to(device)
    optimizer = timm.Lamb(module.parameters(), lr=1e-3, weight_decay=0.01, foreach=True)
    if network.pixels:
        # PyTorch's own advice for convolutions.
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
    cells = [f"{1e3 * seconds[key]:,.0f}" if key in seconds else "-" for key in ("ours", *_FORMS)]
    ratio = f"{seconds['ours'] / min(peers):.2f}" if peers else "-"
    shape = f"{network.batch} x {network.pixels or 128}"
    return f"| {name} | {shape} | {' | '.join(cells)} | {ratio} |"


def main() -> None:
    """Measures every network, prints the table and writes it if asked."""
    values = flags.FLAGS
    if values.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        cpu_devices.make(values.devices)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some too
    if jax.default_backend() != values.platform:
        raise UserError(f"--platform is {values.platform!r}, and JAX has {jax.default_backend()}")
    names = values.networks or PLATFORMS[values.platform]
    chosen = "".join(f" --networks={name}" for name in values.networks)
    versions = []
    for package in ("torch", "timm", "transformers"):
        try:
            versions.append(f"{package} {importlib.import_module(package).__version__}")
        except ImportError:
            versions.append(f"{package} not installed")
    lines = [
        f"One update with LAMB, float32: jax {jax.__version__}, {', '.join(versions)}, "
        f"{num_cores()} cores, {values.devices} x {jax.devices()[0].device_kind}. Medians of "
        f"{values.rounds}; the ratio is to PyTorch's faster form, and below 1 ours is ahead.",
        f"Command: `python -m experiments.bench.step --platform={values.platform}"
        f" --rounds={values.rounds} --devices={values.devices}{chosen}`",
        "",
        "| network | batch | ours, ms | PyTorch eager, ms | compiled, ms | ratio |",
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
    flags.DEFINE_enum("platform", "cpu", list(PLATFORMS), "Where to measure.")
    flags.DEFINE_integer("rounds", 5, "Timed updates of each contender.", lower_bound=1)
    flags.DEFINE_integer("devices", 1, "Devices of the CPU.", lower_bound=1)
    flags.DEFINE_multi_enum(
        "networks", [], list(NETWORKS), "Those to measure; default those of the platform."
    )
    flags.DEFINE_bool("write", False, "Whether to write step_PLATFORM.md beside this file.")
    cli.run_main(main)
