"""Shows tables of papers beside the values measured here, and measures missing cells.

`python -m lamb_tpu.reproduce list`, then `show lamb/mnist`, then `run lamb/mnist --scale=small`.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence

from lamb_tpu import cli, limits, terminal
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.reproduce.tables import Table

_EXAMPLES = """\
examples:
  python -m lamb_tpu.reproduce list
  python -m lamb_tpu.reproduce show lamb/mnist
  python -m lamb_tpu.reproduce run lamb/mnist --scale=small --seeds=5 \\
      --data=DATA
  python -m lamb_tpu.reproduce run lamb --time-limit=2h --processes=2
  python -m lamb_tpu.reproduce run lamb/mnist --tune=8
  python -m lamb_tpu.reproduce run lamb/mnist --records=DIR --index=0/8
  python -m lamb_tpu.reproduce commands lamb/table1 --data=DATA
  python -m lamb_tpu.reproduce commands lamb/table1 --topology=v3-1024
  python -m lamb_tpu.reproduce adopt gs-copy/bert_32k
  python -m lamb_tpu.reproduce report --html=site

A killed run resumes. A measured cell is repeated only if its config changes.
DATA has one folder per data set, such as mnist; `commands` lists them with the
commands that create them. Without DATA, data sets are downloaded if possible.
--scale=smoke needs no data. `run` also accepts config keys that change no
result, such as --config.checkpoint.every="5 epochs".
"""


def _parse(arguments: list[str]) -> argparse.Namespace:
    # Separate config flags, like other commands; argparse would need to know every key.
    changed = [argument for argument in arguments if argument.startswith("--config.")]
    arguments = [argument for argument in arguments if argument not in changed]
    parser = terminal.Parser(
        prog="python -m lamb_tpu.reproduce",
        epilog=_EXAMPLES,
        description=(__doc__ or "").partition("\n")[0],
    )
    types = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_options) in _COMMANDS.items():
        command = types.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        papers = "folder of the papers' tables (default: those of the package)"
        command.option("--papers=DIR", papers)
        trust = (
            "let tables of DIR name any recipe file and any custom code, which "
            "can run any program; use it only if you trust the author of DIR"
        )
        command.option("--trust-papers", trust, action="store_true")
        add_options(command)
        command.set_defaults(tables=[], records=None)
    options = parser.parse_all(arguments)
    if changed and options.command != "run":
        raise UserError(
            changed[0], ..., f"is an option of run, not of {options.command}", "leave it out"
        )
    options.changed = changed
    return options


def _show_options(show: terminal.Parser) -> None:
    show.add_argument("tables", nargs="+", metavar="TABLE", help="lamb/mnist or lamb, for example")
    _add_records(show)


def _run_options(run: terminal.Parser) -> None:
    _show_options(run)
    _add_cells(run, "small")
    text = "seeds 0 to N-1 (default: the number that the table requests)"
    run.option("--seeds=N", text, type=terminal.count(1, limits.MAX_SEEDS))
    text = "folder of the workdirs; may be gs://... (default: %(default)s)"
    run.option("--runs=DIR", text, default="runs/reproduce")
    run.option(
        "--index=I/N",
        "train only the runs of job I (from 0) of an array of N cluster jobs; "
        "with --records=DIR its records go to DIR/index-I-of-N",
    )
    text = "number of concurrent runs, which share the cores (default: 1)"
    run.option("--processes=N", text, type=terminal.count(1, limits.MAX_PROCESSES), default=1)
    text = (
        "train the seeds of a cell in one program; for networks too small to "
        "use an accelerator well"
    )
    run.option("--together", text, action="store_true")
    text = (
        "first search N learning rates per cell, then measure each cell with its "
        "best; the records are stored beside the table's other records"
    )
    run.option("--tune=N", text, type=terminal.count(2, limits.MAX_TRIALS))
    run.option("--time-limit=TIME", "save and stop after this time, such as 90m or 2h")
    run.option(
        "--budget=TIME",
        "train only runs that are estimated to fit into this time, the most "
        "informative first, with frequent checkpoints; for a borrowed machine",
    )
    run.option("--carry=FILE", "also write the records into FILE, for `adopt` on another machine")
    run.option("--dry-run", "only list the runs", action="store_true")


def _commands_options(commands: terminal.Parser) -> None:
    commands.add_argument("tables", nargs="+", metavar="TABLE")
    _add_cells(commands, "paper")
    text = "print launches on a TPU slice, such as v3-1024; --data is then a bucket folder"
    commands.option("--topology=NAME", text)


def _adopt_options(adopt: terminal.Parser) -> None:
    text = (
        "workdir of a finished run, a file written by `run --carry`, or the folder "
        "of `run --records`, including its array jobs"
    )
    adopt.add_argument("path", metavar="PATH", help=text)


def _report_options(report: terminal.Parser) -> None:
    _add_records(report)
    report.add_argument("tables", nargs="*", metavar="TABLE", help="only these (default: all)")
    text = "folder of the Markdown pages and figures (default: report in the folder of the papers)"
    report.option("--output=DIR", text)
    report.option("--html=DIR", "also write the pages as an HTML site to DIR")


def _add_records(command: terminal.Parser) -> None:
    text = "folder of your records; may be gs://... (default: the records beside the tables)"
    command.option("--records=DIR", text)


def _add_cells(command: terminal.Parser, scale: str) -> None:
    text = f"size of the runs (default: {scale}, or another scale of the table)"
    command.option("--scale=smoke|small|paper", text)
    command.option("--cells=NAMES", "comma-separated (default: all)")
    text = "folder that contains the data sets' folders, which `commands` lists"
    command.option("--data=DIR", text)


# Each command, its description, and the function that adds its options.
_COMMANDS: dict[str, tuple[str, Callable[[terminal.Parser], None]]] = {
    "list": ("list papers and tables, and how many cells are measured", lambda _: None),
    "show": ("print the paper's values beside the measured ones", _show_options),
    "run": ("train missing and stale runs", _run_options),
    "commands": ("print the commands that train each cell", _commands_options),
    "adopt": ("add finished runs of other machines to their cells", _adopt_options),
    "report": ("write pages with all results", _report_options),
}


def main(options: argparse.Namespace) -> None:
    """Runs the command that the options select."""
    # Import late, here and below: --help needs neither JAX nor Matplotlib.
    from lamb_tpu.reproduce import adopting, choosing, commands, loading, showing

    papers = loading.folder() if options.papers is None else pathlib.Path(options.papers)
    tables = loading.load_all(papers.expanduser().absolute(), options.trust_papers)
    chosen = (
        choosing.choose_tables(tables, options.tables) if options.tables else [*tables.values()]
    )
    records = None if options.records is None else _path(options.records, "--records")
    if options.command == "list":
        showing.show_list(tables)
    elif options.command == "adopt":
        for line in adopting.take(tables, _path(options.path, "PATH")):
            print(line)
    elif options.command == "report":
        _report(options, chosen, papers, records)
    elif options.command == "show":
        showing.show(chosen, records)
    elif options.command == "commands":
        commands.show(chosen, options.scale, options.cells, options.data, options.topology)
    else:
        _run(options, chosen, records)


def _run(
    options: argparse.Namespace, chosen: Sequence[Table], records: pathlib.Path | None
) -> None:
    from lamb_tpu.reproduce import arrays, jobs, running

    request = running.TableRequest(
        scale=options.scale,
        cells=options.cells,
        seeds=options.seeds,
        runs=_path(options.runs, "--runs"),
        data=options.data and buckets.local(options.data, "--data").absolute(),
        processes=options.processes,
        time_limit=cli.seconds("--time-limit", options.time_limit),
        dry_run=options.dry_run,
        records=records,
        tune=options.tune,
        budget=cli.seconds("--budget", options.budget),
        carry=options.carry and buckets.local(options.carry, "--carry"),
        index=options.index and arrays.parse(options.index),
        changed=jobs.free_values(options.changed),
        together=options.together,
    )
    running.run(chosen, request)


def _report(
    options: argparse.Namespace,
    chosen: Sequence[Table],
    papers: pathlib.Path,
    records: pathlib.Path | None,
) -> None:
    from lamb_tpu.reproduce import loading
    from lamb_tpu.reproduce.report import site

    output = papers / "report"
    if options.output is None and options.papers is None and loading.is_installed():
        raise UserError(
            "--output",
            problem="is missing, and the default is in the installed package",
            remedy="give a folder, such as --output=report",
        )
    if options.output is not None:
        output = writing.check_folder(options.output, "--output")
    html = options.html and writing.check_folder(options.html, "--html")
    # The overview beside the tables covers all tables and their shipped records.
    is_full = not options.tables and options.output is None and records is None
    written = site.write(
        {table.key: table for table in chosen},
        output,
        html,
        records,
        papers if is_full else None,
        # The index beside the tables lists all of them.
        index=not options.tables or options.output is not None,
        start=papers.parent / "README.md" if is_full and options.papers is None else None,
    )
    if options.tables:  # print the pages that the user asked for
        print("\n".join(map(str, written)))


def _path(text: str, key: str) -> pathlib.Path:
    """Returns the path that `text` names, on a local disk or in a bucket."""
    return buckets.parse(text, key) if buckets.is_remote(text) else buckets.local(text, key)


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # absl must not parse them
    cli.run_main(lambda: main(_parse(given)))
