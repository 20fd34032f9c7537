"""A run as a JobSet on Google Kubernetes Engine: one job per slice, one pod per host.

An array is one Indexed Job: each pod runs on one host and trains a share of many small runs.

JobSet (jobset.sigs.k8s.io, v1alpha2) creates the headless service that pods use to find each other. GKE
puts the pods of a job onto one slice, and sets the variables that JAX reads to initialize its
processes: TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, and MEGASCALE_* for several slices.
"""

import os
from typing import Any

import yaml

from lamb_tpu.errors import UserError
from lamb_tpu.launch import arguments
from lamb_tpu.launch.generations import GENERATIONS
from lamb_tpu.launch.pod import Pod

# Label of a v3 slice of one host; other generations have one label for all slices.
_V3_HOST = "tpu-v3-device"
_NODE_POOL = "cloud.google.com/gke-nodepool"
# Exit status if SIGTERM comes before the program has installed its handler.
_TERMINATED = 143
SAVE_SECONDS = 120  # time between SIGTERM and SIGKILL; spot machines have less
PREEMPTED = (os.EX_TEMPFAIL, _TERMINATED)  # exit statuses of a run that must be restarted
_LONGEST_POD_NAME = 63
_JOB, _TRIAL = "slice", "trial"


def manifest(
    pod: Pod,
    max_restarts: int,
    account: str | None = None,
    array: int | None = None,
    module: str = arguments.TRAIN,
) -> str:
    """Returns the YAML of a run, or of an array of jobs.

    Args:
      pod: the slices and the run, with an image. For an array, `pod.slices` is the number of jobs
        that run at the same time.
      max_restarts: largest number of restarts after failures, not counting preemptions; for an array,
        the number for each job.
      account: Kubernetes service account of the pods; None: the account named default.
      array: number of jobs, each on one host; None: one run on all slices.
      module: module that the pods run.

    Raises:
      UserError: `pod.name` is so long that Kubernetes would reject the names derived from it.
    """
    metadata: dict[str, Any] = {"name": pod.name}
    if array is None:
        job, job_name, replicas = _run(pod), _JOB, pod.slices
        _check_name(pod, f"{_JOB}-{pod.slices - 1}-{pod.hosts - 1}")
        # Each slice is a node pool, which jobs must not share.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": _NODE_POOL}
        rule = {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        failures = {"maxRestarts": max_restarts, "rules": [rule]}
        network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    else:
        job, job_name, replicas = _array(pod, array, max_restarts), _TRIAL, 1
        _check_name(pod, f"{_TRIAL}-0-{array - 1}")
        failures = {"maxRestarts": 0}
        # The jobs of an array do not communicate.
        network = {"enableDNSHostnames": False}
    job["template"] = {"spec": _pod_spec(pod, account, array, module)}
    jobs = [{"name": job_name, "replicas": replicas, "template": {"spec": job}}]
    values = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"failurePolicy": failures, "network": network, "replicatedJobs": jobs},
    }
    return yaml.safe_dump(values, sort_keys=False, width=100)


def _check_name(pod: Pod, last: str) -> None:
    # Kubernetes appends a hyphen and five characters.
    pod_name = f"{pod.name}-{last}-xxxxx"
    if len(pod_name) > _LONGEST_POD_NAME:
        raise UserError(
            "--name",
            pod.name,
            f"makes pod names such as {pod_name}, which is longer than {_LONGEST_POD_NAME} characters",
            "give a shorter name",
        )


def _run(pod: Pod) -> dict[str, Any]:
    return {
        # A pod is one process of the run, so no pod is restarted alone.
        "backoffLimit": 0,
        "completions": pod.hosts,
        "parallelism": pod.hosts,
        "completionMode": "Indexed",
        # A preempted pod fails its job, and the JobSet then restarts all jobs.
        "podFailurePolicy": _on_preemption("FailJob"),
    }


def _array(pod: Pod, array: int, max_restarts: int) -> dict[str, Any]:
    return {
        # A job that fails too often does not affect the others.
        "backoffLimitPerIndex": max_restarts,
        "completions": array,
        "parallelism": min(pod.slices, array),
        "completionMode": "Indexed",
        # Replace only the preempted pod.
        "podFailurePolicy": _on_preemption("Ignore"),
    }


def _on_preemption(action: str) -> dict[str, Any]:
    statuses = {"containerName": "train", "operator": "In", "values": list(PREEMPTED)}
    disrupted = {"type": "DisruptionTarget", "status": "True"}  # the node was preempted
    return {
        "rules": [
            {"action": action, "onExitCodes": statuses},
            {"action": action, "onPodConditions": [disrupted]},
        ]
    }


def _pod_spec(pod: Pod, account: str | None, array: int | None, module: str) -> dict[str, Any]:
    index = [] if array is None else [f"--index=$(JOB_COMPLETION_INDEX)/{array}"]
    selector = {
        "cloud.google.com/gke-tpu-accelerator": accelerator(pod),
        "cloud.google.com/gke-tpu-topology": pod.shape,
    }
    chips = {"google.com/tpu": pod.chips_per_host}
    # Kubernetes expands $(NAME) as a variable and $$ to $, so escape every $.
    words = [*(item.replace("$", "$$") for item in pod.train), *index]
    container = {
        "name": "train",
        "image": pod.image,
        "command": ["python", "-u", "-m", module, *words],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
        # Only root may open the TPU devices; the image has another default user.
        "securityContext": {"runAsUser": 0},
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        **({"serviceAccountName": account} if account is not None else {}),
        "nodeSelector": selector,
        "containers": [container],
    }
    if pod.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        equal = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        spec["tolerations"] = [{**equal, "effect": "NoSchedule"}]
    return spec


def accelerator(pod: Pod) -> str | None:
    """Returns GKE's accelerator label for the TPUs of a slice."""
    version = pod.topology.version
    return _V3_HOST if version == "v3" and pod.hosts == 1 else GENERATIONS[version].gke
