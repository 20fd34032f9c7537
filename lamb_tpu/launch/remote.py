"""Shell commands that `gcloud ... ssh --command` runs on the hosts of a slice.

The folder lamb_tpu in the home folder holds the code, its Python environment, `run.log`, and
`run.status` with the exit status of a run that has ended. While a run is active, its host holds a lock on
`run.lock`, so that repeating a step does not start a second run.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lamb_tpu.launch.steps import join, quote

FOLDER = "lamb_tpu"
DATA = "data"  # in FOLDER
PYTHON = "3.12"  # the Python of the machines' images is too old
_TERMINATED = 143  # SIGTERM came before the program had installed its handler
_PAUSE_SECONDS = 5


class Host(NamedTuple):
    """The install commands for one type of host, and the variables that hosts use to find each other."""

    uv: str  # command that installs uv
    run_uv: str  # command that runs uv
    docker: str = ""  # command that installs docker; '' if the host's image has it
    # Environment variables of the run. The host's shell expands their values in the folder lamb_tpu.
    variables: Mapping[str, str] = {}


TPU_VM = Host(uv="python3 -m pip install --quiet --user uv", run_uv="python3 -m uv")


def install(archive: str, host: Host, uses_bucket: bool = False) -> str:
    """Returns the command that unpacks the code's tar.gz and installs the code with pinned versions."""
    extras = "train,tpu,gcs" if uses_bucket else "train,tpu"
    return " &&\n".join(
        [
            f"mkdir -p {FOLDER}",
            f"tar -xzf {shlex.quote(archive)} -C {FOLDER}",
            f"cd {FOLDER}",
            host.uv,
            f"{host.run_uv} venv --quiet --allow-existing --python={PYTHON} .venv",
            f'{host.run_uv} pip install --quiet --constraint=requirements.txt -e ".[{extras}]"',
        ]
    )


def pull(image: str, host: Host) -> str:
    """Returns the command that pulls a container image."""
    commands = [f"mkdir -p {FOLDER}", *([host.docker] if host.docker else [])]
    registry = image.partition("/")[0]
    if registry.endswith((".pkg.dev", "gcr.io")):  # Google's registries require authentication
        commands.append(f"sudo gcloud auth configure-docker {shlex.quote(registry)} --quiet")
    return " &&\n".join([*commands, f"sudo docker pull --quiet {shlex.quote(image)}"])


def fetch_data(bucket: str) -> str:
    """Returns the command that copies a folder in a bucket to lamb_tpu/data."""
    target = f"{FOLDER}/{DATA}"
    return f"mkdir -p {target} &&\n" + join(
        "gcloud", "storage", "rsync", bucket, target, "--recursive"
    )


def train(arguments: Sequence[str], image: str | None, workdir: str, host: Host) -> str:
    """Returns the command that runs one process of the run in the folder lamb_tpu.

    If an image is given and `workdir` is absolute, `workdir` is mounted into the container.
    """
    module = ["-u", "-m", "lamb_tpu.train", *arguments]
    if image is None:
        return " ".join(map(quote, [".venv/bin/python", *module]))
    seen = [f"--volume={workdir}:{workdir}"] if workdir.startswith("/") else []
    given = "".join(f'--env={name}="${name}" ' for name in host.variables)
    # The container needs the machine's chips and network.
    return (
        'sudo docker run --rm --privileged --user=root --network=host --volume="$PWD:$PWD" '
        '--workdir="$PWD" ' + given + " ".join(map(quote, [*seen, image, "python", *module]))
    )


def start(command: str, host: Host) -> str:
    """Returns the command that starts a run in the background and restarts it after a preemption.

    The run continues when the connection ends. If a run is active, nothing is started. `command` is
    run in the folder lamb_tpu.
    """
    before = "".join(f'export {name}="{text}"\n' for name, text in host.variables.items())
    return f"""\
cd {FOLDER} && exec 9>run.lock || exit
{before}\
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
    echo "the run is already active"
fi"""


def follow() -> str:
    """Returns the command that shows a run's output until the run ends, and exits with the run's status."""
    return f"""\
cd {FOLDER} || exit
tail -n +1 -F run.log &
flock run.lock sleep 2
kill $!
exit "$(cat run.status)\""""


def pack(workdir: str) -> str:
    """Returns the command that writes a local workdir to standard output as tar.gz."""
    return f"cd {FOLDER} && tar -czf - -C {shlex.quote(workdir)} ."
