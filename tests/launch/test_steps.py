"""Steps printed as a script, and run one at a time."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from lamb_tpu.launch import steps as steps_lib
from lamb_tpu.launch.steps import Step, join
from tests.launch import shell
from tests.raising import rejected
from tests.tiny import ROOT

WORDS = ["ls", "a b", '--key=it\'s "$(x)"', "--note=" + "long " * 20, "--n=1\n2", "", "-", "*"]


def test_words_are_quoted() -> None:
    text = join(*WORDS)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True)
    assert done.stdout.split("\0")[:-1] == WORDS
    assert join("ls", "--size=3") == "ls --size=3"
    lines = join("gcloud", "create", *(f"--option-{number}=value" for number in range(9)))
    assert lines.splitlines()[0] == "gcloud create \\" and max(map(len, lines.splitlines())) < 40


def test_script_is_valid_bash() -> None:
    steps = [Step("first", "echo 1"), Step("second", join(*WORDS)), Step("third", "echo 3")]
    text = steps_lib.script(steps)
    shell.checked(text.replace("ls ", "echo "))
    assert text.startswith("# 1. first\necho 1\n\n# 2. second\nls ")
    assert steps_lib.script(steps, 3) == "# 3. third\necho 3"


@pytest.mark.parametrize("start", [0, 3])
def test_unknown_step(start: int) -> None:
    steps = [Step("a", "true"), Step("b", "true")]
    for call in (
        lambda: steps_lib.script(steps, start),
        lambda: steps_lib.run(steps, start, False, []),
    ):
        with rejected("--from-step", start, "is out of range", "use 1 to 2"):
            call()


def test_a_failure_inside_a_pipe_counts(capfd: pytest.CaptureFixture) -> None:
    assert steps_lib.run([Step("a", "exit 3 | cat", billed=False)], 1, False, ["x"]) == 1
    assert capfd.readouterr().err == (
        "error: step 1 (a) failed with status 3; continue from there with: x --from-step=1\n"
    )


def test_the_continuation_has_one_from_step(capfd: pytest.CaptureFixture) -> None:
    again = ["x", "--from-step=1", "--from-step", "1", "--name=a b", "--", "--from-step=9"]
    steps_lib.run([Step("a", "true"), Step("b", "false")], 1, False, again)
    assert "with: x '--name=a b' --from-step=2 -- --from-step=9\n" in capfd.readouterr().err


def test_ctrl_c_stops_at_the_step(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys\nfrom lamb_tpu.launch.steps import Step, run\n"
        f"steps = [Step('wait', 'echo $$ >{tmp_path}/pid; exec sleep 60'),"
        " Step('more', 'echo more'), Step('end', 'echo end', deletes=True)]\n"
        "sys.exit(run(steps, 1, True, ['x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background inherit a handler that ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # like a terminal
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "# 2." not in out
    assert (
        "error: step 1 (wait) was interrupted; continue from there with: x --from-step=1\n" in err
    )
    assert "the machines cost money until this deletes them: echo end\n" in err
