"""JAX detects the processes of a TPU slice on a TPU VM and on GKE."""

import http.server
import os
import threading
import time
from collections.abc import Iterator

import pytest
from jax._src.clusters import cloud_tpu_cluster

from lamb_tpu.cluster import distributed

PORT = cloud_tpu_cluster.coordinator_port
ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"


class Metadata(http.server.BaseHTTPRequestHandler):
    values: dict[str, str] = {}

    def do_GET(self) -> None:
        text = self.values.get(self.path.removeprefix(ATTRIBUTES))
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "<p>Error 404: Not Found</p>").encode())

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    for name in list(os.environ):
        if name.startswith(("JAX_", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between requests
    monkeypatch.setattr(Metadata, "values", {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield Metadata.values
        server.shutdown()


def detected() -> tuple[str | None, int | None, int | None]:
    return distributed._detect(None, None, None, 5)


@pytest.mark.parametrize("endpoints", ["127.0.0.1,10.0.0.2", "a:0:127.0.0.1,b:1:10.0.0.2"])
def test_hosts_of_a_tpu_vm(metadata: dict[str, str], endpoints: str) -> None:
    metadata |= {
        "agent-worker-number": "1",
        "worker-network-endpoints": endpoints,
        "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\n",
    }
    assert detected() == (f"127.0.0.1:{PORT}", 2, 1)


def test_one_host_is_a_run_of_one_process(metadata: dict[str, str]) -> None:
    metadata |= {"agent-worker-number": "0", "worker-network-endpoints": "127.0.0.1", "tpu-env": ""}
    assert detected() == (f"127.0.0.1:{PORT}", 1, 0)
    distributed.initialize()  # must not join: process 0 would wait forever


def test_slices_of_a_queued_resource(metadata: dict[str, str]) -> None:
    """Process 0 and the coordinator are on the first host of the first slice."""
    metadata |= {
        "agent-worker-number": "1",
        "worker-network-endpoints": "10.0.0.3,10.0.0.4",
        "tpu-env": "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
        "MEGASCALE_COORDINATOR_ADDRESS: '127.0.0.1:8080'\n",
    }
    assert detected() == (f"127.0.0.1:{PORT}", 4, 3)


def test_pods_of_a_jobset(metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """GKE sets variables in the pods. Without variables for slices, there is one slice."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,bert-slice-0-1.bert")
    assert detected() == (f"localhost:{PORT}", 2, 1)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "3")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "2")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "localhost:8080")
    assert detected() == (f"localhost:{PORT}", 6, 5)
