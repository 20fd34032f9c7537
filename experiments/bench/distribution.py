"""Traffic, memory, start-up time and differences of one short run in many placements.

  python -m experiments.bench.distribution --write

Trains an MLP with BatchNorm in groups and dropout on the embedded digits with LAMB in float32: on
1, 2, 4 and 8 simulated devices of one process and on 2 and 4 processes of 2 devices each, with
replicated state, ZeRO-1 and FSDP, with collectives placed by the compiler (jit) and named by the
program (shard_map). Each run has processes of its own and leaves one JSON line in --folder; a sweep
that was interrupted goes on where it stood, as long as the sources are the same.
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
from lamb_tpu.errors import UserError
from lamb_tpu.watch.progress import format_seconds

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SECONDS = 600  # time limit of a cell
_PLACES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 8))  # processes, devices of all of them
REFERENCE = Cell(1, 1, "replicated", "jit")


def cells() -> list[Cell]:
    """The rows; first the one that all are compared with, then its sums in another order."""
    grid = [
        Cell(processes, devices, state, backend)
        for processes, devices in _PLACES
        for state in STATES
        for backend in ("jit", "shard_map")
    ]
    narrow = [Cell(1, 8, state, "shard_map", "bfloat16") for state in STATES]
    return [REFERENCE, REFERENCE._replace(microbatches=2), *grid[1:], *narrow]


def identity() -> dict[str, Any]:
    """Returns everything that a line depends on besides its cell."""
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


def kept_lines(file: pathlib.Path, reference: pathlib.Path, wanted: dict[str, Any]) -> list[Any]:
    """The lines of an earlier sweep that still hold; those of another identity are dropped."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() and reference.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # the last one of a sweep that was killed
            continue
        if line["identity"] == wanted:
            lines.append(line)
    if not lines or Cell(*lines[0]["cell"]) != REFERENCE:
        lines = []  # what the others were compared with is gone
        reference.unlink(missing_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def run_cell(cell: Cell, reference: pathlib.Path) -> dict[str, Any]:
    """Trains one cell in processes of its own.

    Raises:
      UserError: the cell failed; the message has the last lines of its output.
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
            command, cwd=_ROOT, text=True, capture_output=True, timeout=_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"the cell {cell.name} took more than {_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        last = "\n".join(error.stderr.splitlines()[-20:])
        raise UserError(f"the cell {cell.name} failed; its output ends:\n{last}") from None
    return json.loads(done.stdout.splitlines()[-1])


def sweep(wanted: list[Cell], folder: pathlib.Path) -> list[dict[str, Any]]:
    """A line for each cell, those of an earlier sweep and new ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--folder {folder} cannot be written ({error.strerror}); give a folder that can"
        ) from None
    file, reference = folder / "lines.jsonl", folder / "reference.npz"
    if flags.FLAGS.fresh:
        reference.unlink(missing_ok=True)
    known = identity()
    lines = {Cell(*line["cell"]): line for line in kept_lines(file, reference, known)}
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
    """The text around the table, from the lines alone."""
    known, first, last = lines[0]["identity"], *lines[0]["losses"]
    size = sum(
        distribution_table.least_bytes({name: shape}, 2, "replicated", "float32")
        for name, shape in lines[0]["shapes"].items()
    )
    return (
        "\n".join(
            [
                f"MLP with two hidden layers of {known['width']}, BatchNorm in groups of "
                f"{distribution_cell.GROUP_SIZE} and dropout, {size / 1e6:.3f} MB of float32 parameters; "
                f"embedded digits at batch {distribution_cell.BATCH_SIZE}; LAMB, {known['updates']} "
                f"updates, {distribution_cell.WARMUP} of them warm-up, in which the loss falls from "
                f"{first:.2f} to {last:.2f} on one device. jax {known['jax']}, jaxlib {known['jaxlib']}, "
                f"Python {known['python']}, {os.cpu_count()} cores of a {platform.machine()} CPU, all "
                "devices simulated on them. Made by `python -m experiments.bench.distribution --write`.",
                *(["", flags.FLAGS.note] if flags.FLAGS.note else []),
                "",
                "- Difference: of the parameters after the last update from the first row's, the largest "
                "of all, relative to the largest value of each tensor; bound "
                f"{distribution_table.DIFFERENCE:g}. The row in 2 microbatches is the first one with its "
                "sums taken in another order.",
                "- Sent: the bytes that each device has to send for the operations of the compiled step. "
                "Of n devices that share an operand of b bytes, an all-reduce sends 2 (n - 1) / n b, a "
                "reduce-scatter (n - 1) / n b, an all-gather of parts of b bytes (n - 1) b. The least is 2 "
                "(n - 1) / n of the gradient for state that is replicated, and (n - 1) / n of the "
                "gradient and of the parameters each for what is split; bound "
                f"{distribution_table.EXCESS:g} of it, and at most {distribution_table.GRADIENT_SUMS} "
                "operations that sum gradients (a reduce-scatter in two phases is two).",
                "- An operation carries gradients or parameters if one of its arrays has as many values as "
                "a kernel, or is a bucket of them; what the compiler has combined with it counts too. The "
                "other operations are sums of BatchNorm's moments and running averages, of norms, metrics "
                "and of vectors' gradients, and under jit exchanges of activations, which at this batch "
                "have another size than any kernel.",
                "- FSDP splits kernels by the rule ('kernel', 'fsdp'); vectors, 1 % of the parameters, "
                "stay whole. Under ZeRO-1 all but the ten biases of the output are split.",
                "- Held: parameters and optimizer state as they lie on the fullest device, and what 4 "
                "bytes for each parameter and each of its two moments come to.",
                "- First update: from the start of the processes, compilation included.",
                "- Rows with gradients in bfloat16 show the operations of the step before the compiler, "
                "which on a CPU makes float32 sums of them; there each tensor is an operation of its own.",
                "",
                distribution_table.table(lines),
                "",
                *(f"- {note}" for note in distribution_table.notes(lines)),
            ]
        )
        + "\n"
    )


def main() -> None:
    """Measures what is not known yet, prints the table and writes it if asked."""
    values = flags.FLAGS
    try:
        chosen = re.compile(values.cells)
    except re.error as error:
        raise UserError(
            f"--cells={values.cells} is not a valid regular expression ({error})"
        ) from None
    wanted = [cell for cell in cells() if cell == REFERENCE or chosen.search(cell.name)]
    text = report(sweep(wanted, pathlib.Path(values.folder)))
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_string(
        "folder",
        str(pathlib.Path(tempfile.gettempdir()) / "lamb_tpu-distribution"),
        "Where lines and the first row's parameters are kept.",
    )
    flags.DEFINE_bool("fresh", False, "Whether to measure all anew.")
    flags.DEFINE_string("cells", "", "Regex over cells, such as '2x2 zero1' or 'bfloat16'.")
    flags.DEFINE_integer("width", 512, "Of both hidden layers.", lower_bound=8)
    flags.DEFINE_integer("updates", 20, "In each run.", lower_bound=11)
    flags.DEFINE_string("note", "", "What else ran on the machine, for the text.")
    flags.DEFINE_bool("write", False, "Whether to write distribution.md beside this file.")
    cli.run_main(main)
