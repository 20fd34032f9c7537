"""The command line: mistakes in one sentence, overrides, help."""

import json
import os
import pathlib
import signal
import sys

import jax
import pytest

from lamb_tpu import cli, own
from lamb_tpu.cluster import distributed
from lamb_tpu.errors import Preempted, UserError
from tests import tiny

RECIPE = "--config=configs/digits.py"


def refused(module: str, *arguments: str, devices: int = 1) -> str:
    """Runs a command that must fail with one sentence; returns the sentence."""
    done = tiny.command(module, *arguments, devices=devices)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.strip() == line
    return line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            [RECIPE, "--config.optimizer.collekt=True"],
            "config.optimizer.collekt is unknown; optimizer 'lamb' has: name, learning_rate, b1, ",
        ),
        (
            [RECIPE, "--config.optimizer.collect=3"],
            "config.optimizer.collect is '3'; it must be True or False, such as False",
        ),
        (
            [RECIPE, "--config.batchsize=3"],
            "config.batchsize is unknown; config has: accumulation_steps, batch_rule, batch_size, ",
        ),
        (["--config", "configs/digitz.py"], "the file 'configs/digitz.py', which does not exist"),
        (["--config", "digitz"], "which need no folder, are bert_pretrain, bert_squad, cifar"),
        ([RECIPE + ":bath=3"], "'bath=3' has the unknown key 'bath'; known: optimizer, batch"),
        ([RECIPE, "--config.batch_size=abc"], "--config.batch_size=abc: invalid literal for int()"),
        ([], "--config is missing; see --help"),
        # Of schedule.warmup too each phase has its own, of eval.every none.
        (
            [
                "--config=configs/bert_pretrain.py",
                "--config.eval.every=5 percent",
                "--config.phases.phase_1.batch_size=8",
                "--config.schedule.warmup=3 percent",
            ],
            "error: --config.schedule.warmup changes nothing, because every phase of the config "
            "sets it; give --config.phases.phase_1.schedule.warmup and "
            "--config.phases.phase_2.schedule.",
        ),
    ],
)
def test_mistake_on_the_command_line(
    tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    assert message in refused("lamb_tpu.train", f"--workdir={tmp_path / 'run'}", *arguments)
    assert not (tmp_path / "run").exists()


def test_a_section_that_phases_set_in_part_can_be_replaced() -> None:
    """The remedy for a recipe's optimizer, of which each phase sets the rate alone."""
    config = tiny.recipe_file(tiny.ROOT / "configs" / "bert_pretrain.py").get_config("smoke")
    cli._check_phases(["--config.optimizer={'name': 'muon'}"], config)
    with pytest.raises(UserError, match="changes nothing.*phase_1.optimizer.learning_rate"):
        cli._check_phases(["--config.optimizer.learning_rate=0.1"], config)


@pytest.mark.long
def test_workdir_missing_and_stray_words() -> None:
    assert "--workdir is missing; see --help" in refused("lamb_tpu.train", RECIPE)
    assert "unexpected argument 'fast'" in refused("lamb_tpu.train", RECIPE, "--workdir=x", "fast")


@pytest.mark.parametrize(
    "body, message",
    [
        ("config.lerning_rate = 3", 'line 4: AttributeError: \'Key "lerning_rate" does not exist'),
        ("config.batch_size = 'many'", "line 4: TypeError: Could not override field 'batch_size'"),
        ("config.batch_size = (", "line 4: SyntaxError: '(' was never closed"),
    ],
)
def test_mistake_in_a_config_file(tmp_path: pathlib.Path, body: str, message: str) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from lamb_tpu.config import base_config\ndef get_config(argument=None):\n"
        f"    config = base_config()\n    {body}\n    return config\n".replace("\\\n", "\n")
    )
    line = refused("lamb_tpu.train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert f"the config file {file} fails at {message}" in line


@pytest.mark.long
def test_batch_that_does_not_divide_over_simulated_devices(tmp_path: pathlib.Path) -> None:
    line = refused(
        "lamb_tpu.train", RECIPE, "--config.batch_size=36", f"--workdir={tmp_path}", devices=8
    )
    assert "config.batch_size is 36, which does not divide over the 8 devices" in line
    assert "32 or 40 would" in line


@pytest.mark.long
def test_diverged_run_exits_with_a_sentence(tmp_path: pathlib.Path) -> None:
    line = refused(
        "lamb_tpu.train",
        RECIPE + ":optimizer=momentum",
        f"--workdir={tmp_path}",
        "--config.optimizer.learning_rate=1e30",
        "--config.schedule.warmup=0 steps",
        "--config.log.every=1 steps",
        "--config.log.tensorboard=false",
    )
    assert "at update" in line and "the last checkpoint is not yet written" in line


def test_preempted_before_there_is_anything_to_save(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "import os, signal\ndef get_config(argument=None):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = tiny.command("lamb_tpu.train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == os.EX_TEMPFAIL == 75
    assert done.stderr == (
        "preempted; nothing that was saved is lost, start the same command again\n"
    )


@pytest.mark.long
def test_what_a_config_file_leaves_out_is_set_on_the_command_line(tmp_path: pathlib.Path) -> None:
    """From training to evaluation and resuming; a default that is given changes nothing."""
    own = [
        "--config=digits:smoke,batch=512",
        f"--workdir={tmp_path}",
        "--config.optimizer.collect",
        "--config.optimizer.b2",
        "0.98",
        "--config.model.dropout_rate=0.1",
        "--config.task.mixup_alpha=0.2",
    ]
    done = tiny.command("lamb_tpu.train", *own)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["optimizer.collect"] is True and written["optimizer.b2"] == 0.98
    assert (written["model.dropout_rate"], written["task.mixup_alpha"]) == (0.1, 0.2)
    assert '"kind": "layers"' in (tmp_path / "metrics.jsonl").read_text()
    defaults = ["--noconfig.optimizer.cautious", "--config.optimizer.clip_global_norm=None"]
    done = tiny.command("lamb_tpu.evaluate", *own, *defaults)
    assert done.returncode == 0, done.stderr
    line = refused("lamb_tpu.evaluate", *own, "--config.optimizer.b2=0.9")
    assert "(optimizer.b2: 0.98 there, 0.9 now)" in line


@pytest.mark.long
@pytest.mark.parametrize("module", ["train", "evaluate", "plan"])
def test_config_is_shown_instead_of_run(module: str) -> None:
    done = tiny.command(
        f"lamb_tpu.{module}",
        "--config=digits:batch=64",
        "--print_config",
        "--config.optimizer.name=lars",
        "--config.optimizer.momentum=0.95",
        "--config.seed=3",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for line in (
        "config.batch_size = 64",
        "config.optimizer.momentum = 0.95",
        "config.seed = 3",
        "config.optimizer.trust_clip = False  # default of lars",
        "config.model.num_classes = 10  # default of mlp",
    ):
        assert line in lines
    assert "config.seed is -1" in refused(
        f"lamb_tpu.{module}", RECIPE, "--print_config", "--config.seed=-1"
    )


def test_evaluate(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Prints the newest checkpoint's metrics as JSON, and refuses what is not there."""
    file = tmp_path / "recipe.py"
    file.write_text(
        "from tests import tiny\ndef get_config(argument=None):\n    return tiny.digits()\n"
    )
    arguments = [f"--config={file}", f"--workdir={copy}"]
    done = tiny.command("lamb_tpu.evaluate", f"--workdir={copy}", "--step=8")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert metrics["step"] == 8 and 0 < metrics["accuracy"] < 1
    line = refused("lamb_tpu.evaluate", *arguments, "--step=9")
    assert "has no checkpoint of update 9; it has: 4, 8, 12" in line
    line = refused("lamb_tpu.evaluate", *arguments, "--step=last")
    assert "--step is 'last'; it must be a number of updates or 'best'" in line
    empty = refused("lamb_tpu.evaluate", RECIPE, f"--workdir={tmp_path / 'none'}")
    assert "holds no run: config.json is missing" in empty
    assert not (tmp_path / "none").exists()


def test_sigterm_where_an_exception_is_lost() -> None:
    """In a callback of the garbage collector, as JAX has one, Python only prints what is raised."""
    done = tiny.python(
        "import gc, os, signal\n"
        "from lamb_tpu import cli\n"
        "def callback(phase, info):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    sum(range(9))\n"
        "def main():\n"
        "    gc.callbacks.append(callback)\n"
        "    gc.collect()\n"
        "    print('went on')\n"
        "cli.run_main(main)"
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == (
        "preempted; nothing that was saved is lost, start the same command again\n"
    )


def test_help_teaches() -> None:
    done = tiny.command("lamb_tpu.train", "--help")
    for part in (
        "python -m lamb_tpu.train --config=configs/",
        "--workdir",
        "resumed",
        "--config.optimizer.b2=0.98",
    ):
        assert part in done.stdout


def test_libtpu_says_nothing_where_there_is_no_tpu() -> None:
    done = tiny.python(
        "import jax; from lamb_tpu import cli; cli.run_main(lambda: print(jax.devices()))"
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip()


def test_process_that_alone_knows_of_a_preemption_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    left: list[int] = []

    def leave(status: int) -> None:
        left.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "leave", leave)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            cli._end_preempted(signal.SIGTERM, None)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
        with pytest.raises(Preempted, match="start the same command again"):
            cli._end_preempted(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left == [75]
    assert "preempted; nothing that was saved is lost" in capsys.readouterr().err


def test_what_a_system_or_a_lost_process_raises_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    def run(text: str, kind: type[Exception] = jax.errors.JaxRuntimeError) -> str:
        return run_error(kind(text), 1)

    def run_error(error: Exception, status: int = 2) -> str:
        def main() -> None:
            raise error

        with pytest.raises(SystemExit, match=f"^{status}$"):
            cli.run_main(main)
        return capsys.readouterr().err

    monkeypatch.setattr(distributed, "leave", leave)
    # Another test may have imported a module of these tests as a user's own.
    monkeypatch.setattr(own, "_imported", set())
    monkeypatch.setattr(sys, "argv", ["run"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        told = run("UNKNOWN: Gloo all-reduce failed: pair.cc:547\nConnection closed by peer")
        by_value = run("Gloo all-reduce failed: pair.cc:538\nRead error", ValueError)
        other = run("UNKNOWN: something else")
        of_value = run("something else", ValueError)
        memory = run_error(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 8 bytes"))
        of_numpy = run_error(MemoryError("Unable to allocate 7 TiB"))
        full = run_error(OSError(28, "No space left on device", "/there"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.startswith("error: another process of this run has ended") and told.count("\n") == 1
    assert "closed by peer" in told and "Traceback" not in told
    assert by_value.startswith("error: another process of this run") and by_value.count("\n") == 1
    for text in (other, of_value):
        assert "Traceback" in text and "something else" in text
    for text, reason in ((memory, "allocating 8 bytes"), (of_numpy, "allocate 7 TiB")):
        assert text.startswith("error: out of memory (") and text.count("\n") == 1
        assert f"{reason}); make config.batch_size smaller, or config.accumulation" in text
    assert full == "error: '/there': No space left on device\n"


def test_times() -> None:
    assert [cli.seconds("--budget", text) for text in (None, "30s", "1.5h", "90m")] == [
        None,
        30.0,
        5400.0,
        5400.0,
    ]
