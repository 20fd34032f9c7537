"""Tests that first_pod_run.md shows its commands' output, and that numbers in the text follow from it."""

import math
import re
import shlex
import sys

import pytest

from configs import bert_pretrain
from lamb_tpu.cost.topology import topology
from lamb_tpu.launch import __main__ as launch
from lamb_tpu.launch import local_steps
from tests.launch import shell
from tests.tiny import ROOT, unbroken

PAGE = (ROOT / "lamb_tpu" / "launch" / "first_pod_run.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def printed_after(command: str) -> tuple[str, str]:
    """Returns the page's block with a command, and the block with the command's output."""
    (actual,) = (
        (block, BLOCKS[number + 1][1])
        for number, (kind, block) in enumerate(BLOCKS)
        if kind == "sh" and f"python -m {command}" in block and BLOCKS[number + 1][0] == "text"
    )
    return actual


def test_steps_match_the_output_of_the_command(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, shown = printed_after("lamb_tpu.launch compute")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    monkeypatch.setattr(local_steps, "uncommitted", lambda: False)
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, whose code could be copied")
    _, arguments = block.replace("\\\n", " ").split("lamb_tpu.launch ")
    assert launch.main(shlex.split(arguments)) == 0
    assert capsys.readouterr().out == shown
    titles = dict(re.findall(r"^# (\d+)\. (.*)$", shown, re.MULTILINE))
    # The prose refers to these steps by number.
    for number, title in (
        ("6", "wait until"),
        ("12", "start the run"),
        ("13", "show the output"),
        ("14", "fetch the workdir"),
    ):
        assert titles[number].startswith(title) and re.search(rf"[Ss]tep[ =]{number}\b", PAGE)


def test_shells_read_the_blocks() -> None:
    for kind, block in BLOCKS:
        if kind == "sh":
            shell.parsed(block)


def test_cost_follows_from_the_plan() -> None:
    command, plan = printed_after("lamb_tpu.plan")
    config = bert_pretrain.get_config(re.search(r"bert_pretrain\.py:(\S+)", command)[1])
    updates = int(config.duration.split()[0]) // config.batch_size
    slice_ = topology(re.search(r"--topology=(\S+)", command)[1])
    assert plan.startswith(f"{slice_.name}: {slice_.num_devices:,} devices on ")
    assert f"a batch of {config.batch_size:,}, " in plan
    chips = math.prod(slice_.shape)
    step = re.search(r"a step takes ([\d.e+]+) ms \([\d.e+]+ to ([\d.e+]+)\)", unbroken(plan))
    milliseconds, longest = map(float, step.groups())
    hours = updates * milliseconds / 3.6e6
    chip_hours = re.search(r"([\d,]+) chip-hours", plan)[1]
    assert float(chip_hours) == pytest.approx(chips * hours, rel=0.01)
    text = PAGE.replace("\n", " ")
    assert f"{updates:,} updates take {hours:.2f} hours on {chips:,} chips" in text
    assert f"which is {chip_hours} chip-hours" in text
    assert f"{chips} * ({updates} * {longest / 1e3:g} / 3600 + 1) * price" in text
