"""Plans published runs, fits the constants of the network to them, and finds fastest layouts.

  python -m experiments.plan

Compiles the programs of `published.toml` that rows.json lacks and writes calibration.md; then makes
the searches that layouts.json lacks and writes layouts.md. A program takes minutes, and all of them
three hours on 2 cores; what is compiled stays if it is stopped. Needs Linux on x86-64, no TPU.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.plan import layouts, page
from experiments.plan.rows import FOLDER, Part, Source, load_kept, load_sources, measure
from lamb_tpu import cli
from lamb_tpu.files import writing
from lamb_tpu.plan.cache import Cache, default_folder
from lamb_tpu.plan.making import make_plan, release

_AT_MOST = flags.DEFINE_integer(
    "at_most", None, "Number of programs to compile before calibration.md is written; then nothing "
    "is searched. Default: all.",
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
    """Compiles what is missing and writes the pages."""
    sources, kept = load_sources(), load_kept()
    todo = missing(sources, kept)[:_AT_MOST.value]
    cache = Cache(default_folder())
    for place, (key, topology, part) in enumerate(todo, start=1):
        print(f"{place} of {len(todo)}: {part.recipe} on {topology}", file=sys.stderr, flush=True)
        kept[key] = measure(make_plan(part.config(), topology, cache=cache), key)
        text = json.dumps(kept, indent=1) + "\n"
        writing.replace(FOLDER / "rows.json", text)
        release()
    print(page.write(sources, kept))
    if _AT_MOST.value is None:
        records = layouts.load()
        for topology in layouts.TOPOLOGIES[len(records):]:
            records.append(layouts.search(topology, cache))
            layouts.write(records)
        print(layouts.page(records))


if __name__ == "__main__":
    cli.run_main(main)
