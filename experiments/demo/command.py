"""The command line of the demo's programs: their flags, one CPU device, one compilation cache."""

import pathlib
import tempfile
from collections.abc import Callable

import jax
from absl import flags

from lamb_tpu import cli

HERE = pathlib.Path(__file__).resolve().parent
RUNS = HERE.parents[1] / "runs"


def define_flags(out: str, seeds: int) -> None:
    """Defines --out, the folder of the results, and --seeds, with these defaults; and --write."""
    flags.disclaim_key_flags()  # they are the program's: its --help shows them
    flags.DEFINE_string(
        "out",
        str(RUNS / out),
        "Folder of the results. Runs that it already holds are not repeated.",
    )
    flags.DEFINE_integer("seeds", seeds, "Runs of each setting.", lower_bound=1)
    flags.DEFINE_bool("write", False, "Keep the records, and draw README.md anew, in this folder.")


def out_folder() -> pathlib.Path:
    """The folder that --out names."""
    return pathlib.Path(flags.FLAGS.out).expanduser().absolute()


def run_main(main: Callable[[], None]) -> None:
    """`cli.run_main` on one CPU device, with what was compiled shared by runs of other seeds."""

    def run() -> None:
        # The networks are tiny, and a full batch of 1,437 divides over no other number of devices.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        with tempfile.TemporaryDirectory(prefix="lamb_tpu_demo_") as cache:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            main()

    cli.run_main(run)
