"""Commands of Cluster Toolkit and XPK pass the arguments of a run to bash in a container."""

import shlex
import subprocess

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.launch import __main__ as launch
from lamb_tpu.launch import toolkits
from lamb_tpu.launch.pod import make_pod
from tests.launch import shell
from tests.raising import rejected

TRAIN = [
    "--config=digits",
    "--a=two words",
    '--b=it\'s "both"',
    *"--c=a;b|c&d --d=* --e= --f=`id`".split(),
    "--g=\\n",
    "--workdir=gs://bucket/my run",
]


def words(tool: str, topology: str = "v6e-256", **options: object) -> list[str]:
    pod = make_pod("jobset", topology, "bert", TRAIN, slices=2, image="a/b:1")
    text = toolkits.command(tool, pod, "tpus", "us-east5-a", "my-project", 3, **options)
    shell.checked(text)
    return shlex.split(text.replace("\\\n", " "))


@pytest.mark.parametrize("tool", toolkits.TOOLS)
def test_arguments_reach_the_container_unchanged(tool: str) -> None:
    (command,) = (
        word.removeprefix("--command=") for word in words(tool) if word.startswith("--command=")
    )
    shown = subprocess.run(
        ["bash", "-c", command.replace("python -u -m lamb_tpu.train", "printf '%s\\0'")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split("\0")[:-1] == TRAIN and command.startswith("python -u -m lamb_tpu.train ")


def test_gcluster() -> None:
    assert words("gcluster", account="lamb-tpu")[:-1] == [
        *"gcluster job submit --name=bert --cluster=tpus --project=my-project".split(),
        *"--location=us-east5 --compute-type=v6e-256 --num-slices=2 --image=a/b:1".split(),
        *"--restarts=3 --restart-on-exit-codes=75,143 --grace-period=120s".split(),
        "--service-account=lamb-tpu",
    ]


def test_xpk() -> None:
    assert words("xpk")[:-1] == [
        *"xpk workload create --workload=bert --cluster=tpus --project=my-project".split(),
        *"--zone=us-east5-a --tpu-type=v6e-256 --num-slices=2 --docker-image=a/b:1".split(),
        *"--max-restarts=3 --restart-on-exit-codes=75,143".split(),
    ]


@pytest.mark.parametrize(
    "topology, kind",
    [
        ("v4-16", "v4-16"),
        ("v5e-16", "v5litepod-16"),
        ("v5litepod-16", "v5litepod-16"),
        ("v5p-16", "v5p-16"),
        ("v6e-16", "v6e-16"),
        ("tpu7x-16", "tpu7x-16"),
    ],
)
def test_types_of_all_generations(topology: str, kind: str) -> None:
    assert f"--tpu-type={kind}" in words("xpk", topology)
    assert f"--compute-type={kind}" in words("gcluster", topology)


@pytest.mark.parametrize("word", ["--a=$HOME", "--a=$$", "--a=$(id)", "--a=x\ny", "--a=\x1b[2J"])
@pytest.mark.parametrize("tool", toolkits.TOOLS)
def test_arguments_that_would_change_are_rejected(tool: str, word: str) -> None:
    pod = make_pod("jobset", "v6e-8", "bert", [word, *TRAIN], image="a/b:1")
    problem = f"has a $ or a control character that {tool} would change"
    with rejected("an argument after --", word, problem, "leave --tool out") as error:
        toolkits.command(tool, pod, "tpus", "us-east5-a", "my-project", 3)
    output = str(error.value)
    assert "\n" not in output and "\x1b" not in output


JOBSET = ["jobset", "--topology=v6e-8", "--name=bert", "--image=a/b:1", "--tool=gcluster"]
PLACE = ["--cluster=tpus", "--zone=us-east5-a", "--project=my-project"]


def test_command_line(capsys: pytest.CaptureFixture) -> None:
    assert launch.main([*JOBSET, *PLACE, "--", *TRAIN]) == 0
    assert capsys.readouterr().out.startswith("gcluster job submit \\\n    --name=bert \\\n")
    for number, option in enumerate(PLACE):
        rest = [word for at, word in enumerate(PLACE) if at != number]
        name = option.partition("=")[0]
        with rejected(name, problem="is missing, and --tool=gcluster needs it"):
            launch.main([*JOBSET, *rest, "--", *TRAIN])
    with rejected("--array", 3, "excludes --tool=gcluster", "leave --tool out"):
        launch.main([*JOBSET, *PLACE, "--array=3", "--module=lamb_tpu.sweep", "--", *TRAIN])
    with pytest.raises(UserError, match="--tool: invalid choice: 'xpk2'"):
        launch.main([*JOBSET, "--tool=xpk2", "--", *TRAIN])
