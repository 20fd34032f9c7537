"""Processes that differ: each difference is reported before the first update."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.cluster import agreement, distributed
from lamb_tpu.data import ArraySource
from lamb_tpu.run import identity
from tests import hosts, tiny

ARGUMENTS = (
    "--config=digits",
    "--config.duration=2 steps",
    "--config.batch_size=96",
    "--config.checkpoint.every=100 percent",
    "--config.eval.every=100 percent",
    "--config.log.tensorboard=False",
)
# A data set that may differ between processes, and a network.
MODULES = {
    "my_data.py": """
import os
import numpy as np
from lamb_tpu.data import ArraySource

def points(split: str):
    state = os.environ.get("STATE", "")
    if state == "absent":
        raise OSError("the disk of this host is not mounted")
    labels = np.arange(960 if state == "shorter" else 1024, dtype=np.int32) % 10
    labels[512] += state == "other label"
    images = np.random.default_rng(0).uniform(size=(len(labels), 8, 8, 1))
    return ArraySource(f"points:{split}", {"image": images.astype(np.float32), "label": labels}, 10)
""",
    "my_helper.py": "WIDTH = 16\n",
    "my_net.py": """
import flax.linen as nn
import my_helper

class Net(nn.Module):
    @nn.compact
    def __call__(self, inputs, train):
        x = nn.relu(nn.Dense(my_helper.WIDTH)(inputs.reshape(len(inputs), -1)))
        return nn.Dense(10)(x)
""",
}
CUSTOM_NET = ("--config.model={'name': 'my_net:Net'}",)
CUSTOM_DATA = (
    "--config.data.name=my_data:points",
    "--config.data.train_split=train",
    "--config.data.eval_split=test",
    "--config.task.input_std=1.0",
)


def write(folder: pathlib.Path, changes: dict[str, str] | None = None) -> str:
    folder.mkdir()
    for name, text in (MODULES | (changes or {})).items():
        (folder / name).write_text(text)
    return str(folder)


def process(folder: str, *flags: str, **more: Any) -> dict[str, Any]:
    """Describes a process that trains; of several flags with the same name, the last counts."""
    chosen = {flag.partition("=")[0]: flag for flag in (*ARGUMENTS, *flags)}
    actual = {"argv": ["lamb_tpu.train", *chosen.values()], "env": {}, "cwd": folder}
    return actual | {"fresh": False} | more


def run(folder: pathlib.Path, runs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Starts the processes of several runs; returns the outcome of each process of each run."""
    file = folder / "runs.json"
    file.write_text(json.dumps(runs))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", hosts.__name__, str(file)],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tiny.ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def errors(outcome: list[dict[str, Any]]) -> list[str]:
    """Returns the error of each process after asserting exit status 2."""
    actual = []
    for each in outcome:
        lines = [line for line in each["stderr"].splitlines() if "Gloo" not in line]
        assert each["status"] == 2 and len(lines) == 1, each
        assert "update" not in each["stdout"]
        actual.append(lines[0])
    return actual


def test_another_rate_on_one_of_three_processes(tmp_path: pathlib.Path) -> None:
    folder, workdir = write(tmp_path / "here"), f"--workdir={tmp_path}/run"
    plain = process(folder, workdir)
    other = process(folder, workdir, "--config.optimizer.learning_rate=0.05")
    (outcome,) = run(tmp_path, [[plain, other, plain]])
    (actual,) = set(errors(outcome))
    host = distributed.socket.gethostname()
    assert actual.startswith(
        f"error: config.optimizer.learning_rate is 0.05 on process 1 (host {host}) and "
    )
    assert actual.endswith(
        f" on processes 0 (host {host}) and 2 (host {host}); start all processes with the same "
        "command"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_every_difference_is_rejected_before_the_first_update(tmp_path: pathlib.Path) -> None:
    here, workdir = write(tmp_path / "here"), f"--workdir={tmp_path}/run"
    stale = tmp_path / "here" / "stale.py"
    shutil.copy(tiny.ROOT / "configs" / "digits.py", tmp_path / "here" / "recipe.py")
    stale.write_text(
        "import runpy\n\ndef get_config(argument=None):\n"
        f"    config = runpy.run_path({str(tmp_path / 'here' / 'recipe.py')!r})['get_config']()\n"
        "    config.schedule.warmup = '2 epochs'\n    return config\n"
    )
    package = tmp_path / "package"
    shutil.copytree(
        tiny.ROOT / "lamb_tpu", package / "lamb_tpu", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(tiny.ROOT / "configs", package / "configs")
    lamb = package / "lamb_tpu" / "optim" / "lamb.py"
    lamb.write_text(lamb.read_text() + "\n# changed\n")
    other_net = write(tmp_path / "there", {"my_net.py": MODULES["my_net.py"] + "# changed\n"})
    other_helper = write(tmp_path / "elsewhere", {"my_helper.py": "WIDTH = 16  # changed\n"})

    def changed(
        *flags: str, common: tuple[str, ...] = (), folder: str = here, **more: Any
    ) -> list[dict[str, Any]]:
        """Describes three processes with `common` flags; the second process has the given differences."""
        plain = process(here, workdir, *common)
        return [plain, process(folder, workdir, *common, *flags, **more), plain]

    def with_state(state: str) -> list[dict[str, Any]]:
        return changed(common=CUSTOM_DATA, env={"STATE": state})

    cases = {
        "recipe": (changed(f"--config={stale}"), 'config.schedule.warmup is "2 epochs" on process'),
        "seed": (changed("--config.seed=7"), "config.seed is 7 on process 1"),
        "batch": (changed("--config.batch_size=192"), "config.batch_size is 192 on process 1"),
        "duration": (
            changed("--config.duration=3 steps"),
            'config.duration is "3 steps" on process 1',
        ),
        "workdir": (changed(f"--workdir={tmp_path}/other"), f"--workdir is {tmp_path}/other on"),
        "package": (
            changed(fresh=True, env={"PYTHONPATH": str(package)}),
            "the file lamb_tpu/optim/lamb.py of lamb_tpu is ",
        ),
        "setting": (
            changed(fresh=True, env={"JAX_ENABLE_X64": "1"}),
            "the setting jax_enable_x64 is True on process 1",
        ),
        "length": (with_state("shorter"), "the length of the training set is 960 on process 1"),
        "label": (
            with_state("other label"),
            "examples (SHA-256 of 'label') of the training set is ",
        ),
        "absent": (with_state("absent"), "config.data.name='my_data:points' cannot be built"),
        "module": (changed(common=CUSTOM_NET, folder=other_net), "the custom module my_net is "),
        "helper": (
            changed(common=CUSTOM_NET, folder=other_helper),
            "the custom module my_helper is ",
        ),
    }
    outcomes = run(tmp_path, [started for started, _ in cases.values()])
    for (name, (_, message)), outcome in zip(cases.items(), outcomes, strict=True):
        actual = {line.replace("error: process 1: ", "error: ") for line in errors(outcome)}
        assert len(actual) == 1, (name, actual)
        assert actual.pop().startswith(f"error: {message}"), (name, outcome)
        assert not (tmp_path / "run" / "metrics.jsonl").exists(), name
    # Equal processes train, and evaluate; processes that evaluate different steps are rejected.
    plain = process(here, workdir, *CUSTOM_NET, *CUSTOM_DATA)
    evaluate = ["lamb_tpu.evaluate", workdir]
    differing = [process(here, argv=evaluate), process(here, argv=[*evaluate, "--step=1"])]
    trained, evaluated, rejected = run(
        tmp_path, [[plain] * 3, [process(here, argv=evaluate)] * 2, differing]
    )
    assert [each["status"] for each in (*trained, *evaluated)] == [0] * 5, trained
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert {line.partition(";")[0].partition(" on ")[0] for line in errors(rejected)} == {
        "error: --step is 1"
    }


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Returns a list that collects the values that this process compares, as one of three processes."""
    actual: list[dict[str, str]] = []
    monkeypatch.setattr(distributed, "index_and_count", lambda: (1, 3))
    monkeypatch.setattr(agreement, "compare", lambda values, remedy: actual.append(dict(values)))
    return actual


def test_start(compared: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/a --xla_cpu_enable_fast_math=true")
    config = tiny.change(tiny.digits(), {"task.name": "my_absent:Task", "data.name": "tfds:a"})
    identity.check_start(config, "runs/x", {"--step": 3})
    (values,) = compared
    for key, value in {
        "config.optimizer.learning_rate": "0.02",
        "config.model.hidden_sizes": "[16]",
        "--workdir": "/runs/x",
        "--step": "3",
        "the version of jax": jax.__version__,
        "the environment variable XLA_FLAGS": "'--xla_cpu_enable_fast_math=true'",
        "the setting jax_enable_x64": "False",
    }.items():
        assert values[key] == value
    files = {path for path in values if path.startswith("the file ")}
    assert "the file lamb_tpu/run/identity.py of lamb_tpu" in files
    assert not [key for key in values if "custom module" in key]
    # An invalid value is compared like a valid value: an error in only one process would block the
    # other processes.
    identity.check_start(tiny.change(config, {"seed": {1}}), "gs://bucket/x")
    assert "config.seed={1}" in compared[1]["config.*"]
    assert compared[1]["--workdir"] == "gs://bucket/x"


def test_set(compared: list[dict[str, str]]) -> None:
    def points(change: int, length: int = 100) -> ArraySource:
        label = np.arange(length, dtype=np.int32)
        label[-1] += change
        return ArraySource("points:train", {"label": label}, 10)

    for source in (points(0), points(0), points(1), points(0, 101)):
        identity.check_data(points(0), source)
    first, same, other, longer = compared
    assert first == same
    assert {key for key in first if first[key] != other[key]} == {
        "examples (SHA-256 of 'label') of the evaluation set"
    }
    assert longer["the length of the evaluation set"] == "101"


@pytest.mark.parametrize(
    "key, remedy",
    [
        ("the version of lamb_tpu", "install the same version on every host"),
        ("the file lamb_tpu/custom.py of lamb_tpu", "install the same version on every host"),
        ("the version of jax", "install the same versions on every host"),
        ("the setting jax_enable_x64", "start all processes in the same environment"),
        ("the environment variable XLA_FLAGS", "start all processes in the same environment"),
        ("the custom module my_net", "copy the same file to every host"),
        ("the length of the evaluation set", "give every process the same data"),
        ("config.seed", "start all processes with the same command"),
        ("--workdir", "start all processes with the same command"),
    ],
)
def test_remedy(key: str, remedy: str) -> None:
    assert identity._remedy(key) == remedy
