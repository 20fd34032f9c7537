"""Plans published runs, fits the constants of the network to them, and writes calibration.md.

  python -m experiments.plan

Compiles the programs of `published.toml` that rows.json lacks, which takes minutes for each and two
hours for all on 2 cores; what is compiled stays if it is stopped. Needs Linux on x86-64, no TPU.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.plan import page
from experiments.plan.rows import FOLDER, Part, Source, load_kept, load_sources, measure
from lamb_tpu import cli
from lamb_tpu.files import writing
from lamb_tpu.plan.cache import Cache, default_folder
from lamb_tpu.plan.making import make_plan

_AT_MOST = flags.DEFINE_integer(
    "at_most", None, "Number of programs to compile before the page is written. Default: all.",
    lower_bound=0,
)


def missing(
    sources: Sequence[Source], kept: dict[str, dict[str, Any]]
) -> list[tuple[str, str, Part]]:
    """Returns key, slice and part of the programs that are not kept, each once."""
    found = {
        part.key(run.topology): (run.topology, part)
        for source in sources for run in source.runs for part in run.parts
    }
    return [(key, *found[key]) for key in found if key not in kept]


def main() -> None:
    """Compiles what is missing and writes the page."""
    sources, kept = load_sources(), load_kept()
    todo = missing(sources, kept)[:_AT_MOST.value]
    cache = Cache(default_folder())
    for place, (key, topology, part) in enumerate(todo, start=1):
        print(f"{place} of {len(todo)}: {part.recipe} on {topology}", file=sys.stderr, flush=True)
        kept[key] = measure(make_plan(part.config(), topology, cache=cache), key)
        text = json.dumps(kept, indent=1) + "\n"
        writing.replace(FOLDER / "rows.json", text)
    print(page.write(sources, kept))


if __name__ == "__main__":
    cli.run_main(main)
