"""Searches for the fastest layout of BERT-Large's first phase; writes layouts.json and layouts.md."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plan.rows import FOLDER
from lamb_tpu import overrides
from lamb_tpu.cost.topology import topology
from lamb_tpu.files import writing
from lamb_tpu.plan import fastest
from lamb_tpu.plan.cache import Cache
from lamb_tpu.plan.trials import Trials
from lamb_tpu.plan.variants import Variants

RECIPE = "bert_pretrain:recipe=mixed,phase=1"
TOPOLOGIES = ("v3-1024", "v5e-256")
Record = Mapping[str, Any]


def search(slice_name: str, cache: Cache) -> dict[str, Any]:
    """Searches for the fastest layout on a slice; each layout takes minutes to compile."""
    variants = Variants(RECIPE, overrides.load(RECIPE))
    with Trials(fastest.most(variants, topology(slice_name)), cache=cache) as trials:
        answer = fastest.find(variants, slice_name, trials)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {"recipe": RECIPE, "versions": versions, **answer.json}


def load() -> list[dict[str, Any]]:
    """Returns the records; an empty list if the file is missing."""
    path = FOLDER / "layouts.json"
    return json.loads(path.read_text()) if path.exists() else []


def write(records: Sequence[Record]) -> str:
    """Writes the records and their page, and returns the page."""
    text = page(records)
    writing.replace(FOLDER / "layouts.json", json.dumps(records, indent=1) + "\n")
    writing.replace(FOLDER / "layouts.md", text)
    return text


def page(records: Sequence[Record]) -> str:
    """Returns the page: the fastest layout of each search, and all layouts that the search tried."""
    lines = [
        "# The fastest layouts of BERT-Large's first phase",
        "",
        "Results of `lamb_tpu.plan --find=fastest`, which searches one setting after another and keeps the",
        "best values so far. The batch is 65,536, and all layouts compute the same as the recipe. A time is",
        "the TPU compiler's estimate plus the network model's, with its interval; nothing was run.",
        "The times use the calibration at the time of the search; calibration.md has the current one.",
    ]
    for record in records:
        lines += [
            "",
            f"## {record['topology']}",
            "",
            f"`{record['recipe']}`: {record['decision']}.",
            "",
        ]
        if record["flags"]:
            lines += ["```sh", *record["flags"], "```", ""]
        lines += ["| layout | memory | ms per step |", "| --- | ---: | ---: |"]
        lines += [
            f"| {_layout(trial['changes'])} | {_cells(trial)} |" for trial in record["trials"]
        ]
    versions = sorted(
        {
            ", ".join(f"{name} {number}" for name, number in record["versions"].items())
            for record in records
        }
    )
    command = "Command: `python -m experiments.plan`. Records: layouts.json."
    return "\n".join([*lines, "", f"{'; '.join(versions)}. {command}", ""])


def _layout(changes: Mapping[str, Any]) -> str:
    # Omit the rules, which only describe scanned layers and take several lines.
    shown = [f"{key}={value}" for key, value in changes.items() if key != "optimizer.rules"]
    return f"`{', '.join(shown)}`" if shown else "as given"


def _cells(trial: Mapping[str, Any]) -> str:
    if trial["rejected"]:
        return f"rejected: {trial['rejected']} |"
    share = f"{100 * trial['share_of_memory']:.3g} %" if trial["share_of_memory"] else "?"
    if not trial["fits"]:
        return f"{share}: does not fit |"
    if trial["step_milliseconds"] is None:
        return f"{share} | ?"
    low, middle, high = (f"{each:,.4g}" for each in trial["step_milliseconds"])
    return f"{share} | {middle} ({low} to {high})"
