"""A plan, not a training run's result: BERT-Large's 76 minutes by the TPU compiler.

  python -m experiments.bert.pod_plan

Compiles the training steps of both phases of configs/bert_pretrain.py:recipe=mixed for a TPU v3 pod
slice of 2,048 cores, as `python -m lamb_tpu.plan` does, and writes memory, time and traffic, times
the recipe's updates, beside the paper's figure into experiments/bert/pod_plan.md. Needs Linux
on x86-64; it took 3 minutes 26 seconds on 2 cores.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from configs import bert_pretrain
from lamb_tpu import cli
from lamb_tpu.plan.making import make_plan
from lamb_tpu.plan.report import Plan
from lamb_tpu.run.recipe import resolve

FOLDER = pathlib.Path(__file__).parent
TOPOLOGY = "v3-2048"
PAPER_MINUTES = 76.19  # arXiv:1904.00962, table 1, 64k/32k on 1,024 TPU v3 chips


def record(made: Plan, updates: int, tokens: int) -> dict[str, Any]:
    """A phase's plan as it is kept."""
    return {
        "tokens": tokens, "updates": updates, **made.as_json(),
        "sent_bytes": sum(each.row.sent_bytes for each in made.collectives or ()),
    }


def page(records: Sequence[dict[str, Any]]) -> str:
    """The Markdown page of both phases."""
    lines = [
        "# BERT-Large on 1,024 TPU v3 chips, as the TPU compiler estimates it",
        "",
        "The very steps of `configs/bert_pretrain.py:recipe=mixed`: bfloat16 activations, float32",
        "weights, dropout, LAMB. The time is the compiler's own estimate of its program.",
        "",
        "| phase | batch, tokens | fits | GiB a core of "
        f"{records[0]['usable_bytes'] / 2**30:.1f} | ms an update | updates | minutes | "
        "sent by a core an update |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    total = 0.0
    for number, each in enumerate(records, start=1):
        needed = "?" if each["needed_bytes"] is None else f"{each['needed_bytes'] / 2**30:.1f}"
        start = (
            f"| {number} | {each['batch_size']:,} x {each['tokens']} | "
            f"{'yes' if each['fits'] else 'no'} | {needed} | "
        )
        time = each["milliseconds_without_network"]
        if time is None:
            lines.append(f"{start}- | {each['updates']:,} | - | - |")
            continue
        minutes = each["updates"] * time / 60_000
        total += minutes
        lines.append(
            f"{start}{time:.0f} | {each['updates']:,} | {minutes:.1f} | "
            f"{each['sent_bytes'] / 1e6:,.0f} MB |"
        )
    versions = ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
    lines += [
        f"| both | | | | | {sum(each['updates'] for each in records):,} | "
        f"{total:.1f} | |",
        f"| paper, measured | | | | | 8,599 | {PAPER_MINUTES} | |",
        "",
        "What the estimate leaves out: the network (each core sends what the last column says, in",
        "part while it computes), drawing the random bits of dropout (the compiler puts no cycles",
        "on that), input from the hosts, start-up and compilation, the change from one phase to",
        "the next, evaluation, checkpoints, and waiting for the slowest of the cores. The paper's",
        "minutes have most of these in them.",
        "",
        f"{versions}. Command: `python -m experiments.bert.pod_plan`. Plans: "
        "pod_plan.json.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Compiles both phases and writes the page."""
    records = []
    for phase in (1, 2):
        config = bert_pretrain.get_config(f"recipe=mixed,phase={phase}")
        made = make_plan(config, TOPOLOGY)
        print(made.describe(), flush=True)
        steps = resolve(config, 10**6).total_steps
        records.append(record(made, steps, config.data.options.sequence_length))
    text = page(records)
    (FOLDER / "pod_plan.json").write_text(json.dumps(records, indent=1) + "\n")
    (FOLDER / "pod_plan.md").write_text(text)
    print(text)


if __name__ == "__main__":
    cli.run_main(main)
