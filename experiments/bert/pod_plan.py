"""BERT-Large's 76 minutes as the TPU compiler sees them, without a TPU.

  python -m experiments.bert.pod_plan --data_dir=DATA

Compiles the training steps of both phases of configs/bert_pretrain.py:recipe=mixed for a TPU v3 pod
slice of 2,048 cores, as `python -m lamb_tpu.plan` does, and writes memory, time and traffic, times
the recipe's updates, beside the paper's figure into experiments/bert/pod_plan.md. DATA holds the
folders `train` and `validation` that `python -m lamb_tpu.data.prepare_text` made; any text will do,
only shapes are looked at. Needs Linux on x86-64; it took 3 minutes 26 seconds on 2 cores.
"""

import importlib.metadata
import json
import pathlib

from absl import flags

from configs import bert_pretrain
from lamb_tpu import cli, plan
from lamb_tpu.recipe import resolve

FOLDER = pathlib.Path(__file__).parent
TOPOLOGY = "v3-2048"
PAPER_MINUTES = 76.19  # arXiv:1904.00962, table 1, 64k/32k on 1,024 TPU v3 chips


def page(plans: list[plan.Plan], updates: list[int]) -> str:
    """The Markdown page of both phases."""
    lines = [
        "# BERT-Large on 1,024 TPU v3 chips, as the TPU compiler estimates it",
        "",
        "The very steps of `configs/bert_pretrain.py:recipe=mixed`: bfloat16 activations, float32",
        "weights, dropout, LAMB. The time is the compiler's own estimate of its program.",
        "",
        "| phase | batch, tokens | fits | GiB a core of "
        f"{plans[0].topology.generation.usable / 2**30:.1f} | ms an update | updates | minutes | "
        "sent by a core an update |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    total = 0.0
    for number, (made, steps) in enumerate(zip(plans, updates), start=1):
        tokens = 128 if number == 1 else 512
        needed = "?" if made.needed is None else f"{made.needed / 2**30:.1f}"
        if made.seconds is None:
            lines.append(
                f"| {number} | {made.batch_size:,} x {tokens} | {'yes' if made.fits else 'no'} | "
                f"{needed} | - | {steps:,} | - | - |"
            )
            continue
        minutes = steps * made.seconds / 60
        total += minutes
        sent = sum(row.sent_bytes for row in made.collectives or ())
        lines.append(
            f"| {number} | {made.batch_size:,} x {tokens} | {'yes' if made.fits else 'no'} | "
            f"{needed} | {1e3 * made.seconds:.0f} | {steps:,} | {minutes:.1f} | "
            f"{sent / 1e6:,.0f} MB |"
        )
    lines += [
        f"| both | | | | | {sum(updates):,} | {total:.1f} | |",
        f"| paper, measured | | | | | 8,599 | {PAPER_MINUTES} | |",
        "",
        "What the estimate leaves out: the network (each core sends what the last column says, in",
        "part while it computes), drawing the random bits of dropout (the compiler puts no cycles",
        "on that), input from the hosts, start-up and compilation, the change from one phase to",
        "the next, evaluation, checkpoints, and waiting for the slowest of the cores. The paper's",
        "minutes have most of these in them.",
        "",
        f"jax {importlib.metadata.version('jax')}, libtpu {importlib.metadata.version('libtpu')}. "
        "Command: `python -m experiments.bert.pod_plan --data_dir=DATA`. Plans: pod_plan.json.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Compiles both phases and writes the page."""
    plans, updates = [], []
    for phase in (1, 2):
        config = bert_pretrain.get_config(f"recipe=mixed,phase={phase}")
        config.data.dir = flags.FLAGS.data_dir
        updates.append(resolve(config, 10**6).total_steps)
        plans.append(plan.make_plan(config, TOPOLOGY))
        print(plans[-1].describe(), flush=True)
    text = page(plans, updates)
    (FOLDER / "pod_plan.json").write_text(
        json.dumps([made.as_json() for made in plans], indent=1) + "\n"
    )
    (FOLDER / "pod_plan.md").write_text(text)
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", None, "Folder with the prepared texts train and validation.")
    cli.run_main(main, required=("data_dir",))
