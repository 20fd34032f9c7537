"""Cases as JSON, and their configs."""

from lamb_tpu.spec import parse
from tests.fuzz.case import Case, num_devices

OPTIMIZER = {"name": "lamb", "learning_rate": 0.01, "rules": [["kernel", {"decay": False}]]}
CASE = Case(
    "mlp",
    {"optimizer": OPTIMIZER, "ema.decay": 0.5},
    {"mesh.data": 2, "mesh.fsdp": 2, "parallel.rules": [["kernel$", "fsdp"]]},
    {"parallel.backend": "shard_map"},
)


def test_json() -> None:
    assert Case.from_json(CASE.to_json()) == CASE
    assert Case.from_json('{"family": "mlp"}') == Case("mlp")
    assert "\n" not in CASE.to_json()


def test_legs() -> None:
    first, second = map(parse, CASE.legs())
    assert first.ema.decay == second.ema.decay == 0.5
    assert dict(first.mesh) == {"data": 2, "fsdp": 2, "model": 1, "sequence": 1}
    assert first.parallel.rules == (("kernel$", "fsdp"),) and second.parallel.rules == ()
    assert (first.parallel.backend, second.parallel.backend) == ("jit", "shard_map")
    assert second.optimizer.get("rules") == (("kernel", {"decay": False}),)
    assert (num_devices(CASE.first), num_devices(CASE.second)) == (4, 1)


def test_features() -> None:
    assert set(CASE.features()) == {
        *("optimizer", "ema.decay", "first mesh.data", "first mesh.fsdp"),
        *("first parallel.rules", "second parallel.backend"),
    }
