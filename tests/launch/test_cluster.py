"""Steps that create a GKE cluster, with fake gcloud, kubectl and docker, and real git."""

import pytest

from lamb_tpu.files import buckets
from lamb_tpu.launch import __main__ as launch
from lamb_tpu.launch import cluster, compute, local_steps
from lamb_tpu.launch import steps as steps_lib
from lamb_tpu.launch.pod import make_pod
from tests.launch import shell
from tests.launch.fakes import Cloud
from tests.raising import rejected

ZONE, PROJECT, BUCKET = "us-east5-a", "my-project", "gs://my-bucket"
THERE = ["--location=us-east5", f"--project={PROJECT}"]
NODES = f"tpus-nodes@{PROJECT}.iam.gserviceaccount.com"


def planned(
    topology: str = "v6e-16",
    slices: int = 1,
    image: str | None = "a/b:1",
    capacity: compute.Capacity = compute.Capacity(),
    **changed: str,
) -> list[steps_lib.Step]:
    given = {"name": "tpus", "zone": ZONE, "project": PROJECT, "bucket": BUCKET} | changed
    pod = make_pod(
        "cluster", topology, given.pop("name"), ["--workdir=gs://bucket/runs"], slices, image=image
    )
    return cluster.steps(pod, given.pop("zone"), capacity=capacity, **given)


def pools(cloud: Cloud) -> list[list[str]]:
    """Returns the calls that create node pools, without the flags that all pools share."""
    shared = [
        "--cluster=tpus",
        *THERE,
        f"--node-locations={ZONE}",
        f"--service-account={NODES}",
        "--scopes=cloud-platform",
        "--workload-metadata=GKE_METADATA",
    ]
    actual = [call for call in cloud.calls() if call[:3] == ["container", "node-pools", "create"]]
    assert all(set(shared) <= set(call) for call in actual)
    return [[word for word in call[3:] if word not in shared] for call in actual]


def test_from_a_checkout_to_a_cluster(cloud: Cloud, capfd: pytest.CaptureFixture) -> None:
    steps = planned(image=None)
    assert steps_lib.run(steps, 1, True, ["python"]) == 0, capfd.readouterr().err
    calls = cloud.calls()
    assert [call[:4] for call in calls] == [
        ["services", "enable", "artifactregistry.googleapis.com", "compute.googleapis.com"],
        ["artifacts", "repositories", "create", "tpus"],
        ["auth", "configure-docker", "us-east5-docker.pkg.dev", "--quiet"],
        ["iam", "service-accounts", "create", "tpus-nodes"],
        ["projects", "add-iam-policy-binding", PROJECT, f"--member=serviceAccount:{NODES}"],
        ["artifacts", "repositories", "add-iam-policy-binding", "tpus"],
        ["container", "clusters", "create", "tpus"],
        ["container", "clusters", "get-credentials", "tpus"],
        ["projects", "describe", PROJECT, "--format=value(projectNumber)"],
        ["storage", "buckets", "add-iam-policy-binding", BUCKET],
        ["storage", "buckets", "add-iam-policy-binding", BUCKET],
        ["container", "node-pools", "create", "tpus-0"],
        ["container", "clusters", "delete", "tpus"],
    ]
    # The image contains the commit, and its tag is the hash of the commit.
    image = f"us-east5-docker.pkg.dev/{PROJECT}/tpus/lamb_tpu:{local_steps.commit()}"
    assert cloud.called("docker") == [
        ["build", "--platform=linux/amd64", f"--tag={image}", "-"],
        ["push", image],
    ]
    assert (cloud.folder / "context" / "code.py").read_text() == "1\n"
    # Nodes may only write logs and pull images.
    roles = [word for call in calls[3:6] for word in call if word.startswith("--role=")]
    assert roles == [
        "--role=roles/container.defaultNodeServiceAccount",
        "--role=roles/artifactregistry.reader",
    ]
    assert {
        f"--workload-pool={PROJECT}.svc.id.goog",
        f"--service-account={NODES}",
        f"--node-locations={ZONE}",
        *THERE,
    } <= set(calls[6])
    # The pods' service account may use the bucket.
    member = (
        "--member=principal://iam.googleapis.com/projects/1234567/locations/global/"
        f"workloadIdentityPools/{PROJECT}.svc.id.goog/subject/ns/default/sa/lamb-tpu"
    )
    assert [call[4:] for call in calls[9:11]] == [
        [member, f"--role={role}"] for role in buckets.ROLES
    ]
    assert [call[:3] for call in cloud.called("kubectl")] == [
        ["apply", "--server-side", f"--filename={cluster.JOBSET}"],
        ["wait", "deployment/jobset-controller-manager", "--namespace=jobset-system"],
        ["create", "serviceaccount", "lamb-tpu"],
        ["get", "nodes", "--label-columns=cloud.google.com/gke-tpu-topology"],
    ]


@pytest.mark.parametrize(
    "topology, slices, expected",
    [
        ("v3-8", 1, ["tpus-0 --machine-type=ct3-hightpu-4t --num-nodes=1"]),
        ("v3-32", 1, ["tpus-0 --machine-type=ct3p-hightpu-4t --tpu-topology=4x4 --num-nodes=4"]),
        ("v4-16", 1, ["tpus-0 --machine-type=ct4p-hightpu-4t --tpu-topology=2x2x2 --num-nodes=2"]),
        ("v5e-8", 3, ["tpus-0 --machine-type=ct5lp-hightpu-8t --num-nodes=3"]),
        ("v5e-16", 1, ["tpus-0 --machine-type=ct5lp-hightpu-4t --tpu-topology=4x4 --num-nodes=4"]),
        ("v5p-16", 1, ["tpus-0 --machine-type=ct5p-hightpu-4t --tpu-topology=2x2x2 --num-nodes=2"]),
        (
            "v6e-16",
            2,
            [
                f"tpus-{n} --machine-type=ct6e-standard-4t --tpu-topology=4x4 --num-nodes=4"
                for n in range(2)
            ],
        ),
        ("v6e-1", 1, ["tpus-0 --machine-type=ct6e-standard-1t --num-nodes=1"]),
        (
            "tpu7x-8",
            1,
            [
                "tpus-0 --machine-type=tpu7x-standard-4t --disk-type=hyperdisk-balanced --num-nodes=1"
            ],
        ),
        (
            "tpu7x-16",
            1,
            [
                "tpus-0 --machine-type=tpu7x-standard-4t --tpu-topology=2x2x2 "
                "--placement-policy=tpus --disk-type=hyperdisk-balanced --num-nodes=2"
            ],
        ),
    ],
)
def test_node_pools_of_every_generation(
    cloud: Cloud, topology: str, slices: int, expected: list[str], capfd: pytest.CaptureFixture
) -> None:
    steps = planned(topology, slices)
    start = next(
        n
        for n, step in enumerate(steps, 1)
        if "accounts" not in step.title and (" policy " in step.title or "host" in step.title)
    )
    assert steps_lib.run(steps, start, True, ["python"]) == 0, capfd.readouterr().err
    assert list(map(" ".join, pools(cloud))) == expected
    policies = [call for call in cloud.calls() if call[:2] == ["compute", "resource-policies"]]
    assert [call[2:] for call in policies] == (
        []
        if topology != "tpu7x-16"
        else [
            [
                *"create workload-policy tpus --region=us-east5".split(),
                f"--project={PROJECT}",
                "--type=HIGH_THROUGHPUT",
                "--accelerator-topology=2x2x2",
            ],
            ["delete", "tpus", "--region=us-east5", f"--project={PROJECT}", "--quiet"],
        ]
    )


@pytest.mark.parametrize(
    "capacity, flags",
    [
        (compute.Capacity(spot=True), ["--num-nodes=4", "--spot"]),
        (
            compute.Capacity(reservation="r 1"),
            ["--num-nodes=4", "--reservation-affinity=specific", "--reservation=r 1"],
        ),
        (
            compute.Capacity(flex_start="7d"),
            [
                *"--flex-start --max-run-duration=7d --reservation-affinity=none".split(),
                *"--enable-autoscaling --num-nodes=0 --min-nodes=0 --max-nodes=4".split(),
                "--location-policy=ANY",
            ],
        ),
    ],
)
def test_capacity(
    cloud: Cloud, capacity: compute.Capacity, flags: list[str], capfd: pytest.CaptureFixture
) -> None:
    steps = planned(capacity=capacity)
    start = next(n for n, step in enumerate(steps, 1) if "hosts" in step.title)
    assert steps_lib.run(steps, start, False, ["python"]) == 0
    (pool,) = pools(cloud)
    assert pool[3:] == flags
    assert "the machines cost money until this deletes them" in capfd.readouterr().err


def test_failed_pool_fails_the_step(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (step,) = (step for step in planned(slices=3) if "hosts" in step.title)
    monkeypatch.setenv("FAILS", "2")
    assert steps_lib.run([step], 1, False, []) == 1
    assert "failed with status 7" in capfd.readouterr().err and len(cloud.calls()) == 2


@pytest.mark.parametrize(
    "topology, slices, image",
    [("v6e-8", 1, "a/b:1"), ("v6e-256", 2, None), ("tpu7x-128", 1, "a/b:1")],
)
def test_shells_read_all_steps(cloud: Cloud, topology: str, slices: int, image: str | None) -> None:
    shell.checked(
        steps_lib.script(planned(topology, slices, image, compute.Capacity(spot=True)), 1)
    )


WORDS = [
    "",
    " ",
    "a b",
    "it's",
    '"',
    "$(touch pwned)",
    "`id`",
    "-x",
    "--help",
    "a\nb",
    "\x1b[2J",
    "a;b",
    "a/../b",
    "ä",
    "a" * 100,
]


HARMLESS = {"image": ("a/../b", "a" * 100), "bucket": ("a" * 100,), "project": ("a" * 100,)}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["name", "project", "bucket", "account", "image"])
def test_invalid_words_are_rejected(name: str, word: str) -> None:
    if word in HARMLESS.get(name, ()):
        return
    image = word if name == "image" else "a/b:1"
    given = {} if name == "image" else {name: f"gs://{word}" if name == "bucket" else word}
    option = {"account": "service-account"}.get(name, name)
    with rejected(f"--{option}") as error:
        planned(image=image, **given)
    output = str(error.value)
    assert "\n" not in output and "\x1b" not in output


def test_impossible_capacity() -> None:
    with rejected("--flex-start", problem="is not a duration"):
        planned(capacity=compute.Capacity(flex_start="7d; id"))


COMMAND = [
    *"cluster --topology=v6e-8 --name=tpus".split(),
    f"--zone={ZONE}",
    f"--project={PROJECT}",
    f"--bucket={BUCKET}",
    "--image=a/b:1",
]


def test_command_prints_the_steps(capsys: pytest.CaptureFixture) -> None:
    assert launch.main(COMMAND) == 0
    text = capsys.readouterr().out
    assert text.startswith("# 1. enable the services\ngcloud services enable ")
    assert "docker build" not in text and "\n# 9. delete the cluster" in text
    with rejected("the arguments after --", problem="the kind cluster starts no run"):
        launch.main([*COMMAND, "--", "--config=digits"])
    with rejected("--topology", "v2-8", "GKE has no TPU v2", "use the kind tpu-vm or queued-reso"):
        launch.main([*COMMAND, "--topology=v2-8"])
    with rejected("--zone", "x", "is not a zone", "give one such as us-east5-a"):
        launch.main([*COMMAND, "--zone=x"])
