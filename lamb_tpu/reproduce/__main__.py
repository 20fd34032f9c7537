"""Shows tables of papers beside what was measured here, and measures what is missing.

`python -m lamb_tpu.reproduce list`, then `show lamb/mnist`, then `run lamb/mnist --scale=small`.
"""

import argparse
import pathlib
import sys

from lamb_tpu import cli, terminal
from lamb_tpu.files import buckets

_EXAMPLES = """\
examples:
  python -m lamb_tpu.reproduce list
  python -m lamb_tpu.reproduce show lamb/mnist
  python -m lamb_tpu.reproduce run lamb/mnist --scale=small --seeds=5 --data=DATA
  python -m lamb_tpu.reproduce run lamb --time-limit=2h --processes=2
  python -m lamb_tpu.reproduce run lamb/mnist --tune=8
  python -m lamb_tpu.reproduce commands lamb/table1
  python -m lamb_tpu.reproduce adopt gs-copy/bert_32k
  python -m lamb_tpu.reproduce report --html=site

A run that was killed resumes; a cell that is measured is not run again, unless
its config has changed. DATA has one folder for each data set, such as mnist;
without it data sets are downloaded.
"""


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.reproduce",
        epilog=_EXAMPLES,
        description=terminal.fit_docstring(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        found = kinds.add_parser(name, help=text, description=f"{text}.")
        found.add_argument(
            "--papers",
            metavar="DIR",
            help="folder of the papers' tables (default: experiments of this checkout)",
        )
        found.add_argument(
            "--trust-papers",
            action="store_true",
            help="let tables of DIR name any recipe file and any custom code, which "
            "can run any program; only for a folder whose author you trust",
        )
        return found

    def add_records(found: argparse.ArgumentParser) -> None:
        found.add_argument(
            "--records",
            metavar="DIR",
            help="folder of records of your own (default: the records beside the tables)",
        )

    add("list", "list papers and tables, and how many cells are measured")
    show = add("show", "print the paper's values beside those measured here")
    show.add_argument("tables", nargs="+", metavar="TABLE", help="such as lamb/mnist, or lamb")
    add_records(show)
    run = add("run", "train what is missing or stale")
    add_records(run)
    run.add_argument("tables", nargs="+", metavar="TABLE", help="such as lamb/mnist, or lamb")
    for part in (run, commands := add("commands", "print the commands that train each cell")):
        if part is commands:
            part.add_argument("tables", nargs="+", metavar="TABLE")
        part.add_argument(
            "--scale",
            metavar="smoke|small|paper",
            help=f"size of the runs (default: {'small' if part is run else 'paper'}"
            ", or the only one a table has)",
        )
        part.add_argument("--cells", metavar="NAMES", help="comma-separated (default: all)")
    run.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="seeds 0 to N-1 (default: as many as the table asks for)",
    )
    run.add_argument(
        "--runs",
        default="runs/reproduce",
        metavar="DIR",
        help="folder of the workdirs (default: %(default)s)",
    )
    run.add_argument("--data", metavar="DIR", help="folder of the data sets' folders")
    run.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="runs side by side, which share the cores (default: 1)",
    )
    run.add_argument(
        "--tune",
        type=int,
        metavar="N",
        help="let every cell try N values of the learning rate first, and measure it "
        "with its best; kept beside the table's other records",
    )
    run.add_argument(
        "--time-limit", metavar="TIME", help="save and end after this time, such as 90m or 2h"
    )
    run.add_argument(
        "--budget",
        metavar="TIME",
        help="train only what is estimated to fit into this time, the most telling "
        "runs first, with frequent checkpoints; for a machine that is lent",
    )
    run.add_argument(
        "--carry",
        metavar="FILE",
        help="also write the records into one file, for adopt on another machine",
    )
    run.add_argument("--dry-run", action="store_true", help="only list what would run")
    adopt = add("adopt", "take finished runs made elsewhere into their cells")
    adopt.add_argument(
        "path", metavar="PATH", help="workdir of a finished run, or a file of `run --carry`"
    )
    report = add("report", "write the pages of all that was measured")
    add_records(report)
    report.add_argument("tables", nargs="*", metavar="TABLE", help="only these (default: all)")
    report.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the Markdown pages and pictures (default: report in "
        "the folder of the papers)",
    )
    report.add_argument("--html", metavar="DIR", help="also write a site of HTML pages there")
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Runs a command."""
    # Late: they import JAX and Matplotlib, which --help does without.
    from lamb_tpu.reproduce import adopting, choosing, loading, running, showing

    papers = loading.folder() if options.papers is None else pathlib.Path(options.papers)
    found = loading.load_all(papers.expanduser().absolute(), options.trust_papers)
    if options.command == "list":
        showing.show_list(found)
        return
    if options.command == "adopt":
        for line in adopting.take(found, buckets.local(options.path, "WORKDIR")):
            print(line)
        return
    chosen = list(found.values())
    if options.tables:
        chosen = choosing.choose_tables(found, options.tables)
    records = None
    if options.command != "commands" and options.records is not None:
        records = pathlib.Path(options.records).expanduser()
    if options.command == "report":
        from lamb_tpu.reproduce.report import site

        output = papers / "report" if options.output is None else pathlib.Path(options.output)
        html = options.html and pathlib.Path(options.html)
        # The page beside the tables is of all tables and of their own records.
        is_whole = not options.tables and options.output is None and records is None
        written = site.write(
            {table.key: table for table in chosen},
            output,
            html,
            records,
            papers if is_whole else None,
            # The list beside the tables is of all of them.
            index=not options.tables or options.output is not None,
        )
        if options.tables:  # they are what the reader wants to open
            print("\n".join(map(str, written)))
    elif options.command == "show":
        showing.show(chosen, records)
    elif options.command == "commands":
        showing.show_commands(chosen, options.scale, options.cells)
    else:
        running.run(
            chosen,
            running.Request(
                options.scale,
                options.cells,
                options.seeds,
                buckets.local(options.runs, "--runs"),
                options.data and pathlib.Path(options.data).expanduser().absolute(),
                options.processes,
                cli.seconds("--time-limit", options.time_limit),
                options.dry_run,
                records,
                options.tune,
                cli.seconds("--budget", options.budget),
                options.carry and pathlib.Path(options.carry).expanduser(),
            ),
        )


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # the flags of absl, of which there are none here
    cli.run_main(lambda: main(_parse(given)))
