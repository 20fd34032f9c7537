"""Steps of a launch that run on this machine: check the config, pack the code, fetch the workdir."""

import os
import pathlib
import shlex
import subprocess
import sys

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import Step, join


def check(pod: Pod) -> Step:
    """Returns the step that checks the arguments of the run before machines cost money."""
    python = sys.executable
    if pathlib.Path(python).is_relative_to(pathlib.Path.cwd()):
        python = os.path.relpath(python)
    command = join(python, "-m", "lamb_tpu.train", *pod.train, "--print-config")
    return Step(
        "check the config on this machine", f"{command} >{shlex.quote(os.devnull)}", billed=False
    )


def pack(archive: str) -> Step:
    """Returns the step that packs the last commit of this checkout into a tar.gz file.

    Raises:
      UserError: there is no git checkout.
    """
    at = _checkout()
    output = str(pathlib.Path(archive).absolute()) if at else archive
    command = join("git", *at, "archive", "--format=tar.gz", f"--output={output}", "HEAD")
    return Step("pack the committed code", command, billed=False)


def build(image: str) -> Step:
    """Returns the step that builds the container image of the last commit of this checkout.

    Raises:
      UserError: there is no git checkout.
    """
    command = (
        join("git", *_checkout(), "archive", "--format=tar", "HEAD")
        + " |\n    "
        + join("docker", "build", "--platform=linux/amd64", f"--tag={image}", "-")
    )
    return Step("build the image of the committed code", command, billed=False)


def commit() -> str:
    """Returns the short hash of the last commit of this checkout.

    Raises:
      UserError: there is no git checkout, or it has no commit.
    """
    done = _git("rev-parse", "--short=12", "HEAD")
    if done.returncode:
        _checkout()
        raise UserError(
            "the checkout", problem="has no commit to copy", remedy="commit the code first"
        )
    return done.stdout.strip()


def uncommitted() -> bool:
    """Returns whether the checkout has uncommitted changes, which `git archive` leaves out."""
    return bool(_git("status", "--porcelain", "--untracked-files=no").stdout)


def _git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(_root()), *arguments], capture_output=True, text=True)


def _root() -> pathlib.Path:
    return pathlib.Path(__file__).parents[2]


def _checkout() -> list[str]:
    """Returns git's options for this checkout: -C FOLDER, or none if it is the current folder."""
    if not (_root() / ".git").exists():
        raise UserError(
            "--image",
            problem=f"is missing, and {_root()} is not a git checkout whose code could be copied",
            remedy="give an image that contains lamb_tpu, or run this command from a git checkout",
        )
    return [] if _root() == pathlib.Path.cwd() else ["-C", str(_root())]


def fetch(pod: Pod, packed: str) -> Step:
    """Returns the step that copies the workdir into the folder `runs` below the current folder.

    `packed` is the command that writes the first host's workdir to standard output as tar.gz.
    """
    name = pathlib.PurePosixPath(pod.workdir).name
    target = "runs/" + (pod.name if name in ("", "..") else name)
    folder = f"mkdir -p {shlex.quote(target)} &&\n"
    if pod.workdir.startswith(buckets.PREFIX):
        command = join("gcloud", "storage", "rsync", pod.workdir, target, "--recursive")
    else:
        command = f"{packed} |\n    {join('tar', '-xz', '-C', target)}"
    return Step("fetch the workdir", folder + command)
