"""The YAML of a run on GKE: what Kubernetes accepts, and what it asks for."""

import json
import os
import pathlib
from typing import Any

import jsonschema
import pytest
import yaml

from lamb_tpu.errors import UserError
from lamb_tpu.launch import jobset
from lamb_tpu.launch.pod import make_pod

SCHEMA = json.loads((pathlib.Path(__file__).parent / "jobset_schema.json").read_text())
TRAIN = ["--config=digits", "--workdir=gs://bucket/my run"]


def manifest(topology: str, max_restarts: int = 3, train: tuple[str, ...] = (), **options: Any):
    name = options.pop("name", "bert")
    pod = make_pod("jobset", topology, name, [*TRAIN, *train], image="image:1", **options)
    return yaml.safe_load(jobset.manifest(pod, max_restarts))


def job(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_spec(found: dict[str, Any]) -> dict[str, Any]:
    return job(found)["template"]["spec"]


@pytest.mark.parametrize(
    "topology, accelerator, shape, hosts, chips",
    [
        ("v3-8", "tpu-v3-device", "2x2", 1, 4),
        ("v3-32", "tpu-v3-slice", "4x4", 4, 4),
        ("v4-8", "tpu-v4-podslice", "2x2x1", 1, 4),
        ("v4-512", "tpu-v4-podslice", "4x8x8", 64, 4),
        ("v5e-1", "tpu-v5-lite-podslice", "1x1", 1, 1),
        ("v5litepod-8", "tpu-v5-lite-podslice", "2x4", 1, 8),
        ("v5e-256", "tpu-v5-lite-podslice", "16x16", 64, 4),
        ("v5p-256", "tpu-v5p-slice", "4x4x8", 32, 4),
        ("v6e-8", "tpu-v6e-slice", "2x4", 1, 8),
        ("v6e-16", "tpu-v6e-slice", "4x4", 4, 4),
    ],
)
def test_every_generation(
    topology: str, accelerator: str, shape: str, hosts: int, chips: int
) -> None:
    found = manifest(topology)
    jsonschema.validate(found, SCHEMA)
    assert pod_spec(found)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": shape,
    }
    (container,) = pod_spec(found)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert job(found)["completions"] == job(found)["parallelism"] == hosts


def test_several_spot_slices() -> None:
    found = manifest("v6e-256", slices=2, spot=True)
    jsonschema.validate(found, SCHEMA)
    assert found["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert pod_spec(found)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod_spec(found)["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert found["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }


def test_preemptions_restart_without_a_count() -> None:
    found = manifest("v4-8", max_restarts=7)
    policy = found["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # The reason of a job that one of the rules below has failed.
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    exits, conditions = job(found)["podFailurePolicy"]["rules"]
    assert exits["onExitCodes"]["values"] == [os.EX_TEMPFAIL, 143]
    names = [container["name"] for container in pod_spec(found)["containers"]]
    assert exits["onExitCodes"]["containerName"] in names
    assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # All other failures count, and none starts a pod without the others.
    assert job(found)["backoffLimit"] == 0 and pod_spec(found)["restartPolicy"] == "Never"


def test_arguments_arrive_as_they_are() -> None:
    """After Kubernetes has read $(NAME) as a variable and $$ as a $."""
    train = ("--a=two words", "--b=$(HOME) $$ $x", '--c=it\'s "both"\n', "--d=yes", "--e: 1")
    command = pod_spec(manifest("v4-8", train=train))["containers"][0]["command"]
    assert command[:4] == ["python", "-u", "-m", "lamb_tpu.train"]
    expanded = [item.replace("$$", "$") for item in command[4:]]
    assert expanded == [*TRAIN, *train]
    assert command[7] == "--b=$$(HOME) $$$$ $$x"


def test_schema_refuses_what_is_not_in_it() -> None:
    found = manifest("v4-8")
    pod_spec(found)["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="'comand' was unexpected"):
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize(
    "topology, name, message",
    [
        (
            "v2-8",
            "bert",
            "--topology is 'v2-8', and GKE has no TPU v2; it has v3, v4, v5e, v5p, v6e",
        ),
        (
            "v5p-256",
            "b" * 50,
            "its pods would have names like b{50}-slice-0-31-xxxxx, of more than 63",
        ),
    ],
)
def test_mistake(topology: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        manifest(topology, name=name)
