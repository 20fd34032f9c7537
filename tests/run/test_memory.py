"""Runs that cannot fit into memory are rejected."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu.data import FieldSpec
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.mesh import make_mesh
from lamb_tpu.run import memory
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.raising import rejected

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SPEC = {"image": FieldSpec((8, 8), np.dtype(np.uint8)), "label": FieldSpec((), np.dtype(np.int32))}


def array(gigabytes: int, *axes: str) -> jax.ShapeDtypeStruct:
    """Returns an abstract float32 array of `gigabytes` GB, sharded over `axes`."""
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct((gigabytes * 250, 10**6), jnp.float32, sharding=sharding)


def message_of(state: object, rows: int = 1) -> str:
    with pytest.raises(UserError) as error:
        memory.check_memory(state, MESH, rows, SPEC)
    return str(error.value)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 24 * 10**9)


def test_state_on_devices_that_share_the_machine() -> None:
    assert message_of({"a": array(2), "b": array(2)}) == (
        "config.model: parameters and optimizer state need 29.8 GiB on the 8 device(s) of this "
        "machine, which has 22.4 GiB; make the model smaller, or split it over more devices by "
        "config.mesh, config.parallel.rules and config.parallel.optimizer_state"
    )
    # Larger arrays fit if they are sharded. Random keys are ignored.
    key = jax.eval_shape(lambda: jax.random.key(0))
    memory.check_memory({"a": array(4, "data"), "b": array(1), "key": key}, MESH, 1, SPEC)


def test_state_on_devices_with_separate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 15 * 10**9}

    ours, others = Device(), Device()
    monkeypatch.setattr(jax, "local_devices", lambda: [ours])
    mesh = SimpleNamespace(devices=np.array([others, ours]))
    memory.check_memory([array(80, "data")], mesh, 1, SPEC)
    with rejected("config.model", problem="need 18.6 GiB on a device, which has 14.0 GiB"):
        memory.check_memory([array(160, "data")], mesh, 1, SPEC)


def test_devices_that_are_only_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", list)
    memory.check_memory([array(10**6)], MESH, 10**12, SPEC)


def test_batch() -> None:
    # 64 bytes of image, 4 of label and 8 of index.
    assert message_of([], 10**9) == (
        "config.batch_size: 1,000,000,000 examples of a batch need 70.8 GiB on this machine, which "
        "has 22.4 GiB; use a smaller batch or more machines"
    )
    memory.check_memory([], MESH, 3 * 10**8, SPEC)


def test_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.undo()
    machine = memory.host_bytes()
    assert 2**28 < machine < 2**50
    for text, expected in (("max\n", machine), ("1000000\n", 10**6)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "memory.max"), "/nowhere"))
        assert memory.host_bytes() == expected or (
            text == "max\n" and memory.host_bytes() >= machine
        )


def test_run_is_rejected_before_anything_is_allocated(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    for changes, message in (
        ({"model__hidden_sizes": (2**24,)}, r"state need [\d,.]+ GiB on the 8 device"),
        ({"batch_size": 2 * 10**9}, "config.batch_size: 2,000,000,000 examples"),
        ({"model__hidden_sizes": (1,) * 10_001}, "hidden_sizes has 10,001 items; use at most"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(tiny.digits(**changes), tmp_path / "run")
    with pytest.raises(UserError, match="num_layers=2000000000 is out of range; use at most 1,000"):
        prepare(tiny.bert(model__num_layers=2 * 10**9), tmp_path / "run")


def test_evaluation_does_not_need_a_batch_of_training() -> None:
    assert prepare(tiny.digits(batch_size=2 * 10**9), None, training=False)


def test_batches_of_a_call() -> None:
    spec = {"image": FieldSpec((1000,), np.dtype(np.uint8))}
    memory.check_call(50, 128, spec)
    problem = "100,000,000 batches of 128 examples need "
    with rejected("config.loop.updates_per_call", problem=problem, remedy="use a smaller number"):
        memory.check_call(10**8, 128, spec)


def test_a_share_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh({"data": -1})
    monkeypatch.setattr(memory, "_device_bytes", lambda device: 1000)
    assert memory.fits(20, 0.02, mesh) and not memory.fits(21, 0.02, mesh)
    assert not memory.fits(1, 0.0, mesh)
    # Devices of a CPU share the host's memory.
    monkeypatch.setattr(memory, "_device_bytes", lambda device: None)
    monkeypatch.setattr(memory, "host_bytes", lambda: 8000)
    assert memory.fits(500, 0.5, mesh) and not memory.fits(501, 0.5, mesh)
