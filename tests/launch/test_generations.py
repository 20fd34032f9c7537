"""The table of generations agrees with the planner's slices and with the checks of the launcher."""

import math

from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.slices import shapes
from lamb_tpu.launch import generations
from lamb_tpu.launch.pod import make_pod
from tests.tiny import ROOT

SLICES = {
    "v2": ["v2-8", "v2-32"],
    "v3": ["v3-8", "v3-2048"],
    "v4": ["v4-8", "v4-128"],
    "v5e": ["v5e-1", "v5e-4", "v5e-8", "v5e-256"],
    "v5p": ["v5p-8", "v5p-256"],
    "v6e": ["v6e-1", "v6e-4", "v6e-8", "v6e-256"],
    "tpu7x": ["tpu7x-8", "tpu7x-128"],
}


def test_every_planned_generation_can_be_rented() -> None:
    assert set(generations.GENERATIONS) == set(SLICES)
    for version, names in SLICES.items():
        assert generations.interfaces(version)
        for name in names:
            assert topology_lib.topology(name).version == version


def test_interfaces() -> None:
    assert generations.interfaces("v2") == ["tpu-vm", "queued-resource"]
    assert generations.interfaces("v4") == ["jobset", "tpu-vm", "queued-resource"]
    assert generations.interfaces("v6e") == ["compute", "jobset", "tpu-vm", "queued-resource"]
    assert generations.interfaces("tpu7x") == ["compute", "jobset"]


def test_table_has_hosts_and_chips() -> None:
    rows = [row.split(" | ") for row in generations.table().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| {version}" for version in SLICES]
    for (_, _, chips, hosts, *_), version in zip(rows, SLICES):
        largest = max(shapes(version))
        kind = generations.interfaces(version)[0]
        pods = [
            make_pod(kind, f"{version}-{size}", "a", ["--workdir=gs://b/x"])
            for size in (largest, *sorted(shapes(version))[:3])
        ]
        assert hosts == f"1 to {pods[0].hosts:,}"
        assert chips.split(", ")[-1] == str(max(pod.chips_per_host for pod in pods))
        assert str(pods[0].chips_per_host) in chips.split(", ")
        assert pods[0].hosts * pods[0].chips_per_host == math.prod(shapes(version)[largest])


def test_page_has_the_table() -> None:
    page = (ROOT / "lamb_tpu" / "launch" / "README.md").read_text()
    assert f"\n\n{generations.table()}\n" in page
