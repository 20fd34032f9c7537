"""Traffic, memory, start-up time and numerical differences of short runs with many shardings.

  python -m experiments.bench.distribution --write

Trains an MLP with grouped BatchNorm and dropout on the bundled digits with LAMB in float32: on 1, 2,
4 and 8 simulated devices of one process, and on 2 and 4 processes with 2 devices each; with
replicated state, ZeRO-1 and FSDP; with collectives that the compiler chooses (jit), and with
collectives that the program names (shard_map). Each run starts its own processes and writes one JSON
line to --folder. An interrupted sweep resumes if the sources are unchanged.
"""

import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jaxlib
from absl import flags

from experiments.bench import distribution_cell, distribution_table
from experiments.bench.distribution_cell import STATES, Cell
from lamb_tpu import cli
from lamb_tpu.cluster import children
from lamb_tpu.errors import UserError
from lamb_tpu.watch.progress import format_seconds

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SECONDS = 600  # time limit of a cell
_SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 8))  # processes, devices over all processes
REFERENCE = Cell(1, 1, "replicated", "jit")


def cells() -> list[Cell]:
    """Returns the cells: the reference, the reference with sums in a different order, and all others."""
    grid = [
        Cell(processes, devices, state, backend)
        for processes, devices in _SIZES
        for state in STATES
        for backend in ("jit", "shard_map")
    ]
    narrow = [Cell(1, 8, state, "shard_map", "bfloat16") for state in STATES]
    return [REFERENCE, REFERENCE._replace(microbatches=2), *grid[1:], *narrow]


def identity() -> dict[str, Any]:
    """Returns the versions, the digest of the sources, and the settings on which stored lines depend."""
    sources = [*(_ROOT / "lamb_tpu").rglob("*.py"), pathlib.Path(distribution_cell.__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources)))
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "sources": digest.hexdigest()[:12],
        "width": flags.FLAGS.width,
        "updates": flags.FLAGS.updates,
    }


def matching_lines(
    file: pathlib.Path, reference: pathlib.Path, wanted: dict[str, Any]
) -> list[Any]:
    """Returns the stored lines with the identity `wanted`, or [] without the reference; deletes the rest."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() and reference.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # an incomplete last line, left by a killed sweep
            continue
        if line["identity"] == wanted:
            lines.append(line)
    if not lines or Cell(*lines[0]["cell"]) != REFERENCE:
        lines = []  # the reference is missing
        reference.unlink(missing_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def run_cell(cell: Cell, reference: pathlib.Path) -> dict[str, Any]:
    """Trains one cell in new processes.

    Raises:
      UserError: the cell failed or took too long.
    """
    values = flags.FLAGS
    command = [
        sys.executable,
        "-m",
        "lamb_tpu.launch",
        "local",
        f"--processes={cell.processes}",
        f"--devices-per-process={cell.devices // cell.processes}",
        f"--module={distribution_cell.__name__}",
        "--",
        f"--cell={json.dumps(cell)}",
        f"--reference={reference}",
        f"--width={values.width}",
        f"--updates={values.updates}",
        f"--started={time.time()}",
    ]
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            text=True,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            preexec_fn=children.following(),
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"cell {cell.name}", problem=f"took more than {_SECONDS} s; reduce --width or --updates"
        ) from None
    except subprocess.CalledProcessError as error:
        last = "\n".join(error.stderr.splitlines()[-20:])
        raise UserError(
            f"cell {cell.name}", problem=f"failed; see the end of its output: {last}"
        ) from None
    return json.loads(done.stdout.splitlines()[-1])


def sweep(wanted: list[Cell], folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a line for each cell; measures the cells that earlier sweeps did not store."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise UserError(
            f"--folder {folder}", problem=problem, remedy="give another folder"
        ) from None
    file, reference = folder / "lines.jsonl", folder / "reference.npz"
    if flags.FLAGS.fresh:
        reference.unlink(missing_ok=True)
    known = identity()
    lines = {Cell(*line["cell"]): line for line in matching_lines(file, reference, known)}
    left = [cell for cell in wanted if cell not in lines]
    began, done = time.monotonic(), 0
    for number, cell in enumerate(left, start=1):
        start = time.monotonic()
        lines[cell] = {"identity": known, **run_cell(cell, reference)}
        with file.open("a") as out:
            out.write(json.dumps(lines[cell]) + "\n")
        done += cell.processes
        rate = (time.monotonic() - began) / done
        rest = format_seconds(rate * sum(other.processes for other in left[number:]))
        print(
            f"{number}/{len(left)} {cell.name}: {time.monotonic() - start:.1f} s; {rest} left",
            file=sys.stderr,
            flush=True,
        )
    return [lines[cell] for cell in wanted]


def report(lines: list[dict[str, Any]]) -> str:
    """Returns the page, computed from the lines alone."""
    known, first, last = lines[0]["identity"], *lines[0]["losses"]
    size = sum(
        distribution_table.least_bytes({name: shape}, 2, "replicated", "float32")
        for name, shape in lines[0]["shapes"].items()
    )
    return (
        "\n".join(
            [
                f"An MLP with two hidden layers of {known['width']} units, BatchNorm over groups of "
                f"{distribution_cell.GROUP_SIZE} examples, dropout and {size / 1e6:.3f} MB of float32 "
                f"parameters is trained on the bundled digits at batch {distribution_cell.BATCH_SIZE}. LAMB "
                f"makes "
                f"{known['updates']} updates, {distribution_cell.WARMUP} of them warm-up; on one device the "
                f"loss falls from {first:.2f} to {last:.2f}. jax {known['jax']}, jaxlib {known['jaxlib']}, "
                f"Python {known['python']}; all devices are simulated on {os.cpu_count()} cores of an "
                f"{platform.machine()} CPU. Made by `python -m experiments.bench.distribution --write`.",
                *(["", flags.FLAGS.note] if flags.FLAGS.note else []),
                "",
                "- Difference: how far the parameters after the last update are from those of the first "
                "row. For each tensor, the largest absolute difference is divided by the largest absolute "
                "value; the column has the maximum over all tensors, which may be at most "
                f"{distribution_table.DIFFERENCE:g}. The row `float32 in 2 microbatches` repeats the first "
                "row, and adds the same gradients in another order.",
                "- MB sent: what each device must send for the operations of the compiled step that carry "
                "gradients or parameters. If n devices share an operand of b bytes, a device sends "
                "2 (n - 1) / n b in an all-reduce, and (n - 1) / n b in a reduce-scatter; in an all-gather "
                "of shards of b bytes, it sends (n - 1) b. For replicated state the minimum is "
                "2 (n - 1) / n of the gradient's bytes. For sharded state it is (n - 1) / n of the "
                "gradient's bytes plus (n - 1) / n of the parameters' bytes. The bytes sent may be at most "
                f"{distribution_table.EXCESS:g} times the minimum, and at most "
                f"{distribution_table.GRADIENT_SUMS} operations may sum gradients (a reduce-scatter in two "
                "phases counts as two).",
                "- An operation counts as one that carries gradients or parameters if one of its arrays "
                "has as many values as a kernel, or is a bucket of kernels; arrays that the compiler has "
                "combined with this array are included. The other operations sum BatchNorm's moments and "
                "running averages, norms, metrics, and the gradients of vectors. Under jit they also "
                "exchange activations, which at this batch differ in size from every kernel.",
                "- FSDP shards kernels by the rule ('kernel', 'fsdp'), and replicates vectors, which are "
                "1 % of the parameters. ZeRO-1 shards the optimizer state of all parameters except the ten "
                "biases of the output layer.",
                "- MB held: parameters and optimizer state on the device that holds the most. MB computed: "
                "the expected size, 4 bytes for each value of the parameters and of LAMB's two moments "
                "that a device must hold.",
                "- First update after: seconds from the start of the processes to the end of the first "
                "update, including compilation.",
                "- Rows with bfloat16 gradients show the operations before compilation, because the CPU "
                "compiler replaces bfloat16 sums with float32 sums. Before compilation, each tensor has a "
                "separate operation.",
                "",
                distribution_table.table(lines),
                "",
                *(f"- {note}" for note in distribution_table.notes(lines)),
            ]
        )
        + "\n"
    )


def main() -> None:
    """Measures the missing cells, prints the page, and writes it if --write is given."""
    values = flags.FLAGS
    try:
        chosen = re.compile(values.cells)
    except re.error as error:
        problem = f"is not a valid regular expression ({error})"
        raise UserError("--cells", values.cells, problem, "correct the expression") from None
    wanted = [cell for cell in cells() if cell == REFERENCE or chosen.search(cell.name)]
    text = report(sweep(wanted, pathlib.Path(values.folder)))
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_string(
        "folder",
        str(pathlib.Path(tempfile.gettempdir()) / "lamb_tpu-distribution"),
        "Folder for measured lines and the reference parameters.",
    )
    flags.DEFINE_bool("fresh", False, "Whether to measure every cell again.")
    flags.DEFINE_string(
        "cells", "", "Regular expression that selects cells, such as '2x2 zero1' or 'bfloat16'."
    )
    flags.DEFINE_integer("width", 512, "Width of both hidden layers.", lower_bound=8)
    flags.DEFINE_integer("updates", 20, "Updates of each run.", lower_bound=11)
    flags.DEFINE_string("note", "", "Note for the page, such as other load on the machine.")
    flags.DEFINE_bool("write", False, "Whether to write distribution.md beside this file.")
    cli.run_main(main)
