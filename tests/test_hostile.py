"""Tests that bad inputs on real command lines give an error of one sentence within seconds."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from lamb_tpu.config import flatten
from tests import commands, tiny

pytestmark = pytest.mark.long
SECONDS = 40  # a command that takes longer counts as endless, even on a busy machine
DEEP = "[" * 200_000 + "]" * 200_000
FOLDER, PIPE, ZERO, LOOP = "FOLDER", "PIPE", "ZERO", "LOOP"
NORMS = {"ratios/a": 1.0, "weight_norms/a": 1.0, "update_norms/a": 1.0}
LAYERS = json.dumps({"step": 1, "kind": "layers", **NORMS}) + "\n"
TRAINED = '{"step": 1, "kind": "train", "loss": 1.0}\n'
NAMES = {"optimizer.name": "lamb", "model.name": "mlp", "data.name": "digits"}
# The records of a run whose layers can be drawn.
DRAWN = {
    "metrics.jsonl": TRAINED + LAYERS,
    "parameters.txt": "path  shape  dtype  count  decay  adapt\na  3  float32  3  yes  yes\n",
    "config.json": json.dumps(NAMES | {"batch_size": 8, "duration": "1 epochs"}),
}


class Case(NamedTuple):
    """A command line, a part of the expected error message, and the files in the command's folder.

    '@' in the arguments stands for the folder. A file is text, FOLDER, PIPE, ZERO or LOOP.
    """

    message: str
    module: str
    arguments: list[str]
    files: dict[str, str] = {}


def train(message: str, *arguments: str, recipe: str | None = None, **files: str) -> Case:
    """Returns a case of the command train; `recipe` is the content of a recipe file."""
    named = "configs/digits.py" if recipe is None else "@/recipe.py"
    files = {name.replace("__", "."): text for name, text in files.items()}
    files |= {} if recipe is None else {"../recipe.py": recipe}
    given = [a for a in arguments if a.startswith("--workdir")] or ["--workdir=@/run"]
    rest = [a for a in arguments if not a.startswith("--workdir")]
    files = {name[3:] if name.startswith("../") else f"run/{name}": x for name, x in files.items()}
    return Case(message, "train", [f"--config={named}", *given, *rest], files)


def evaluate(message: str, config: str) -> Case:
    """Returns a case of the command evaluate; `config` is the content of config.json."""
    return Case(message, "evaluate", ["--workdir=@"], {"config.json": config})


def plots(message: str, *arguments: str, **files: str) -> Case:
    """Returns a case of the command plots for the files `DRAWN`, some of them replaced by `files`."""
    changed = {name.replace("__", "."): text for name, text in files.items()}
    return Case(message, "plots", ["--workdir=@", *arguments], DRAWN | changed)


def prepare(message: str, *arguments: str, **files: str) -> Case:
    """Returns a case of the command prepare_text."""
    words = ["--input=README.md", "--train-vocab=300", *arguments]
    return Case(message, "data.prepare_text", words, files)


def weights(message: str, config: str, tensors: str) -> Case:
    """Returns a case of training from a Hugging Face folder."""
    files = {"../config.json": config, "../model.safetensors": tensors}
    return train(message, "--config.init_from=@", **files)


def returns(value: str) -> str:
    return f"def get_config(argument=None):\n    {value}\n"


# Configs with too many layers, of a run and of a Hugging Face folder, and a message.
DEEP_BERT = flatten(tiny.bert()) | {"model.num_layers": 2 * 10**9}
NO_CONFIG = "@/x is a file without a config.json, which config.model.name=None needs"
BERT = {"model_type": "bert", "hidden_act": "gelu", "num_hidden_layers": 2 * 10**9}

CASES = {
    # Numbers.
    "batch": train(
        "batch_size=100000000000 is out of range; use at most 2,147,4",
        "--config.batch_size=100000000000",
    ),
    "batch over all": train(
        "000 is out of range; use at most 2,147,483", f"--config.batch_size={10**30}"
    ),
    "duration": train(
        "config.duration: a duration must be at most 1e+18 epochs", "--config.duration=1e30 epochs"
    ),
    "duration in digits": train(
        "config.duration: '1e999999999 epochs' is not a duration",
        "--config.duration=1e999999999 epochs",
    ),
    "updates": train(
        "is 1,000,000,000 updates of 32 examples; use at most 100,000,000 updates",
        "--config.duration=1e9 steps",
    ),
    "warm-up": train(
        "config.schedule.warmup: a duration must be at most",
        "--config.schedule.warmup=1e400 epochs",
    ),
    "interval": train("config.eval.every: a duration", "--config.eval.every=1e300 steps"),
    "first step": train(
        " is out of range; use below 2147483648", f"--config.schedule.first_step={10**40}"
    ),
    "splits": train(
        "data.train_split has 30,005 characters; use at",
        f"--config.data.train_split={'train+' * 5000}train",
    ),
    "vocabulary": prepare(
        "0 is more than 10,000,000, the largest", f"--train-vocab={10**30}", "--output=@/x"
    ),
    "width": train(
        "config.model.hidden_sizes=[10000000000] is out of range; use at most 16,777,216",
        "--config.model.hidden_sizes=(10000000000,)",
    ),
    "width over all": train(
        "000] is out of range; use at most 16,777,216", f"--config.model.hidden_sizes=({10**30},)"
    ),
    # Config files.
    "returns nothing": train(
        "recipe.py: get_config returns None; return a ConfigDict", recipe=returns("pass")
    ),
    "nothing, overridden": train(
        "returns None; return a", "--config.batch_size=3", recipe=returns("pass")
    ),
    "returns a number": train(
        "recipe.py: get_config returns 3; return", recipe=returns("return 3")
    ),
    "returns a dict": train("config.a is unknown", recipe=returns("return {'a': 1}")),
    "exits": train(
        "recipe.py fails at line 2: SystemExit: 3", recipe=returns("raise SystemExit(3)")
    ),
    "exits well": train("fails at line 2: SystemExit", recipe=returns("raise SystemExit")),
    "exits on import": train("fails at line 1: SystemExit", recipe="raise SystemExit"),
    "recursion": train("RecursionError", recipe=returns("return get_config()")),
    "NUL": train("null bytes", recipe="x = 1\0\n"),
    "no function": train("KeyError: get_config", recipe="x = 1\n"),
    "config is a folder": Case(
        "--config='configs' does not exist", "train", ["--config=configs", "--workdir=@/run"]
    ),
    # Paths.
    "workdir is a file": train(
        "cannot be written (File exists)", "--workdir=@/file", **{"../file": "x"}
    ),
    "workdir below a file": train(
        "cannot be written (Not a directory)", "--workdir=@/file/run", **{"../file": "x"}
    ),
    "workdir is a device": train("cannot be written (File exists)", "--workdir=/dev/full"),
    "workdir too long": train("cannot be written (File name too long)", f"--workdir=@/{'x' * 300}"),
    "workdir in bytes": train("is not UTF-8; use UTF-8", "--workdir=@/\udcff"),
    "workdir empty": train("--workdir is missing", "--workdir="),
    "evaluated file": Case(
        "@/x is not a folder; give the folder of a run", "evaluate", ["--workdir=@/x"], {"x": ""}
    ),
    "evaluated nothing": Case("holds no run: config.json is missing", "evaluate", ["--workdir=@"]),
    "exported file": Case(NO_CONFIG, "export", ["--workdir=@/x", "--output=@/out"], {"x": ""}),
    "predicted file": Case(NO_CONFIG, "predict", ["--checkpoint=@/x", "--text=[MASK]"], {"x": ""}),
    "init_from empty": train(
        "config.init_from is empty; give a path, or None", "--config.init_from="
    ),
    "data.dir empty": train("config.data.dir is empty; give a path", "--config.data.dir="),
    "prepared_dir empty": train("config.data.prepared_dir is empty", "--config.data.prepared_dir="),
    "out empty": plots("--out is empty; give a value, or omit the flag", "--out="),
    "output empty": Case("--output is missing", "export", ["--workdir=@", "--output="]),
    "split empty": Case("--split is empty", "evaluate", ["--workdir=@", "--split="]),
    "init_from a device": train("='/dev/zero' is not a folder", "--config.init_from=/dev/zero"),
    # Paths that cannot be written.
    "plot nowhere": plots("--out /proc/x.png cannot be written (", "--out=/proc/x.png"),
    "plot over a folder": plots(
        "x.png is a folder, not a file; give the path of a reg", "--out=@/x.png", x__png=FOLDER
    ),
    "text nowhere": prepare("--output /proc/x cannot be written (No such", "--output=/proc/x"),
    "text over a file": prepare("is a file; use a folder", "--output=@/x", x="y"),
    "text empty": prepare("--output is empty", "--output="),
    "log folder is a file": Case(
        "cannot be written (File exists)", "launch", ["local", "--", "--workdir=@"], {"logs": ""}
    ),
    # Files of a run.
    "config.json deep": train("json is damaged (it is nested too deeply", config__json=DEEP),
    "config.json list": train("damaged (it is not a JSON object)", config__json="[1]"),
    "config.json digits": train("damaged (Exceeds the limit", config__json="1" * 5000),
    "config.json nested": evaluate(
        "damaged (its keys are not those of a config)", '{"model.name": {"a": 1}}'
    ),
    "config.json sections": evaluate("damaged (its keys", '{"model": 3, "model.name": "mlp"}'),
    "config.json kinds": evaluate(
        "config.model=3 is not a section; use a ConfigDict", '{"model": 3}'
    ),
    "config.json unknown": evaluate("config.x is unknown", '{"x": 3}'),
    "evaluated loop": evaluate("config.json is damaged (Too many levels of symb", LOOP),
    "evaluated pipe": evaluate("config.json is damaged (it is a pipe, not a file)", PIPE),
    "layers": evaluate(
        "num_layers=2000000000 is out of range; use at most 1,000", json.dumps(DEEP_BERT)
    ),
    "init.json": train("init.json is damaged (its init_from is missing", init__json="{}"),
    "metrics": train("not a JSON object: '3'", metrics__jsonl="3\n"),
    "metrics deep": train("line 1 of ", metrics__jsonl=DEEP + "\n"),
    "plotted folder": plots("metrics.jsonl cannot be read (it is a folder", metrics__jsonl=FOLDER),
    "plotted part": plots(
        "has damaged records (KeyError",
        metrics__jsonl=TRAINED + '{"step": 1, "kind": "layers", "ratios/a": 1}\n',
    ),
    "plotted without a table": Case(
        "parameters.txt cannot be read (No such file",
        "plots",
        ["--workdir=@"],
        {name: DRAWN[name] for name in DRAWN if "param" not in name},
    ),
    "plotted without a config": plots(
        "config.json has no optimizer.name, so it is not the config of a run", config__json="{}"
    ),
    "plotted text": plots(
        "has damaged records (ValueError: could not",
        metrics__jsonl=TRAINED + LAYERS.replace("1.0", '"x"'),
    ),
    **{
        f"{name} is {kind}": train(
            f"run: {name} is {output}; move it away, or give another folder",
            **{name.replace(".", "__"): kind},
        )
        for name, kind, output in (
            ("config.json", FOLDER, "a folder, not a file"),
            ("config.json", ZERO, "a device, not a file"),
            ("metrics.jsonl", PIPE, "a pipe, not a file"),
            (
                "metrics.jsonl",
                LOOP,
                "an unreadable path (Too many levels of symbolic links), not a file",
            ),
            (".lock", FOLDER, "a folder, not a file"),
            (".lock", PIPE, "a pipe, not a file"),
            ("run.jsonl", PIPE, "a pipe, not a file"),
            ("parameters.txt", FOLDER, "a folder, not a file"),
            ("init.json", PIPE, "a pipe, not a file"),
            ("checkpoints", "text", "a file, not a folder"),
            ("tensorboard", "text", "a file, not a folder"),
        )
    },
    # Foreign data and weights.
    "layers of others": weights(
        "config.json does not describe a BERT: config.model.num_layers=2000000000 is out of",
        json.dumps(BERT),
        "\x02\0\0\0\0\0\0\0{}",
    ),
    "weights that are none": weights(
        "model.safetensors is not a complete safetensors file", json.dumps(BERT), "x" * 64
    ),
    "weights that are a folder": weights("model.safetensors", json.dumps(BERT), FOLDER),
    "weights described deep": weights("config.json is not JSON (it is nested too deep", DEEP, "x"),
    "list of pictures with NUL": train(
        "names 1 file(s) that are not in",
        "--config.data.name=image_folder",
        "--config.data.dir=@",
        **{"../labels.tsv": "file\tlabel\na\0.jpg\t0\n"},
    ),
    "list of pictures is a pipe": Case(
        "labels.tsv cannot be read (it is a pipe",
        "data.images.check",
        ["--dir=@"],
        {"labels.tsv": PIPE},
    ),
    "pictures nowhere": Case("--dir is empty", "data.images.check", ["--dir="]),
    "prepared text deep": train(
        "train/manifest.json cannot be read (it is nested too",
        "--config.data.name=masked_lm",
        "--config.data.dir=@",
        **{"../train/manifest.json": DEEP},
    ),
}


def make(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text == FOLDER:
            path.mkdir()
        elif text == PIPE:
            os.mkfifo(path)
        elif text in (ZERO, LOOP):
            path.symlink_to("/dev/zero" if text == ZERO else path)
        else:
            path.write_text(text)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("hostile")
    lines, folders = [], {}
    for number, (name, case) in enumerate(CASES.items()):
        folder = folders[name] = root / str(number)
        folder.mkdir()
        make(folder, case.files)
        arguments = [argument.replace("@", str(folder)) for argument in case.arguments]
        lines.append([f"lamb_tpu.{case.module}", *arguments])
    listed = root / "lines.json"
    listed.write_text(json.dumps(lines))
    done = subprocess.run(
        [sys.executable, "-m", commands.__name__, str(listed)],
        cwd=tiny.ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    actual = json.loads(listed.read_text())
    return {
        name: outcome | {"folder": str(folders[name])}
        for name, outcome in zip(CASES, actual, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    outcome, message = outcomes[name], CASES[name].message.replace("@", outcomes[name]["folder"])
    assert outcome["status"] == 2, outcome
    (line,) = outcome["stderr"].splitlines()
    assert line.startswith("error: ") and message in line
    assert outcome["seconds"] < SECONDS


@pytest.mark.parametrize(
    "arguments", [["--config=configs/digits.py:smoke", "--workdir=@"], ["--help"]]
)
def test_full_standard_output(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    arguments = [argument.replace("@", str(tmp_path / "run")) for argument in arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lamb_tpu.train", *arguments],
            cwd=tiny.ROOT,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode != 0
    assert done.stderr == "error: standard output cannot be written (No space left on device)\n"
