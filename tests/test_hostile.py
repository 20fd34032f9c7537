"""Bad inputs of many kinds through the real command lines: each is one sentence, within seconds."""

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
SECONDS = 40  # far from an endless one, also on a busy machine
DEEP = "[" * 200_000 + "]" * 200_000
FOLDER, PIPE, ZERO, LOOP = "FOLDER", "PIPE", "ZERO", "LOOP"
LAYERS = (
    json.dumps(
        {"step": 1, "kind": "layers", "ratios/a": 1.0, "weight_norms/a": 1.0, "update_norms/a": 1.0}
    )
    + "\n"
)
# Of a run whose layers can be drawn.
DRAWN = {
    "metrics.jsonl": LAYERS,
    "parameters.txt": "path  shape  dtype  count  decay  adapt\na  3  float32  3  yes  yes\n",
    "config.json": json.dumps(
        {
            "optimizer.name": "lamb",
            "model.name": "mlp",
            "data.name": "digits",
            "batch_size": 8,
            "duration": "1 epochs",
        }
    ),
}


class Case(NamedTuple):
    """A command line.

    Attributes:
      message: what the sentence has to say.
      module: after lamb_tpu.
      arguments: '@' in them stands for a folder of the case's own.
      files: what is in that folder: text, or one of the kinds above.
    """

    message: str
    module: str
    arguments: list[str]
    files: dict[str, str] = {}


def train(message: str, *arguments: str, recipe: str | None = None, **files: str) -> Case:
    """Training, by a recipe of its own where its text is given."""
    named = "configs/digits.py" if recipe is None else "@/recipe.py"
    files = {name.replace("__", "."): text for name, text in files.items()}
    files |= {} if recipe is None else {"../recipe.py": recipe}
    given = [a for a in arguments if a.startswith("--workdir")] or ["--workdir=@/run"]
    rest = [a for a in arguments if not a.startswith("--workdir")]
    files = {name[3:] if name.startswith("../") else f"run/{name}": x for name, x in files.items()}
    return Case(message, "train", [f"--config={named}", *given, *rest], files)


def returns(value: str) -> str:
    return f"def get_config(argument=None):\n    {value}\n"


# A run's, and that of a folder as Hugging Face has it, but for the weights.
DEEP_BERT = flatten(tiny.bert()) | {"model.num_layers": 2 * 10**9}
BERT = {"model_type": "bert", "hidden_act": "gelu", "num_hidden_layers": 2 * 10**9}

CASES = {
    # Numbers.
    "batch": train("100,000,000,000 examples of a batch need", "--config.batch_size=100000000000"),
    "batch over all": train("examples of a batch need", f"--config.batch_size={10**30}"),
    "duration": train(
        "config.duration: a duration must be at most 1e+18 epochs", "--config.duration=1e30 epochs"
    ),
    "duration in digits": train(
        "config.duration: '1e999999999 epochs' is not a duration",
        "--config.duration=1e999999999 epochs",
    ),
    "updates": train(
        "is 1,000,000,000 updates of 32 examples; a run has at most 100,000,000",
        "--config.duration=1e9 steps",
    ),
    "warm-up": train(
        "config.schedule.warmup: a duration must be at most",
        "--config.schedule.warmup=1e400 epochs",
    ),
    "interval": train("config.eval.every: a duration", "--config.eval.every=1e300 steps"),
    "first step": train("; it must be below 2147483648", f"--config.schedule.first_step={10**40}"),
    "splits": train("split 'train+train", f"--config.data.train_split={'train+' * 5000}train"),
    "vocabulary": Case(
        "0 must be below 2147483648",
        "data.prepare_text",
        ["--input=README.md", f"--train-vocab={10**30}", "--output=@/x"],
    ),
    "width": train(
        "need 8,381.9 GiB on the 1 device(s) of this machine, which has ",
        "--config.model.hidden_sizes=(10000000000,)",
    ),
    "width over all": train(
        "the model's parameters and optimizer state need ",
        f"--config.model.hidden_sizes=({10**30},)",
    ),
    # Config files.
    "returns nothing": train(
        "recipe.py returns None; it must return a ConfigDict", recipe=returns("pass")
    ),
    "nothing, overridden": train(
        "returns None; it must", "--config.batch_size=3", recipe=returns("pass")
    ),
    "returns a number": train("recipe.py returns 3; it must return", recipe=returns("return 3")),
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
        "'configs', which does not exist", "train", ["--config=configs", "--workdir=@/run"]
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
    "workdir in bytes": train("is not UTF-8; give a folder", "--workdir=@/\udcff"),
    "workdir empty": train("--workdir is missing", "--workdir="),
    "evaluated file": Case(
        "@/x is no folder; give the folder of a run", "evaluate", ["--workdir=@/x"], {"x": ""}
    ),
    "evaluated nothing": Case("holds no run: config.json is missing", "evaluate", ["--workdir=@"]),
    "exported file": Case(
        "@/x is a file, which is read for config.model.name of",
        "export",
        ["--workdir=@/x", "--output=@/out"],
        {"x": ""},
    ),
    "predicted file": Case(
        "@/x is a file, which is read for",
        "predict",
        ["--checkpoint=@/x", "--text=[MASK]"],
        {"x": ""},
    ),
    "init_from empty": train(
        "config.init_from is empty; give a path, or leave it out for none", "--config.init_from="
    ),
    "data.dir empty": train("config.data.dir is empty; give a path", "--config.data.dir="),
    "prepared_dir empty": train("config.data.prepared_dir is empty", "--config.data.prepared_dir="),
    "out empty": Case(
        "--out is empty; give a value, or leave it out", "plots", ["--workdir=@", "--out="]
    ),
    "output empty": Case("--output is missing", "export", ["--workdir=@", "--output="]),
    "split empty": Case("--split is empty", "evaluate", ["--workdir=@", "--split="]),
    "init_from a device": train("/dev/zero', which is no folder", "--config.init_from=/dev/zero"),
    # What cannot be written.
    "plot nowhere": Case(
        "--out /proc/x.png cannot be written (",
        "plots",
        ["--workdir=@", "--out=/proc/x.png"],
        DRAWN,
    ),
    "plot over a folder": Case(
        "x.png cannot be written (Is a directory); give another",
        "plots",
        ["--workdir=@", "--out=@/x.png"],
        DRAWN | {"x.png": FOLDER},
    ),
    "text nowhere": Case(
        "--output /proc/x cannot be written (No such file",
        "data.prepare_text",
        ["--input=README.md", "--train-vocab=300", "--output=/proc/x"],
    ),
    "text over a file": Case(
        "is a file; it must be a folder",
        "data.prepare_text",
        ["--input=README.md", "--train-vocab=300", "--output=@/x"],
        {"x": "y"},
    ),
    "text empty": Case(
        "--output is empty",
        "data.prepare_text",
        ["--input=README.md", "--train-vocab=300", "--output="],
    ),
    "log folder is a file": Case(
        "cannot be written (File exists)", "launch", ["local", "--", "--workdir=@"], {"logs": ""}
    ),
    # Files of a run.
    "config.json deep": train("config.json is damaged (it is nested too deep)", config__json=DEEP),
    "config.json list": train("damaged (it is not a JSON object)", config__json="[1]"),
    "config.json digits": train("damaged (Exceeds the limit", config__json="1" * 5000),
    "config.json nested": Case(
        "damaged (its keys are not those of a config)",
        "evaluate",
        ["--workdir=@"],
        {"config.json": '{"model.name": {"a": 1}}'},
    ),
    "config.json sections": Case(
        "damaged (its keys",
        "evaluate",
        ["--workdir=@"],
        {"config.json": '{"model": 3, "model.name": "mlp"}'},
    ),
    "config.json kinds": Case(
        "config.model is 3; it must be a ConfigDict",
        "evaluate",
        ["--workdir=@"],
        {"config.json": '{"model": 3}'},
    ),
    "config.json unknown": Case(
        "config.x is unknown", "evaluate", ["--workdir=@"], {"config.json": '{"x": 3}'}
    ),
    "evaluated loop": Case(
        "config.json is damaged (Too many levels of symb",
        "evaluate",
        ["--workdir=@"],
        {"config.json": LOOP},
    ),
    "evaluated pipe": Case(
        "config.json is damaged (it is a pipe, not a file)",
        "evaluate",
        ["--workdir=@"],
        {"config.json": PIPE},
    ),
    "layers": Case(
        "num_layers is 2,000,000,000; it must be at most 10,000",
        "evaluate",
        ["--workdir=@"],
        {"config.json": json.dumps(DEEP_BERT)},
    ),
    "init.json": train("init.json is damaged (its init_from is missing", init__json="{}"),
    "metrics": train("not a JSON object: '3'", metrics__jsonl="3\n"),
    "metrics deep": train("line 1 of ", metrics__jsonl=DEEP + "\n"),
    "plotted folder": Case(
        "metrics.jsonl cannot be read (it is a folder",
        "plots",
        ["--workdir=@"],
        DRAWN | {"metrics.jsonl": FOLDER},
    ),
    "plotted part": Case(
        "records of layers that are not whole (KeyError",
        "plots",
        ["--workdir=@"],
        DRAWN | {"metrics.jsonl": '{"step": 1, "kind": "layers", "ratios/a": 1}\n'},
    ),
    "plotted without a table": Case(
        "parameters.txt cannot be read (No such file",
        "plots",
        ["--workdir=@"],
        {name: DRAWN[name] for name in DRAWN if "param" not in name},
    ),
    "plotted without a config": Case(
        "config.json is of no run, for it has no optimizer.name",
        "plots",
        ["--workdir=@"],
        DRAWN | {"config.json": "{}"},
    ),
    "plotted text": Case(
        "not whole (ValueError: could not convert",
        "plots",
        ["--workdir=@"],
        DRAWN | {"metrics.jsonl": LAYERS.replace("1.0", '"x"')},
    ),
    **{
        f"{name} is {kind}": train(
            f"run: {name} is {told}; move it away, or give another folder",
            **{name.replace(".", "__"): kind},
        )
        for name, kind, told in (
            ("config.json", FOLDER, "a folder, and must be a file"),
            ("config.json", ZERO, "a device, and must be a file"),
            ("metrics.jsonl", PIPE, "a pipe, and must be a file"),
            (
                "metrics.jsonl",
                LOOP,
                "unreadable (Too many levels of symbolic links), and must be a file",
            ),
            (".lock", FOLDER, "a folder, and must be a file"),
            (".lock", PIPE, "a pipe, and must be a file"),
            ("run.jsonl", PIPE, "a pipe, and must be a file"),
            ("parameters.txt", FOLDER, "a folder, and must be a file"),
            ("init.json", PIPE, "a pipe, and must be a file"),
            ("checkpoints", "text", "a file, and must be a folder"),
            ("tensorboard", "text", "a file, and must be a folder"),
        )
    },
    # Data and weights of others.
    "layers of others": train(
        "config.json does not describe a BERT: config.model.num_layers is 2,000,000,000; it must",
        "--config.init_from=@",
        **{"../config.json": json.dumps(BERT), "../model.safetensors": "\x02\0\0\0\0\0\0\0{}"},
    ),
    "weights that are none": train(
        "model.safetensors is no complete safetensors file",
        "--config.init_from=@",
        **{"../config.json": json.dumps(BERT), "../model.safetensors": "x" * 64},
    ),
    "weights that are a folder": train(
        "model.safetensors",
        "--config.init_from=@",
        **{"../config.json": json.dumps(BERT), "../model.safetensors": FOLDER},
    ),
    "weights described deep": train(
        "config.json is not JSON (it is nested too deep)",
        "--config.init_from=@",
        **{"../config.json": DEEP, "../model.safetensors": "x"},
    ),
    "list of pictures with NUL": train(
        "names 1 files that do not lie in",
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
        "train is no prepared text",
        "--config.data.name=masked_lm",
        "--config.data.dir=@",
        **{"../train/manifest.json": DEEP},
    ),
}


def make(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match text:
            case "FOLDER":
                path.mkdir()
            case "PIPE":
                os.mkfifo(path)
            case "ZERO":
                path.symlink_to("/dev/zero")
            case "LOOP":
                path.symlink_to(path)
            case _:
                path.write_text(text)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Status, output, time and folder of every case."""
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
    found = json.loads(listed.read_text())
    return {
        name: outcome | {"folder": str(folders[name])}
        for name, outcome in zip(CASES, found, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_told_in_a_sentence(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    outcome, message = outcomes[name], CASES[name].message.replace("@", outcomes[name]["folder"])
    assert outcome["status"] == 2, outcome
    (line,) = outcome["stderr"].splitlines()
    assert line.startswith("error: ") and message in line
    assert outcome["seconds"] < SECONDS


@pytest.mark.parametrize(
    "module, arguments",
    [
        ("lamb_tpu.train", ["--config=configs/digits.py:smoke", "--workdir=@"]),
        ("lamb_tpu.train", ["--help"]),
    ],
)
def test_full_standard_output(tmp_path: pathlib.Path, module: str, arguments: list[str]) -> None:
    arguments = [argument.replace("@", str(tmp_path / "run")) for argument in arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tiny.ROOT,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode != 0
    assert done.stderr == "error: standard output cannot be written (No space left on device)\n"
