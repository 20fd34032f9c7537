"""The page of BERT's plan on a pod; nothing is compiled."""

import json

from experiments.bert import pod_plan
from lamb_tpu.cost import topology
from lamb_tpu.plan.report import Plan


def test_pod_plan_page():
    made = Plan(
        topology=topology.topology("v3-8"), mesh={"data": 8}, hosts=1, batch_size=64,
        backend="shard_map", compile_seconds=1.0, fits=True, needed=2.0**30,
        cycles=94_000_000, collectives=(),
    )
    records = [pod_plan.record(made, 600, 128), pod_plan.record(made, 1200, 512)]
    text = pod_plan.page(json.loads(json.dumps(records)))
    assert "| 1 | 64 x 128 | yes | 1.0 | 100 | 600 | 1.0 | 0 MB |" in text
    assert "| both | | | | | 1,800 | 3.0 | |" in text
