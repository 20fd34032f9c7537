"""Tests completion scripts: bash accepts its script and completes commands, flags, values and files."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

from tests import tiny


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    done = tiny.command("lamb_tpu.completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(done.stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(file: pathlib.Path) -> None:
    assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
    (file.parent / "recipe_of_mine").touch()
    # Words as bash splits them: --config=di becomes three words.
    cases = {
        ("repr",): "reproduce",
        ("train", "--pro"): "--process-id --profile",
        ("train", "--config", "=", "di"): "digits",
        ("train", "--config", "di"): "digits",
        ("sweep", "--better", "="): "higher lower",
        ("train", "--config.guards.sp"): "--config.guards.spike_factor --config.guards.spike_floor",
        ("evaluate", "--workdir", "=", "rec"): "recipe_of_mine",
        ("reproduce", "run", "lamb/mnist", "--time"): "--time-limit",
        ("launch", "local", "--dev"): "--devices-per-process",
        ("completion", ""): "bash zsh",
    }
    asked = "\n".join(
        f"COMP_WORDS=(lamb_tpu {shlex.join(words)}); COMP_CWORD={len(words)}; _lamb_tpu\n"
        'echo "${COMPREPLY[*]}"'
        for words in cases
    )
    done = subprocess.run(
        ["bash", "-c", f"source {shlex.quote(str(file))}\n{asked}"],
        cwd=file.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert dict(zip(cases, done.stdout.splitlines(), strict=True)) == cases


def test_zsh_gets_a_script_and_other_shells_an_error() -> None:
    done = tiny.command("lamb_tpu.completion", "zsh")
    assert done.returncode == 0 and done.stdout.startswith("#compdef lamb_tpu\n")
    if shutil.which("zsh"):
        assert subprocess.run(["zsh", "-n"], input=done.stdout, text=True).returncode == 0
    done = tiny.command("lamb_tpu.completion", "fish")
    assert done.returncode == 2 and "invalid choice: 'fish'" in done.stderr
