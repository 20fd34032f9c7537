"""Steps that create a GKE cluster for JobSets: image, cluster, accounts, TPU node pools.

Each slice of several hosts is a separate node pool; all single-host slices form one pool. Pods write
to a bucket as a Kubernetes service account, which Workload Identity Federation maps to IAM. Nodes
have an account that may only write logs and pull images.

Sources, read on 2026-11-27: docs.cloud.google.com/kubernetes-engine/docs/how-to/
dws-flex-start-training-tpu (flags of flex-start), /kubernetes-engine/docs/how-to/tpu-multislice,
/kubernetes-engine/security/configure-node-service-accounts; the pull requests AI-Hypercomputer/xpk
825 of 2025-11-14 (a pool of one host takes no topology) and vllm-project/ci-infra 545 and 547 of
2026-09-11 (tpu7x takes a workload policy; sizes are for each zone); gcloud 528 for all flags.
"""

import re
import shlex

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch import compute, jobset, local_steps
from lamb_tpu.launch.generations import GENERATIONS
from lamb_tpu.launch.pod import Pod
from lamb_tpu.launch.steps import Step, command, in_turn, join

ACCOUNT = "lamb-tpu"  # Kubernetes service account of the pods, by default
NAMESPACE = "default"
# This version has the failure policy rules with which `jobset` restarts preempted runs.
JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
_CONTROLLER = in_turn(
    command("kubectl apply --server-side", f"--filename={JOBSET}"),
    command(
        "kubectl wait deployment/jobset-controller-manager --namespace=jobset-system",
        "--for=condition=Available",
        "--timeout=5m",
    ),
)
# Machine type for the controllers of the cluster, not for training.
_SYSTEM_MACHINE = "e2-standard-4"
_SERVICES = (
    "artifactregistry.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
)
_BUILT = "lamb_tpu"  # name of the image in its repository
_LONGEST_NAME = 24  # the id of the nodes' account, NAME-nodes, may have at most 30 characters
_PROJECT = r"[a-z0-9][a-z0-9.:-]*"
# A name, perhaps with a tag or digest. Commands would read a name that starts with a hyphen as an
# option.
_IMAGE = r"[a-z0-9][\w./:@-]*"
_BUCKET = r"gs://[a-z0-9][a-z0-9._-]{1,221}"  # names of up to 222 characters, with dots


def check_image(image: str) -> None:
    """Raises a UserError for a text that cannot be the name of a container image."""
    if not re.fullmatch(_IMAGE, image, re.ASCII):
        raise UserError("--image", image, "is not an image name", "use the form REGISTRY/NAME:TAG")


def steps(
    pod: Pod,
    zone: str,
    project: str,
    bucket: str,
    capacity: compute.Capacity,
    account: str = ACCOUNT,
) -> list[Step]:
    """Returns the steps that create a cluster, followed by the step that deletes it.

    Args:
      pod: the slices. The cluster gets the name of `pod`. If `pod` has an image, no image is built.
      zone: Google's zone, such as 'us-east5-a'; the cluster is in the region of this zone.
      project: Google's project.
      bucket: bucket to which the pods get access, such as 'gs://BUCKET'.
      capacity: provisioning of the machines.
      account: Kubernetes service account of the pods.

    Raises:
      UserError: an argument is invalid, or an image must be built but there is no git checkout.
    """
    _check(pod, project, bucket, account)
    capacity.check()
    region = compute.region_of(zone)
    there = [f"--location={region}", f"--project={project}"]
    nodes = f"{pod.name}-nodes@{project}.iam.gserviceaccount.com"
    enable = command("gcloud services enable", *_SERVICES, f"--project={project}")
    create = command(
        "gcloud container clusters create",
        pod.name,
        *there,
        f"--node-locations={zone}",
        "--release-channel=regular",
        f"--workload-pool={project}.svc.id.goog",
        f"--machine-type={_SYSTEM_MACHINE}",
        "--num-nodes=1",
        f"--service-account={nodes}",
    )
    use = command("gcloud container clusters get-credentials", pod.name, *there)
    show = command(
        "kubectl get nodes --label-columns=cloud.google.com/gke-tpu-topology",
        f"--selector=cloud.google.com/gke-tpu-accelerator={jobset.accelerator(pod)}",
    )
    delete = command("gcloud container clusters delete", pod.name, *there, "--quiet")
    policies = []
    if _has_policy(pod):
        policies = [compute.policy(pod, region, project)]
        where = [f"--region={region}", f"--project={project}"]
        delete = in_turn(
            delete, command("gcloud compute resource-policies delete", pod.name, *where, "--quiet")
        )
    return [
        Step("enable the services", enable, billed=False),
        *(_image(pod, region, project) if pod.image is None else []),
        *_accounts(pod, nodes, there, project),
        Step("create the cluster", create),
        Step("let kubectl use the cluster", use),
        Step("install the JobSet controller", _CONTROLLER),
        Step("let the pods use the bucket", _access(project, bucket, account)),
        *policies,
        Step(f"create {pod.description}", _pools(pod, zone, there, nodes, capacity)),
        Step("show the nodes with TPUs", show),
        Step("delete the cluster; the images and the accounts stay", delete, deletes=True),
    ]


def built_image(name: str, region: str, project: str) -> str:
    """Returns the name of the image that the steps build, without its tag."""
    # In a domain-scoped project, example.com:project, the colon becomes a slash.
    return f"{region}-docker.pkg.dev/{project.replace(':', '/')}/{name}/{_BUILT}"


def _check(pod: Pod, project: str, bucket: str, account: str) -> None:
    if len(pod.name) > _LONGEST_NAME:
        raise UserError(
            "--name", pod.name, "is too long", f"use at most {_LONGEST_NAME} characters"
        )
    if not re.fullmatch(_PROJECT, project):
        raise UserError("--project", project, "is not a project id", "see `gcloud projects list`")
    if not re.fullmatch(_BUCKET, bucket.rstrip("/")):
        raise UserError("--bucket", bucket, "is not a bucket", "give gs://BUCKET")
    if pod.image is not None:
        check_image(pod.image)
    check_account(account)


def check_account(account: str) -> None:
    """Raises a UserError for a text that cannot be the name of a Kubernetes service account."""
    if len(account) > 63 or not re.fullmatch(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?", account):
        raise UserError(
            "--service-account", account, "is not a valid name", "use a-z, 0-9 and hyphens"
        )


def _image(pod: Pod, region: str, project: str) -> list[Step]:
    image = f"{built_image(pod.name, region, project)}:{local_steps.commit()}"
    create = command(
        "gcloud artifacts repositories create",
        pod.name,
        f"--location={region}",
        f"--project={project}",
        "--repository-format=docker",
    )
    push = in_turn(
        command("gcloud auth configure-docker", image.partition("/")[0], "--quiet"),
        command("docker push", image),
    )
    return [
        Step("create the repository of images", create, billed=False),
        local_steps.build(image),
        Step("push the image", push, billed=False),
    ]


def _accounts(pod: Pod, nodes: str, there: list[str], project: str) -> list[Step]:
    member = f"--member=serviceAccount:{nodes}"
    create = command(
        "gcloud iam service-accounts create", f"{pod.name}-nodes", f"--project={project}"
    )
    log = command(
        "gcloud projects add-iam-policy-binding",
        project,
        member,
        "--role=roles/container.defaultNodeServiceAccount",
        "--condition=None",
    )
    pull = command(
        "gcloud artifacts repositories add-iam-policy-binding",
        pod.name,
        *there,
        member,
        "--role=roles/artifactregistry.reader",
    )
    commands = in_turn(create, log, *([pull] if pod.image is None else []))
    return [Step("create the account of the nodes", commands, billed=False)]


def _access(project: str, bucket: str, account: str) -> str:
    """Returns the command that creates the pods' account and gives it access to the bucket."""
    number = command("gcloud projects describe", project, "--format=value(projectNumber)")
    # Only Google knows the project number, so the shell queries it.
    member = (
        'member="principal://iam.googleapis.com/projects/$number/locations/global/'
        f'workloadIdentityPools/{project}.svc.id.goog/subject/ns/{NAMESPACE}/sa/{account}"'
    )
    bind = command("gcloud storage buckets add-iam-policy-binding", bucket.rstrip("/"))
    return in_turn(
        command("kubectl create serviceaccount", account, f"--namespace={NAMESPACE}"),
        f"number=$({number})",
        member,
        *(f'{bind} \\\n    --member="$member" --role={role}' for role in buckets.ROLES),
    )


def _has_policy(pod: Pod) -> bool:
    return pod.hosts > 1 and GENERATIONS[pod.topology.version].has_policy


def _pools(pod: Pod, zone: str, there: list[str], nodes: str, capacity: compute.Capacity) -> str:
    generation = GENERATIONS[pod.topology.version]
    number = pod.hosts if pod.hosts > 1 else pod.slices
    flags = [
        f"--cluster={pod.name}",
        *there,
        f"--node-locations={zone}",
        f"--machine-type={generation.machine_type(pod.chips_per_host, pod.hosts)}",
        # For a single host the machine type determines the shape.
        *([f"--tpu-topology={pod.shape}"] if pod.hosts > 1 else []),
        *([f"--placement-policy={pod.name}"] if _has_policy(pod) else []),
        *([f"--disk-type={generation.disk_type}"] if generation.disk_type else []),
        f"--service-account={nodes}",
        "--scopes=cloud-platform",
        "--workload-metadata=GKE_METADATA",
    ]
    if capacity.flex_start is not None:
        flags += [
            "--flex-start",
            f"--max-run-duration={capacity.flex_start}",
            "--reservation-affinity=none",
            "--enable-autoscaling",
            "--num-nodes=0",
            "--min-nodes=0",
            f"--max-nodes={number}",
            "--location-policy=ANY",
        ]
    else:
        flags.append(f"--num-nodes={number}")
    if capacity.spot:
        flags.append("--spot")
    if capacity.reservation is not None:
        flags += ["--reservation-affinity=specific", f"--reservation={capacity.reservation}"]
    create = ["gcloud", "container", "node-pools", "create"]
    if pod.hosts == 1 or pod.slices == 1:
        return join(*create, f"{pod.name}-0", *flags)
    each = join(*create) + f' "{shlex.quote(pod.name)}-$number" \\\n    ' + join(*flags)
    return f"(for number in $(seq 0 {pod.slices - 1}); do\n{each} || exit\ndone)"
