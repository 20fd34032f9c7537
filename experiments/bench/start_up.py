"""Time from the start of a process to its first update, for the smoke variant of each recipe.

  python -m experiments.bench.start_up --write

Each recipe is started three times, each time in a process of its own: without a compilation cache,
with an empty one, which this start fills, and with the full one. The parts are those of the first.
Evaluation and checkpoints are left out; of phases the first is measured.
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
from lamb_tpu.cluster.host import num_cores, processor
from lamb_tpu.data import TrainLoader
from lamb_tpu.run import phases
from lamb_tpu.run.build import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")
PARTS = ("imports", "data", "initial state", "tracing", "compiling", "first update")


def start(recipe: str, spawned: float) -> dict[str, float]:
    """Returns the seconds of each part of a start in this process.

    Args:
      recipe: name of a file in configs.
      spawned: `time.time()` when the process was started.
    """
    marks = [spawned, time.time()]
    whole = importlib.import_module(f"configs.{recipe}").get_config("smoke")
    config = phases.split(whole)[0].config
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
    return {part: b - a for part, a, b in zip(PARTS, marks, marks[1:])}


def measure(recipe: str, cache: str | None) -> dict[str, float]:
    """Returns what `start` does in a new process, with its compilation cache in this folder."""
    changed = {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, f"--start={recipe}", f"--spawned={time.time()!r}"],
        env=environment | changed,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(recipe: str, plain: dict[str, float], filling: float, full: float) -> str:
    """Returns a line of the table."""
    numbers = [*(plain[part] for part in PARTS), sum(plain.values()), filling, full]
    return f"| {recipe} | {' | '.join(f'{number:.1f}' for number in numbers)} |"


def main() -> None:
    """Measures every recipe, prints the table and writes it if asked."""
    values = flags.FLAGS
    if values.start:
        print(json.dumps(start(values.start, values.spawned)))
        return
    lines = [
        f"Seconds to the first update, smoke variants: jax {jax.__version__}, {processor()}, "
        f"{num_cores()} core(s). One start each.",
        "Command: `python -m experiments.bench.start_up --write`",
        "",
        f"| recipe | {' | '.join(PARTS)} | all | filling a cache | with it |",
        f"|---|{'--:|' * (len(PARTS) + 3)}",
    ]
    print("\n".join(lines), flush=True)
    for recipe in values.recipes or RECIPES:
        with tempfile.TemporaryDirectory(prefix="lamb_tpu_start_up_") as cache:
            plain, *others = (measure(recipe, folder) for folder in (None, cache, cache))
        lines.append(row(recipe, plain, *(sum(parts.values()) for parts in others)))
        print(lines[-1], flush=True)
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    flags.DEFINE_multi_enum("recipes", [], RECIPES, "Those to measure; default all.")
    flags.DEFINE_bool("write", False, "Whether to write start_up.md beside this file.")
    flags.DEFINE_enum("start", None, RECIPES, "For the program itself: one start in this process.")
    flags.DEFINE_float("spawned", 0.0, "For the program itself: the time of its start.")
    cli.run_main(main)
