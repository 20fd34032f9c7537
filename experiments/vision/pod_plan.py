"""Plans, not training runs' results: the papers' steps on 1,024 cores of TPU v3, compiled.

  python -m experiments.vision.pod_plan

Compiles the training steps of `ROWS` as `python -m lamb_tpu.plan` does and writes memory, time and
traffic beside what the papers tell into pod_plan.md. A row that pod_plan.json has is not
compiled again; delete the file to start anew. Needs Linux on x86-64, and minutes for each row.
"""

import collections
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import imagenet_efficientnet, imagenet_resnet
from lamb_tpu import cli
from lamb_tpu.cost import hlo
from lamb_tpu.plan.making import make_plan
from lamb_tpu.plan.report import Plan

FOLDER = pathlib.Path(__file__).parent
TOPOLOGY = "v3-1024"


class Row(NamedTuple):
    """A step, and the throughput that its source reports."""

    name: str
    argument: str  # of the config
    quoted: str  # images a millisecond


EFFICIENTNET, RESNET = "EfficientNet", "ResNet"
ROWS = (
    # arXiv:2011.00071, table 1, from memory; at 65,536 it has no throughput.
    Row(f"{EFFICIENTNET}-B2", "size=b2,optimizer=lars,batch=32768", "451.35"),
    Row(f"{EFFICIENTNET}-B5", "size=b5,optimizer=lars,batch=32768", "77.44"),
    Row(f"{EFFICIENTNET}-B5", "size=b5,optimizer=lars,batch=65536", "-"),
    # MLPerf v0.6, tpu-v3-1024: 2.273 minutes, see the page.
    Row(f"{RESNET}-50", "size=50,optimizer=lars,recipe=mlperf,batch=32768", "at most 717"),
)

# The first pattern found in the path of the operation that names a kernel decides.
KINDS = (
    ("depthwise convolutions", r"/depthwise/"),
    ("other convolutions", r"conv_general_dilated"),
    ("BatchNorm, activations", r"norm\d*/|silu|relu"),
    ("squeeze-excite", r"/squeeze_excite/"),
    ("the rest", r""),
)


def shares(program: str) -> dict[str, float]:
    """Returns the share of each of `KINDS` in the estimated time of a compiled step."""
    cycles: dict[str, int] = collections.Counter()
    for times, instruction, _ in hlo.Program(program).executions(lambda each, _: each.cycles()):
        found = re.search(r'op_name="([^"]*)"', instruction.rest)
        path = found[1] if found else ""
        kind = next(kind for kind, pattern in KINDS if re.search(pattern, path))
        cycles[kind] += times * instruction.cycles()
    return {kind: cycles[kind] / sum(cycles.values()) for kind, _ in KINDS}


def record(row: Row, made: Plan) -> dict[str, Any]:
    """Returns the record of a plan."""
    return {
        "row": row._asdict(), **made.as_json(),
        "sent_bytes": sum(each.row.sent_bytes for each in made.collectives or ()),
        "shares": shares(made.program) if made.cycles else {},
    }


def page(records: Sequence[dict[str, Any]]) -> str:
    """The Markdown page."""
    usable = records[0]["usable_bytes"] / 2**30
    lines = [
        "# Images on 512 TPU v3 chips, as the TPU compiler estimates it",
        "",
        "The very steps of `configs/imagenet_efficientnet.py` (BatchNorm over 32 cores) and",
        "`configs/imagenet_resnet.py` with LARS: convolutions in bfloat16, BatchNorm's statistics",
        "and the weights in float32. The time is the compiler's own estimate of its program.",
        "",
        f"| model | batch | fits | GiB a core of {usable:.1f} | ms an update | images/ms | "
        "quoted images/ms | sent by a core an update | compiled in |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in records:
        row, time = each["row"], each["milliseconds_without_network"]
        needed = "?" if each["needed_bytes"] is None else f"{each['needed_bytes'] / 2**30:.1f}"
        estimate = "- | -" if time is None else f"{time:.1f} | {each['batch_size'] / time:.1f}"
        lines.append(
            f"| {row['name']} | {each['batch_size']:,} | {'yes' if each['fits'] else 'no'} | "
            f"{needed} | {estimate} | {row['quoted']} | {each['sent_bytes'] / 1e6:,.0f} MB | "
            f"{each['compile_seconds']:.0f} s |"
        )
    lines += [
        "",
        "Quoted: EfficientNet, arXiv:2011.00071, table 1, recalled and not read in the paper.",
        "ResNet-50, computed from the log of MLPerf v0.6, tpu-v3-1024: 2.273 minutes to the",
        "target, of which 2,983 updates are the most that its schedule has, with evaluation.",
        "",
        "What the estimate leaves out: the network (each core sends what the table says, in part",
        "while it computes; BatchNorm waits for it in every layer), input from the hosts, start-up",
        "and compilation, evaluation, checkpoints, and waiting for the slowest of the cores. What",
        "is quoted has the network and the waiting in it. And a program that the compiler thinks",
        "fast need not be: none of these ran.",
        "",
        "Where the time goes, by the operation that the compiler names a fused kernel after.",
        "BatchNorm's sums and activations are for the most part computed within the kernels of",
        "convolutions, and are then counted there.",
        "",
        f"| model | batch | {' | '.join(kind for kind, _ in KINDS)} |",
        "| --- | ---: |" + " ---: |" * len(KINDS),
    ]
    for each in records:
        if each["shares"]:
            parts = " | ".join(f"{each['shares'][kind]:.0%}" for kind, _ in KINDS)
            lines.append(f"| {each['row']['name']} | {each['batch_size']:,} | {parts} |")
    versions = "; ".join(sorted({
        ", ".join(f"{name} {number}" for name, number in each["versions"].items())
        for each in records
    }))
    lines += [
        "",
        f"{versions}. Command: `python -m experiments.vision.pod_plan`. Plans: pod_plan.json.",
        "",
    ]
    return "\n".join(lines)


def config_of(row: Row) -> ConfigDict:
    """Returns the row's recipe."""
    recipe = imagenet_resnet if row.name.startswith(RESNET) else imagenet_efficientnet
    return recipe.get_config(row.argument)


def main() -> None:
    """Compiles the missing plans and writes the page."""
    kept = FOLDER / "pod_plan.json"
    found = json.loads(kept.read_text()) if kept.exists() else []
    known = {tuple(each["row"].values()): each for each in found}
    records = []
    for row in ROWS:
        if row not in known:
            made = make_plan(config_of(row), TOPOLOGY)
            print(made.describe(), flush=True)
            known[row] = record(row, made)
        records = [known[row] for row in ROWS if row in known]
        kept.write_text(json.dumps(records, indent=1) + "\n")
        (FOLDER / "pod_plan.md").write_text(page(records))
    print(page(records))


if __name__ == "__main__":
    cli.run_main(main)
