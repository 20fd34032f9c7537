"""Runs that cannot fit are refused by arithmetic."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu.data import FieldSpec
from lamb_tpu.errors import UserError
from lamb_tpu.run import memory
from lamb_tpu.run.build import prepare
from tests import tiny

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SPEC = {"image": FieldSpec((8, 8), np.dtype(np.uint8)), "label": FieldSpec((), np.dtype(np.int32))}


def array(gigabytes: int, *axes: str) -> jax.ShapeDtypeStruct:
    """An array of so many gigabytes of float32."""
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct((gigabytes * 250, 10**6), jnp.float32, sharding=sharding)


def refusal(state: object, rows: int = 1) -> str:
    with pytest.raises(UserError) as error:
        memory.check_memory(state, MESH, rows, SPEC)
    return str(error.value)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 24 * 10**9)


def test_state_on_devices_that_share_the_machine() -> None:
    assert refusal({"a": array(2), "b": array(2)}) == (
        "the model's parameters and optimizer state need 29.8 GiB on the 8 device(s) of this "
        "machine, which has 22.4 GiB; make the model smaller, or split it over more devices by "
        "config.mesh, config.parallel.rules and config.parallel.optimizer_state"
    )
    # Split, the same arrays fit; random keys take no room worth a word.
    key = jax.eval_shape(lambda: jax.random.key(0))
    memory.check_memory({"a": array(4, "data"), "b": array(1), "key": key}, MESH, 1, SPEC)


def test_state_on_devices_with_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 15 * 10**9}

    ours, others = Device(), Device()
    monkeypatch.setattr(jax, "local_devices", lambda: [ours])
    mesh = SimpleNamespace(devices=np.array([others, ours]))
    memory.check_memory([array(80, "data")], mesh, 1, SPEC)
    with pytest.raises(UserError, match="need 18.6 GiB on a device, which has 14.0 GiB; make"):
        memory.check_memory([array(160, "data")], mesh, 1, SPEC)


def test_devices_that_are_only_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", list)
    memory.check_memory([array(10**6)], MESH, 10**12, SPEC)


def test_batch() -> None:
    # 64 bytes of image, 4 of label and 8 of the place in the order.
    assert refusal([], 10**9) == (
        "config.batch_size: 1,000,000,000 examples of a batch need 70.8 GiB on this machine, which "
        "has 22.4 GiB; make it smaller, or take more machines"
    )
    memory.check_memory([], MESH, 3 * 10**8, SPEC)


def test_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.undo()
    whole = memory.host_bytes()
    assert 2**28 < whole < 2**50
    for text, expected in (("max\n", whole), ("1000000\n", 10**6)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "memory.max"), "/nowhere"))
        assert memory.host_bytes() == expected or (text == "max\n" and memory.host_bytes() >= whole)


def test_run_is_refused_before_anything_is_made(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # nothing gets as far
    for changes, message in (
        ({"model__hidden_sizes": (10**10,)}, r"state need [\d,.]+ GiB on the 8 device"),
        ({"batch_size": 64 * 10**10}, "config.batch_size: 640,000,000,000 examples"),
        ({"model__hidden_sizes": (1,) * 10_001}, "hidden_sizes are 10,001 layers; .* most 10,000"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(tiny.digits(**changes), tmp_path / "run")
    with pytest.raises(UserError, match="num_layers is 2,000,000,000; it must be at most 10,000"):
        prepare(tiny.bert(model__num_layers=2 * 10**9), tmp_path / "run")


def test_evaluation_does_not_need_a_batch_of_training() -> None:
    assert prepare(tiny.digits(batch_size=64 * 10**10), None, training=False)
