"""Tests the command line: errors in one sentence, overrides, signals and help."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import pytest

from lamb_tpu import cli, custom, ending
from lamb_tpu.cluster import distributed, signals
from tests import raising, tiny

RECIPE = "--config=configs/digits.py"
PREEMPTED = "preempted; nothing that was saved is lost, start the same command again\n"


def rejected(module: str, *arguments: str, devices: int = 1) -> str:
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
            "config.optimizer.collect='3' has the wrong type; use True or False, such as False",
        ),
        (
            [RECIPE, "--config.batchsize=3"],
            "config.batchsize is unknown; config has: accumulation_steps, batch_rule, batch_size, ",
        ),
        (["--config", "configs/digitz.py"], "--config='configs/digitz.py' does not exist; give a "),
        (["--config", "digitz"], "one of the shipped recipes bert_pretrain, bert_squad, cif"),
        (
            [RECIPE + ":bath=3"],
            "the config's argument is 'bath', which is unknown; use optimizer, ",
        ),
        ([RECIPE, "--config.batchsize=3"], "; did you mean config.batch_size?"),
        (
            [RECIPE, "--config.batch_size=abc"],
            "config.batch_size='abc' has the wrong type; use a whole number, such as 32",
        ),
        (["--config", "digitz"], "translation; did you mean --config=digits?"),
        ([RECIPE + ":bach=3"], "epochs or smoke; did you mean batch?"),
        (
            [RECIPE, "--num-proceses=2"],
            "--num-proceses is unknown; see --help; did you mean --num-processes?",
        ),
        ([RECIPE, "--num_processes=x"], "flag --num-processes=x: invalid literal for int()"),
        ([], "--config is missing; see --help"),
        # Each phase also sets schedule.warmup; no phase sets eval.every.
        (
            [
                "--config=configs/bert_pretrain.py",
                "--config.eval.every=5 percent",
                "--config.phases.phase_1.batch_size=8",
                "--config.schedule.warmup=3 percent",
            ],
            "error: --config.schedule.warmup has no effect, because every phase of the config "
            "sets it; give --config.phases.phase_1.schedule.warmup and "
            "--config.phases.phase_2.schedule.",
        ),
    ],
)
def test_error_on_the_command_line(
    tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    assert message in rejected("lamb_tpu.train", f"--workdir={tmp_path / 'run'}", *arguments)
    assert not (tmp_path / "run").exists()


def test_a_section_that_phases_set_in_part_can_be_replaced() -> None:
    """A flag can replace a recipe's optimizer, because each phase sets only the optimizer's learning rate."""
    config = tiny.recipe_file(tiny.ROOT / "configs" / "bert_pretrain.py").get_config("smoke")
    cli._check_phases(["--config.optimizer={'name': 'muon'}"], config)
    key, remedy = (
        "--config.optimizer.learning_rate",
        "config.phases.phase_1.optimizer.learning_rate",
    )
    with raising.rejected(key, ..., "has no effect", remedy):
        cli._check_phases(["--config.optimizer.learning_rate=0.1"], config)


def test_workdir_missing_and_stray_words() -> None:
    assert "--workdir is missing; see --help" in rejected("lamb_tpu.train", RECIPE)
    assert "the argument 'fast' is unexpected" in rejected(
        "lamb_tpu.train", RECIPE, "--workdir=x", "fast"
    )


@pytest.mark.parametrize(
    "body, message",
    [
        ("config.lerning_rate = 3", "line 4: config.lerning_rate is unknown; config has: "),
        ("config.batch_size = (", "line 4: SyntaxError: '(' was never closed"),
    ],
)
def test_error_in_a_config_file(tmp_path: pathlib.Path, body: str, message: str) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from lamb_tpu.config import base_config\ndef get_config(argument=None):\n"
        f"    config = base_config()\n    {body}\n    return config\n".replace("\\\n", "\n")
    )
    line = rejected("lamb_tpu.train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert f"the config file {file} fails at {message}" in line


def test_batch_that_does_not_divide_over_simulated_devices(tmp_path: pathlib.Path) -> None:
    line = rejected(
        "lamb_tpu.train", RECIPE, "--config.batch_size=36", f"--workdir={tmp_path}", devices=8
    )
    assert "config.batch_size=36 is not divisible by the 8 devices" in line
    assert "use 32 or 40" in line


@pytest.mark.long
def test_diverged_run_exits_with_a_sentence(tmp_path: pathlib.Path) -> None:
    line = rejected(
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
    assert (done.returncode, done.stderr) == (os.EX_TEMPFAIL, PREEMPTED) and os.EX_TEMPFAIL == 75


@pytest.mark.long
def test_what_a_config_file_leaves_out_is_set_on_the_command_line(tmp_path: pathlib.Path) -> None:
    """Flags set keys that a config file leaves out; a flag that repeats a default has no effect."""
    common = [
        "--config=digits:smoke,batch=512",
        f"--workdir={tmp_path}",
        "--config.optimizer.collect",
        "--config.optimizer.b2",
        "0.98",
        "--config.model.dropout_rate=0.1",
        "--config.task.mixup_alpha=0.2",
    ]
    tiny.succeed("lamb_tpu.train", *common)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["optimizer.collect"] is True and written["optimizer.b2"] == 0.98
    assert (written["model.dropout_rate"], written["task.mixup_alpha"]) == (0.1, 0.2)
    assert '"kind": "layers"' in (tmp_path / "metrics.jsonl").read_text()
    defaults = ["--noconfig.optimizer.cautious", "--config.optimizer.clip_global_norm=None"]
    tiny.succeed("lamb_tpu.evaluate", *common, *defaults)
    line = rejected("lamb_tpu.evaluate", *common, "--config.optimizer.b2=0.9")
    assert "(optimizer.b2: 0.98 there, 0.9 now)" in line


@pytest.mark.parametrize("module", ["train", "evaluate", "plan"])
def test_config_is_shown_instead_of_run(module: str) -> None:
    done = tiny.command(
        f"lamb_tpu.{module}",
        "--config=digits:batch=64",
        "--print-config",
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
    assert "config.seed=-1" in rejected(
        f"lamb_tpu.{module}", RECIPE, "--print-config", "--config.seed=-1"
    )


def test_evaluate(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The command prints a checkpoint's metrics as JSON, and rejects missing checkpoints and runs."""
    arguments = [tiny.recipe(tmp_path), f"--workdir={copy}"]
    done = tiny.succeed("lamb_tpu.evaluate", f"--workdir={copy}", "--step=8")
    metrics = json.loads(done.stdout)
    assert metrics["step"] == 8 and 0 < metrics["accuracy"] < 1
    line = rejected("lamb_tpu.evaluate", *arguments, "--step=9")
    assert "has no checkpoint of update 9; use one of 4, 8, 12" in line
    line = rejected("lamb_tpu.evaluate", *arguments, "--step=last")
    assert "--step='last' is not a checkpoint; use a number of updates or 'best'" in line
    empty = rejected("lamb_tpu.evaluate", RECIPE, f"--workdir={tmp_path / 'none'}")
    assert "holds no run: config.json is missing" in empty
    assert not (tmp_path / "none").exists()


def test_sigterm_where_an_exception_is_lost() -> None:
    """Python only prints an exception raised in a garbage-collector callback; JAX has such a callback."""
    done = tiny.python(
        "import gc, os, signal\n"
        "from lamb_tpu import ending, cli\n"
        "def callback(phase, info):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    sum(range(9))\n"
        "def main():\n"
        "    gc.callbacks.append(callback)\n"
        "    gc.collect()\n"
        "    print('went on')\n"
        "cli.run_main(main)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "", PREEMPTED)


def test_ctrl_c_during_imports_gives_no_traceback() -> None:
    done = tiny.python(
        "import os, signal; from lamb_tpu import ending, cli; cli.answer_help()\n"
        "os.kill(os.getpid(), signal.SIGINT); print('went on')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_help_teaches() -> None:
    done = tiny.command("lamb_tpu.train", "--help", fresh=True)
    for part in (
        "python -m lamb_tpu.train --config=configs/",
        "--workdir",
        "resumed",
        "--config.optimizer.b2=0.98",
    ):
        assert part in done.stdout


def test_libtpu_says_nothing_where_there_is_no_tpu() -> None:
    done = tiny.python(
        "import jax; from lamb_tpu import ending, cli; cli.run_main(lambda: print(jax.devices()))"
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip()


@contextlib.contextmanager
def started(code: str) -> Iterator[subprocess.Popen]:
    """Runs code, which must print 'up', in a new process; the block must end the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tiny.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize(
    "number, status, output",
    [
        (signal.SIGTERM, 75, PREEMPTED),
        (signal.SIGINT, 130, "interrupted; nothing that was saved is lost\n"),
    ],
)
def test_a_signal_ends_a_main_thread_that_is_deaf(
    number: signal.Signals, status: int, output: str
) -> None:
    """A library call stands in for compilation: Python runs no signal handlers during the call."""
    code = (
        "import hashlib; from lamb_tpu import ending, cli\n"
        "def main():\n"
        "    print('up', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"  # takes half an hour
        "cli.run_main(main)"
    )
    with started(code) as process:
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("", output)
    assert process.returncode == status


def test_a_signal_while_a_thread_of_xla_compiles() -> None:
    """JAX's exit handler would destroy objects that the thread still uses, which crashes the process."""
    code = (
        "from lamb_tpu import cli\nimport threading, time, jax, jax.numpy as jnp\n"
        "def deep(x):\n"
        "    for _ in range(400): x = jnp.sin(x @ x) + jnp.cos(x).T\n"
        "    return x\n"
        "def main():\n"
        "    lowered = jax.jit(deep).lower(jnp.ones((8, 8)))\n"
        "    threading.Thread(target=lowered.compile, daemon=True).start()\n"
        "    time.sleep(0.5); print('up', flush=True); time.sleep(30)\n"
        "cli.run_main(main)"
    )
    with started(code) as process:
        process.terminate()
        assert process.communicate(timeout=30) == ("", PREEMPTED) and process.returncode == 75


def test_all_processes_leave_together_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    left: list[tuple[int, bool]] = []

    def leave(status: int, together: bool = False) -> None:
        left.append((status, together))
        raise SystemExit(status)

    def main() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(distributed, "leave", leave)
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit, match="^75$"):
            cli.run_main(main)
        # A later notice of the same signal from another process changes nothing.
        ending.end_preempted(signal.SIGTERM, None)
    finally:
        signals.ending.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert left == [(75, True)]
    assert "preempted; nothing that was saved is lost" in capsys.readouterr().err


def test_what_a_system_or_a_lost_process_raises_becomes_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def leave(status: int, together: bool = False) -> None:
        assert not together
        raise SystemExit(status)

    def run(text: str, kind: type[Exception] = jax.errors.JaxRuntimeError, status: int = 1) -> str:
        return run_error(kind(text), status)

    def run_error(error: Exception, status: int = 2) -> str:
        def main() -> None:
            raise error

        with pytest.raises(SystemExit, match=f"^{status}$"):
            cli.run_main(main)
        return capsys.readouterr().err

    monkeypatch.setattr(distributed, "leave", leave)
    # Another test may have imported a module in these tracebacks as a custom module.
    monkeypatch.setattr(custom, "_imported", set())
    monkeypatch.setattr(sys, "argv", ["run"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        output = run(
            "UNKNOWN: Gloo all-reduce failed: pair.cc:547\nConnection closed by peer",
            status=signals.LOST_PEER,
        )
        by_value = run(
            "Gloo all-reduce failed: pair.cc:538\nRead error", ValueError, signals.LOST_PEER
        )
        other = run("UNKNOWN: something else")
        of_value = run("something else", ValueError)
        memory = run_error(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 8 bytes"))
        of_numpy = run_error(MemoryError("Unable to allocate 7 TiB"))
        full = run_error(OSError(28, "No space left on device", "/there"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (
        output.startswith("error: another process of this run has ended")
        and output.count("\n") == 1
    )
    assert "closed by peer" in output and "Traceback" not in output
    assert by_value.startswith("error: another process of this run") and by_value.count("\n") == 1
    for text in (other, of_value):
        assert "Traceback" in text and "something else" in text
    for text, reason in ((memory, "allocating 8 bytes"), (of_numpy, "allocate 7 TiB")):
        assert text.startswith("error: out of memory (") and text.count("\n") == 1
        assert f"{reason}); reduce config.batch_size, or increase config.accumulation" in text
    assert full == "error: '/there': No space left on device\n"


@pytest.mark.parametrize(
    "variable, words, message",
    [
        (
            "JAX_ENABLE_X64=maybe",
            f"train {RECIPE} --workdir=",
            "JAX rejects an environment variable (invalid truth value 'maybe' for env",
        ),
        (
            "JAX_NUM_CPU_DEVICES=1e400",
            "reproduce list",
            "JAX rejects an environment variable (Invalid value "
            '"1e400" for JAX flag jax_num_cpu_devices); corr',
        ),
        (
            "JAX_PLATFORMS=tpv",
            f"train {RECIPE} --workdir=",
            "JAX has no device for JAX_PLATFORMS='tpv' (Unable to initialize backe",
        ),
    ],
)
def test_environment_that_jax_rejects(
    variable: str, words: str, message: str, tmp_path: pathlib.Path
) -> None:
    name, _, value = variable.partition("=")
    command = [word.replace("--workdir=", f"--workdir={tmp_path}") for word in words.split()]
    done = subprocess.run(
        [sys.executable, "-m", f"lamb_tpu.{command[0]}", *command[1:]],
        cwd=tiny.ROOT,
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text, problem, remedy",
    [
        ("1000000000000h", "is out of range", "use at most 87600h (ten years)"),
        (f"{'9' * 5_000}s", "is out of range", "use at most 87600h"),
        ("0s", "is not a time above 0", "give a number with a unit, such as 30s"),
        ("nans", "is not a time above 0", "give a number with a unit"),
    ],
)
def test_times_that_no_timer_takes(text: str, problem: str, remedy: str) -> None:
    with raising.rejected("--time-limit", text, problem, remedy):
        cli.seconds("--time-limit", text)


def test_a_recipe_or_flag_file_that_never_ends(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with raising.rejected(
        "--config", f"{tmp_path}/pipe.py", "is a pipe, not a file", "give a file"
    ):
        cli._with_path(["train", f"--config={tmp_path}/pipe.py:batch=8"])
    with raising.rejected("--config", "/dev/zero", "is a device, not a file"):
        cli._with_path(["train", "--config", "/dev/zero"])
    for words in (["--flagfile=/dev/zero"], ["-flagfile", "/dev/zero"]):
        with raising.rejected("--flagfile", "/dev/zero", "is a device, not a file"):
            cli._check_flag_files(["train", *words])
    cli._check_flag_files(["train", f"--flagfile={tmp_path}", "--flagfile=none", "x" * 5000])


def test_times() -> None:
    times = [cli.seconds("--budget", text) for text in (None, "30s", "1.5h", "90m")]
    assert times == [None, 30.0, 5400.0, 5400.0]
