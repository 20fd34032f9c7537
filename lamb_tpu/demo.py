"""Runs a batch-scaling study on handwritten digits, in under 3 minutes on 2 CPU cores.

It trains one network at batch sizes from 32 to 1,437 with momentum, AdamW and LAMB, prints a table,
and writes the runs, a report and an HTML site to --output. The digits come with the package. If the
demo is started again, it resumes. It runs on the CPU unless JAX_PLATFORMS is set, because a batch of
1,437 cannot be split evenly over 2, 4 or 8 accelerators.
"""

import argparse
import os

from lamb_tpu import cli, limits, terminal
from lamb_tpu.files import buckets

_TABLE = "demo/scaling"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(prog="python -m lamb_tpu.demo", description=__doc__ or "")
    parser.option("--output=DIR", "default: %(default)s", default="runs/demo")
    parser.option("--cells=NAMES", "comma-separated, such as lamb-legw-512 (default: all)")
    parser.option(
        "--seeds=N", "runs of each cell (default: 3)", type=terminal.count(1, limits.MAX_SEEDS)
    )
    parser.option(
        "--processes=N",
        "concurrent runs, which share the cores (default: %(default)s)",
        type=terminal.count(1, limits.MAX_PROCESSES),
        default=1,
    )
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Trains the runs that are missing, and writes the report."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from lamb_tpu.reproduce import loading, running  # late: they import JAX
    from lamb_tpu.reproduce.report import site

    table = loading.load_all(loading.folder())[_TABLE]
    output = buckets.local(options.output, "--output")
    request = running.TableRequest(
        scale=None,
        cells=options.cells,
        seeds=options.seeds,
        runs=output,
        data=None,
        processes=options.processes,
        time_limit=None,
        dry_run=False,
        records=output,
    )
    running.run([table], request)
    print(
        "\n".join(map(str, site.write({_TABLE: table}, output / "report", output / "site", output)))
    )


if __name__ == "__main__":
    cli.run_command(lambda words: main(_parse(words)))
