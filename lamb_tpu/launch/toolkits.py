"""The command that starts a run with one of Google's tools for GKE: gcluster or the older XPK.

Both tools create a JobSet, queue it with Kueue, and pass the command to bash in the container.
gcluster belongs to Cluster Toolkit.

Sources, read on 2026-11-27: docs.cloud.google.com/cluster-toolkit/docs/reference/
gcluster-job-submit and cmd/job/submit.go of GoogleCloudPlatform/cluster-toolkit (2026);
docs/usage/workloads.md and docs/usage/docker.md of AI-Hypercomputer/xpk (0.14, 2025).
"""

import re
import shlex

from lamb_tpu.errors import CONTROLS, UserError
from lamb_tpu.launch import compute, jobset
from lamb_tpu.launch.generations import GENERATIONS
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import join

TOOLS = ("gcluster", "xpk")


def command(
    tool: str,
    pod: Pod,
    cluster: str,
    zone: str,
    project: str,
    max_restarts: int,
    account: str | None = None,
) -> str:
    """Returns the command that queues a run with one of the tools.

    Args:
      tool: one of `TOOLS`.
      pod: the slices and the run, with an image.
      cluster: name of the cluster.
      zone: a zone in the region of the cluster.
      project: Google's project.
      max_restarts: largest number of restarts after failures.
      account: Kubernetes service account of the pods; None: the tool's default.

    Raises:
      UserError: the tool would change an argument of the run.
    """
    for word in pod.train:
        # Kubernetes expands $(NAME) and $$ before bash reads the text, and the tool's YAML may not
        # preserve control characters.
        if "$" in word or re.search(f"[{CONTROLS}\n]", word):
            raise UserError(
                "an argument after --",
                word,
                f"has a $ or a control character that {tool} would change",
                "leave --tool out: a JobSet passes the argument on unchanged",
            )
    run = shlex.join(["python", "-u", "-m", "lamb_tpu.train", *pod.train])
    version, _, size = pod.topology.name.partition("-")
    kind = f"{GENERATIONS[pod.topology.version].api_name or version}-{size}"
    statuses = ",".join(map(str, jobset.PREEMPTED))
    given = [f"--service-account={account}"] if account is not None else []
    where = [f"--cluster={cluster}", f"--project={project}"]
    if tool == "xpk":
        return join(
            *("xpk", "workload", "create"),
            f"--workload={pod.name}",
            *where,
            f"--zone={zone}",
            f"--tpu-type={kind}",
            f"--num-slices={pod.slices}",
            f"--docker-image={pod.image}",
            f"--max-restarts={max_restarts}",
            f"--restart-on-exit-codes={statuses}",
            *given,
            f"--command={run}",
        )
    return join(
        *("gcluster", "job", "submit"),
        f"--name={pod.name}",
        *where,
        f"--location={compute.region_of(zone)}",
        f"--compute-type={kind}",
        f"--num-slices={pod.slices}",
        f"--image={pod.image}",
        f"--restarts={max_restarts}",
        f"--restart-on-exit-codes={statuses}",
        f"--grace-period={jobset.SAVE_SECONDS}s",
        *given,
        f"--command={run}",
    )
