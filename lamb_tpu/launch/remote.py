"""Commands for the hosts of a slice: text for the shell behind `gcloud ... ssh --command`.

Everything lies in the folder lamb_tpu of the home folder: the code, its environment, `run.log`,
and `run.status` with the exit status of a run that has ended. While a run is under way its host
holds a lock on `run.lock`, so that a step that is repeated does not start a second one.
"""

import os
import shlex
from collections.abc import Sequence

from lamb_tpu.launch.steps import join, quote

FOLDER = "lamb_tpu"
DATA = "data"  # in it
PYTHON = "3.12"  # the one that the machines come with is too old
_TERMINATED = 143  # SIGTERM came before the program could listen
_PAUSE_SECONDS = 5


def install(archive: str) -> str:
    """Returns the command that unpacks the code and installs it, at the pinned versions.

    Args:
      archive: name of the tar.gz file in the home folder.
    """
    return " &&\n".join(
        [
            f"mkdir -p {FOLDER}",
            f"tar -xzf {shlex.quote(archive)} -C {FOLDER}",
            f"cd {FOLDER}",
            "python3 -m pip install --quiet --user uv",
            f"python3 -m uv venv --quiet --allow-existing --python={PYTHON} .venv",
            'python3 -m uv pip install --quiet --constraint=requirements.txt -e ".[train,tpu]"',
        ]
    )


def pull(image: str) -> str:
    """Returns the command that fetches a container image."""
    parts = [f"mkdir -p {FOLDER}"]
    registry = image.partition("/")[0]
    if registry.endswith((".pkg.dev", "gcr.io")):  # Google's own, which ask who is there
        parts.append(f"sudo gcloud auth configure-docker {shlex.quote(registry)} --quiet")
    return " &&\n".join([*parts, f"sudo docker pull --quiet {shlex.quote(image)}"])


def fetch_data(bucket: str) -> str:
    """Returns the command that copies a folder of a bucket into `data` of the folder lamb_tpu."""
    target = f"{FOLDER}/{DATA}"
    return f"mkdir -p {target} &&\n" + join(
        "gcloud", "storage", "rsync", bucket, target, "--recursive"
    )


def train(arguments: Sequence[str], image: str | None, workdir: str) -> str:
    """Returns the command of one process of the run, in the folder lamb_tpu.

    Args:
      arguments: those of `lamb_tpu.train`.
      image: container image to run it in; None: the environment of `install`.
      workdir: the run's folder; the container sees it if it is absolute or in the folder lamb_tpu.
    """
    module = ["-u", "-m", "lamb_tpu.train", *arguments]
    if image is None:
        return " ".join(map(quote, [".venv/bin/python", *module]))
    seen = [f"--volume={workdir}:{workdir}"] if workdir.startswith("/") else []
    # The chips and the network are those of the machine.
    return (
        'sudo docker run --rm --privileged --network=host --volume="$PWD:$PWD" --workdir="$PWD" '
        + " ".join(map(quote, [*seen, image, "python", *module]))
    )


def start(command: str) -> str:
    """Returns the command that starts a run in the background, and again when it was preempted.

    It does not end with the connection. Where a run is under way, nothing is started.

    Args:
      command: the run's, in the folder lamb_tpu.
    """
    return f"""\
cd {FOLDER} && exec 9>run.lock || exit
if flock --nonblock 9; then
    rm -f run.status
    (
        while {command}
            status=$?
            [ "$status" = {os.EX_TEMPFAIL} ] || [ "$status" = {_TERMINATED} ]
        do
            echo "preempted (status $status): starting again"
            sleep {_PAUSE_SECONDS}
        done
        echo "$status" >run.status
    ) >>run.log 2>&1 </dev/null &
else
    echo "the run is under way already"
fi"""


def follow() -> str:
    """Returns the command that shows a run's output up to its end, and ends with its status."""
    return f"""\
cd {FOLDER} || exit
tail -n +1 -F run.log &
flock run.lock sleep 2
kill $!
exit "$(cat run.status)\""""


def pack(workdir: str) -> str:
    """Returns the command that writes a local workdir to standard output as tar.gz."""
    return f"cd {FOLDER} && tar -czf - -C {shlex.quote(workdir)} ."
