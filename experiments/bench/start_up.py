"""Time from the start of a process to its first update, for each recipe's smoke variant.

  python -m experiments.bench.start_up --write

Each recipe starts three times, each time in a new process: without a compilation cache, with an empty
cache, and with the cache that the second start has filled. The stages are timed in the first start.
Evaluation and checkpoints are excluded. For recipes with phases, the first phase is measured.
"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
from absl import flags

from lamb_tpu import cli
from lamb_tpu.cluster import children
from lamb_tpu.cluster.host import num_cores, processor
from lamb_tpu.data import TrainLoader
from lamb_tpu.run import phases
from lamb_tpu.run.build import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")
STAGES = ("imports", "data", "initial state", "tracing", "compiling", "first update")


def start(recipe: str, spawned: float) -> dict[str, float]:
    """Starts a recipe in this process, and returns the seconds of each of `STAGES`.

    Args:
      recipe: name of a file in configs.
      spawned: `time.time()` when the process was started.
    """
    marks = [spawned, time.time()]
    smoke = importlib.import_module(f"configs.{recipe}").get_config("smoke")
    config = phases.split(smoke)[0].config
    run = prepare(config, None)
    loader = TrainLoader(run.train_set, run.recipe.batch_size, config.seed, run.local_rows())
    marks.append(time.time())
    state = jax.block_until_ready(run.first_state())
    marks.append(time.time())
    step = run.make_train_step()
    lowered = step.lower(run.abstract_state, run.abstract_batch())
    marks.append(time.time())
    lowered.compile()
    marks.append(time.time())
    jax.block_until_ready(step(state, run.shard_batch(next(loader))))
    marks.append(time.time())
    return {stage: b - a for stage, a, b in zip(STAGES, marks, marks[1:])}


def measure(recipe: str, cache: str | None) -> dict[str, float]:
    """Returns the result of `start` in a new process; `cache` is the folder of its compilation cache."""
    changed = {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, f"--start={recipe}", f"--spawned={time.time()!r}"],
        env=environment | changed,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=children.following(),
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(recipe: str, plain: dict[str, float], filling: float, full: float) -> str:
    """Returns a line of the table."""
    numbers = [*(plain[stage] for stage in STAGES), sum(plain.values()), filling, full]
    return f"| {recipe} | {' | '.join(f'{number:.1f}' for number in numbers)} |"


def main() -> None:
    """Measures every recipe, prints the table, and writes it if --write is given."""
    values = flags.FLAGS
    if values.start:
        print(json.dumps(start(values.start, values.spawned)))
        return
    lines = [
        f"Seconds from the start of a process to the first update, for the recipes' smoke variants: "
        f"jax {jax.__version__}, {processor()}, {num_cores()} core(s). Each recipe starts once without a "
        "compilation cache, once filling a cache, and once with the filled cache. The stages and `total` "
        "are those of the first start; the last two columns are the totals of the other starts.",
        "Command: `python -m experiments.bench.start_up --write`",
        "",
        f"| recipe | {' | '.join(STAGES)} | total | filling a cache | with the cache |",
        f"|---|{'--:|' * (len(STAGES) + 3)}",
    ]
    print("\n".join(lines), flush=True)
    for recipe in values.recipes or RECIPES:
        with tempfile.TemporaryDirectory(prefix="lamb_tpu_start_up_") as cache:
            plain, *others = (measure(recipe, folder) for folder in (None, cache, cache))
        lines.append(row(recipe, plain, *(sum(stages.values()) for stages in others)))
        print(lines[-1], flush=True)
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    flags.DEFINE_multi_enum("recipes", [], RECIPES, "Recipes to measure (default: all).")
    flags.DEFINE_bool("write", False, "Whether to write start_up.md beside this file.")
    flags.DEFINE_enum("start", None, RECIPES, "Internal: one start in this process.")
    flags.DEFINE_float("spawned", 0.0, "Internal: time.time() at the start of the process.")
    cli.run_main(main)
