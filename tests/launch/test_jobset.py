"""The JobSet YAML of a run on GKE: its schema and its content."""

import json
import os
import pathlib
from typing import Any

import jsonschema
import pytest
import yaml

from lamb_tpu.launch import jobset
from lamb_tpu.launch.pod import make_pod
from tests.raising import rejected

SCHEMA = json.loads((pathlib.Path(__file__).parent / "jobset_schema.json").read_text())
TRAIN = ["--config=digits", "--workdir=gs://bucket/my run"]
LONG = "b" * 50


def manifest(
    topology: str,
    max_restarts: int = 3,
    train: tuple[str, ...] = (),
    account: str | None = None,
    **options: Any,
):
    name = options.pop("name", "bert")
    pod = make_pod("jobset", topology, name, [*TRAIN, *train], image="image:1", **options)
    return yaml.safe_load(jobset.manifest(pod, max_restarts, account))


def array(count: int, train: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    module = "lamb_tpu.reproduce"
    given = {"topology_name": "v6e-8", "name": "mnist", "image": "image:1"} | options
    words = ["run", "lamb/mnist", "--records=gs://bucket/my records", *train]
    pod = make_pod("jobset", train=words, module=module, **given)
    return yaml.safe_load(jobset.manifest(pod, 3, None, count, module))


def job(actual: dict[str, Any]) -> dict[str, Any]:
    return actual["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_spec(actual: dict[str, Any]) -> dict[str, Any]:
    return job(actual)["template"]["spec"]


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
        ("tpu7x-8", "tpu7x", "2x2x1", 1, 4),
        ("tpu7x-128", "tpu7x", "4x4x4", 16, 4),
    ],
)
def test_every_generation(
    topology: str, accelerator: str, shape: str, hosts: int, chips: int
) -> None:
    actual = manifest(topology)
    jsonschema.validate(actual, SCHEMA)
    assert pod_spec(actual)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": shape,
    }
    (container,) = pod_spec(actual)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert job(actual)["completions"] == job(actual)["parallelism"] == hosts


def test_several_spot_slices() -> None:
    actual = manifest("v6e-256", slices=2, spot=True)
    jsonschema.validate(actual, SCHEMA)
    assert actual["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert pod_spec(actual)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod_spec(actual)["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert actual["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }


def test_preemptions_restart_without_a_count() -> None:
    actual = manifest("v4-8", max_restarts=7)
    policy = actual["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # A job that one of the rules below ends has this failure reason.
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    exits, conditions = job(actual)["podFailurePolicy"]["rules"]
    assert exits["onExitCodes"]["values"] == [os.EX_TEMPFAIL, 143]
    names = [container["name"] for container in pod_spec(actual)["containers"]]
    assert exits["onExitCodes"]["containerName"] in names
    assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # All other failures count, and no pod restarts alone.
    assert job(actual)["backoffLimit"] == 0 and pod_spec(actual)["restartPolicy"] == "Never"


def test_arguments_are_escaped() -> None:
    """Every $ is doubled, because Kubernetes expands $(NAME) as a variable and $$ to $."""
    train = ("--a=two words", "--b=$(HOME) $$ $x", '--c=it\'s "both"\n', "--d=yes", "--e: 1")
    command = pod_spec(manifest("v4-8", train=train))["containers"][0]["command"]
    assert command[:4] == ["python", "-u", "-m", "lamb_tpu.train"]
    expanded = [item.replace("$$", "$") for item in command[4:]]
    assert expanded == [*TRAIN, *train]
    assert command[7] == "--b=$$(HOME) $$$$ $$x"


def test_pods_have_the_account_and_the_devices() -> None:
    assert "serviceAccountName" not in pod_spec(manifest("v4-8"))
    actual = manifest("v4-8", account="lamb-tpu")
    jsonschema.validate(actual, SCHEMA)
    assert pod_spec(actual)["serviceAccountName"] == "lamb-tpu"
    # Only root may open the TPU devices.
    assert pod_spec(actual)["containers"][0]["securityContext"] == {"runAsUser": 0}


def test_an_array_is_an_indexed_job() -> None:
    actual = array(12, ("--b=$(HOME)",), slices=4)
    jsonschema.validate(actual, SCHEMA)
    assert (job(actual)["completions"], job(actual)["parallelism"]) == (12, 4)
    assert job(actual)["completionMode"] == "Indexed"
    # A failed trial is restarted and does not affect the others; preemptions do not count.
    assert job(actual)["backoffLimitPerIndex"] == 3 and "backoffLimit" not in job(actual)
    assert [rule["action"] for rule in job(actual)["podFailurePolicy"]["rules"]] == ["Ignore"] * 2
    assert actual["spec"]["failurePolicy"] == {"maxRestarts": 0}
    (replicated,) = actual["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    # Pods of one job may run on any node, and do not form a slice.
    assert "annotations" not in actual["metadata"]
    assert actual["spec"]["network"] == {"enableDNSHostnames": False}
    command = pod_spec(actual)["containers"][0]["command"]
    assert command == [
        *"python -u -m lamb_tpu.reproduce run lamb/mnist".split(),
        "--records=gs://bucket/my records",
        "--b=$$(HOME)",
        "--index=$(JOB_COMPLETION_INDEX)/12",
    ]
    assert job(array(2, slices=9))["parallelism"] == 2


def test_the_schema_rejects_unknown_fields() -> None:
    actual = manifest("v4-8")
    pod_spec(actual)["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="'comand' was unexpected"):
        jsonschema.validate(actual, SCHEMA)


@pytest.mark.parametrize(
    "topology, options, key, problem",
    [
        (
            "v5p-256",
            {"name": LONG},
            "--name",
            f"names such as {LONG}-slice-0-31-xxxxx, which is longer",
        ),
        *(
            (topology, {"slices": 2}, "--slices", "GKE connects only slices of several hosts")
            for topology in ("v6e-8", "v4-8", "v3-32")
        ),
    ],
)
def test_errors(topology: str, options: dict[str, Any], key: str, problem: str) -> None:
    with rejected(key, problem=problem):
        manifest(topology, **options)


@pytest.mark.parametrize(
    "options, key, problem",
    [
        ({"topology_name": "v6e-256"}, "--topology", "has 64 hosts, and each job of an array runs"),
        ({"name": LONG}, "--name", f"names such as {LONG}-trial-0-11-xxxxx, which is longer"),
        ({"train": ("--records=records",)}, "--records", "is deleted with its pod"),
    ],
)
def test_errors_of_an_array(options: dict[str, Any], key: str, problem: str) -> None:
    with rejected(key, problem=problem):
        array(12, **options)
