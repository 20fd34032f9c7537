"""A run as a JobSet on Google Kubernetes Engine: one job a slice, one pod a host.

JobSet (jobset.sigs.k8s.io, v1alpha2) makes the headless service by which pods find each other. GKE
puts the pods of a job onto one slice, and sets the variables from which JAX learns its place:
TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, and MEGASCALE_* where there are several slices.
"""

import os
from typing import Any

import yaml

from lamb_tpu.errors import UserError
from lamb_tpu.launch.pod import Pod

# Values of cloud.google.com/gke-tpu-accelerator for slices of several hosts, by
# cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus; all but v3 have them for one host too.
_ACCELERATORS = {
    "v3": "tpu-v3-slice",
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
_V3_HOST = "tpu-v3-device"
# Generations whose slices GKE names by two sides.
_FLAT = ("v3", "v5e", "v6e")
_NODE_POOL = "cloud.google.com/gke-nodepool"
# SIGTERM before the program could listen.
_TERMINATED = 143
_SAVE_SECONDS = 120  # from SIGTERM to SIGKILL; a spot machine gives less
_LONGEST_POD_NAME = 63
_JOB = "slice"


def manifest(pod: Pod, max_restarts: int) -> str:
    """Returns the YAML of a run.

    Args:
      pod: the slices and the run, with an image.
      max_restarts: restarts after failures; those after preemptions do not count.

    Raises:
      UserError: GKE has no such TPU, or the name is too long for its pods.
    """
    # Kubernetes adds a hyphen and five characters.
    pod_name = f"{pod.name}-{_JOB}-{pod.slices - 1}-{pod.hosts - 1}-xxxxx"
    if len(pod_name) > _LONGEST_POD_NAME:
        raise UserError(
            f"--name is {pod.name!r}; its pods would have names like {pod_name}, of more than "
            f"{_LONGEST_POD_NAME} characters: give a shorter one"
        )
    job = {
        # Each pod is one process of the run: none is started again alone.
        "backoffLimit": 0,
        "completions": pod.hosts,
        "parallelism": pod.hosts,
        "completionMode": "Indexed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "train",
                        "operator": "In",
                        "values": [os.EX_TEMPFAIL, _TERMINATED],
                    },
                },
                {
                    "action": "FailJob",
                    "onPodConditions": [
                        {"type": "DisruptionTarget", "status": "True"}  # the node is taken away
                    ],
                },
            ]
        },
        "template": {"spec": _pod_spec(pod)},
    }
    return yaml.safe_dump(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                "name": pod.name,
                # A slice is a node pool, and no two jobs may share one.
                "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": _NODE_POOL},
            },
            "spec": {
                "failurePolicy": {
                    "maxRestarts": max_restarts,
                    "rules": [
                        {
                            "name": "preempted",
                            "action": "RestartJobSetAndIgnoreMaxRestarts",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [
                    {"name": _JOB, "replicas": pod.slices, "template": {"spec": job}}
                ],
            },
        },
        sort_keys=False,
        width=100,
    )


def _pod_spec(pod: Pod) -> dict[str, Any]:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": _accelerator(pod),
        "cloud.google.com/gke-tpu-topology": _shape(pod),
    }
    chips = {"google.com/tpu": pod.chips_per_host}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SAVE_SECONDS,
        "nodeSelector": selector,
        "containers": [
            {
                "name": "train",
                "image": pod.image,
                # Kubernetes reads $(NAME) as a variable and $$ as a $.
                "command": [
                    "python",
                    "-u",
                    "-m",
                    "lamb_tpu.train",
                    *(item.replace("$", "$$") for item in pod.train),
                ],
                "resources": {"requests": dict(chips), "limits": dict(chips)},
            }
        ],
    }
    if pod.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        spec["tolerations"] = [
            {
                "key": "cloud.google.com/gke-spot",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            }
        ]
    return spec


def _accelerator(pod: Pod) -> str:
    version = pod.topology.version
    if version not in _ACCELERATORS:
        raise UserError(
            f"--topology is {pod.topology.name!r}, and GKE has no TPU {version}; it has "
            f"{', '.join(_ACCELERATORS)}"
        )
    return _V3_HOST if version == "v3" and pod.hosts == 1 else _ACCELERATORS[version]


def _shape(pod: Pod) -> str:
    sides = pod.topology.shape
    return "x".join(map(str, sides[:2] if pod.topology.version in _FLAT else sides))
