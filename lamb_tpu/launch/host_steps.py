"""The steps of a run that do not depend on how its hosts are created and reached."""

import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch import local_steps, remote
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import Step


class Reach(NamedTuple):
    """Functions that return commands for reaching the hosts from this machine."""

    everyone: Callable[[str], str]  # wraps a command for a host so that it runs on all hosts
    first: Callable[[str], str]  # wraps a command for a host so that it runs on the first host
    # Returns the command that copies a file from the current folder to the home folder of all
    # hosts.
    copy: Callable[[str], str]


def steps(
    pod: Pod,
    created: Sequence[Step],
    reach: Reach,
    host: remote.Host,
    delete: str,
    data: str | None,
) -> list[Step]:
    """Returns all steps of a run: check, create, copy, install, run, follow, fetch, delete.

    Args:
      pod: the slices and the run.
      created: the steps that create the hosts.
      reach: commands that reach the hosts.
      host: install commands for this type of host.
      delete: the command that deletes the hosts.
      data: folder in a bucket; its content is copied to the folder `data` beside the code.

    Raises:
      UserError: `data` is not a folder in a bucket.
    """
    setup = [*created]
    if pod.image is None:
        name = f"{pod.name}.tar.gz"
        setup = [
            local_steps.pack(name),
            *created,
            Step("copy the code to all hosts", f"{reach.copy(name)} &&\nrm {shlex.quote(name)}"),
            Step(
                "install the code on all hosts",
                reach.everyone(remote.install(name, host, pod.workdir.startswith(buckets.PREFIX))),
            ),
        ]
    else:
        pull = remote.pull(pod.image, host)
        setup.append(Step("pull the image on all hosts", reach.everyone(pull)))
    if data is not None:
        if not data.startswith(buckets.PREFIX):
            raise UserError("--data", data, "is not in a bucket", "give gs://BUCKET/FOLDER")
        buckets.check_folder(data, "--data")
        setup.append(Step("copy the data to all hosts", reach.everyone(remote.fetch_data(data))))
    run = remote.start(remote.train(pod.train, pod.image, pod.workdir, host), host)
    return [
        local_steps.check(pod),
        *setup,
        Step("start the run on all hosts; it restarts after a preemption", reach.everyone(run)),
        Step("show the output of the first host until the run ends", reach.first(remote.follow())),
        local_steps.fetch(pod, reach.first(remote.pack(pod.workdir))),
        Step("delete the machines", delete, deletes=True),
    ]
