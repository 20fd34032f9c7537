"""Tests that differing copies of an array, along any mesh axis, are detected and reported."""

import pathlib
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lamb_tpu.errors import UserError
from lamb_tpu.run.build import Run
from lamb_tpu.train import train
from lamb_tpu.watch.desync import _hash, _names, make_desync_check
from tests import tiny
from tests.raising import rejected

MESH = Mesh(
    np.array(jax.devices()[:8]).reshape(2, 4),
    ("data", "fsdp"),
    axis_types=(AxisType.Auto, AxisType.Auto),
)
SPECS = {
    "whole": PartitionSpec(),
    "over_fsdp": PartitionSpec(None, "fsdp"),
    "over_data": PartitionSpec("data"),
    "over_both": PartitionSpec(("data", "fsdp")),
}


def placed(spec: PartitionSpec, changes: dict[int, tuple]) -> jax.Array:
    """Makes an array on the mesh; flips one bit on each device in `changes`: {id: (position, bit)}."""
    array = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    sharding = NamedSharding(MESH, spec)
    parts = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        part = np.array(array[index])
        if device.id in changes:
            place, bit = changes[device.id]
            part.view(np.uint32)[place] ^= np.uint32(1 << bit)
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def tree(**changes: dict[int, tuple]) -> dict[str, Any]:
    return {"layer": {name: placed(spec, changes.get(name, {})) for name, spec in SPECS.items()}}


def test_equal_copies() -> None:
    check = make_desync_check(tree(), MESH)
    check(tree(), 3)
    check(jax.tree.map(lambda leaf: leaf + 1, tree()), 4)  # the values do not matter


@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize("name", ["whole", "over_fsdp"])
def test_one_bit_on_one_device_is_detected(name: str, bit: int) -> None:
    check = make_desync_check(tree(), MESH)
    problem = "differ between devices: device 5 of process 0 differs from the majority"
    if name == "over_fsdp":  # each shard has only two copies, so there is no majority
        problem = "device 1 of process 0 against device 5 of process 0"
    with rejected(f"after update 7 the copies of layer/{name}", ..., problem) as error:
        check(tree(**{name: {5: ((3, 1), bit)}}), 7)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "others, output",
    [
        ((5,), "device 5 of process 0 differs from the majority"),
        ((4, 5), "devices 4, 5 of process 0 differ from the majority"),
        ((3, 5), "devices 1, 7 of process 0 against devices 3, 5 of process 0"),
    ],
)
def test_majority_among_the_copies_of_a_shard(others: tuple[int, ...], output: str) -> None:
    mesh = Mesh(MESH.devices.reshape(4, 2), ("data", "fsdp"), axis_types=MESH.axis_types)
    # Even devices hold the first half, odd devices the second: four copies of each.
    parts = [
        jax.device_put(np.full(2, device.id % 2 + 10.0 * (device.id in others)), device)
        for device in mesh.devices.ravel()
    ]
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    array = jax.make_array_from_single_device_arrays((4,), sharding, parts)
    with rejected("after update 1 the copies of w", ..., output):
        make_desync_check({"w": array}, mesh)({"w": array}, 1)


def test_first_array_is_named_and_the_others_counted() -> None:
    broken = tree(whole={2: ((0, 0), 4)}, over_fsdp={0: ((0, 0), 4)}, over_data={7: ((0, 0), 4)})
    with rejected("*(and of 2 more)", ..., "differ between devices:"):
        make_desync_check(tree(), MESH)(broken, 1)


def test_single_copies_are_not_compared() -> None:
    make_desync_check(tree(), MESH)(tree(over_both={3: ((0, 0), 1)}), 1)
    alone = {"w": placed(SPECS["over_both"], {})}
    make_desync_check(alone, MESH)(alone, 1)


@pytest.mark.parametrize(
    "count, output",
    [
        (8, "device 0 of process 0 against device 1 of process 0 against 6 further values"),
        (2, "devices 0, 2, 4, 6 of process 0 against devices 1, 3, 5, 7 of process 0"),
    ],
)
def test_no_majority(count: int, output: str) -> None:
    mesh = Mesh(MESH.devices.ravel(), ("data",), axis_types=(AxisType.Auto,))
    parts = [jax.device_put(np.float32(d.id % count), d) for d in mesh.devices]
    sharding = NamedSharding(mesh, PartitionSpec())
    array = jax.make_array_from_single_device_arrays((), sharding, parts)
    with rejected("after update 1 the copies of w", ..., output):
        make_desync_check({"w": array}, mesh)({"w": array}, 1)


def test_many_devices_are_counted_not_listed() -> None:
    devices = [SimpleNamespace(id=i, process_index=i // 6) for i in range(20)]
    output = "devices 0, 1, 2, 3, 4, 5 of process 0, devices 6, 7 of process 1 and 12 more"
    assert _names(devices) == output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 2)])
def test_the_hash_depends_on_every_element_and_its_position(
    dtype: str, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    array = np.asarray(jnp.asarray(rng.integers(0, 2, shape), dtype))
    hashed = jax.jit(_hash)
    seen = {int(hashed(array))}
    for place in np.ndindex(shape):
        changed = array.copy()
        changed[place] = 1 - changed[place]
        seen.add(int(hashed(changed)))
    assert len(seen) == 1 + array.size  # all of them differ
    flat = array.ravel()
    for left, right in zip(range(array.size), range(1, array.size)):
        if flat[left] != flat[right]:
            swapped = flat.copy()
            swapped[[left, right]] = flat[[right, left]]
            assert int(hashed(swapped.reshape(shape))) != int(hashed(array))


def test_hash_in_plain_arithmetic() -> None:
    """Compares `_hash` with the same hash in Python integers, which do not depend on a summation order."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    array = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    bits = [int(word) for word in array.view(np.uint32).ravel()]
    expected = sum(mix((b + 0x9E3779B9 * i) % 2**32) for i, b in enumerate(bits)) % 2**32
    assert int(jax.jit(_hash)(array)) == expected


def test_hash_distinguishes_equal_values_with_other_bits() -> None:
    zeros = np.zeros(3, np.float32)
    assert int(_hash(jnp.asarray(zeros))) != int(_hash(jnp.asarray(-zeros)))
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)  # both are NaN
    assert int(_hash(jnp.asarray(quiet[:1]))) != int(_hash(jnp.asarray(quiet[1:])))


def corrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Flips a bit of one parameter on device 5 after update `step`."""
    make_train_step = Run.make_train_step

    def made(run: Run, *more: Any, **named: Any) -> Any:
        train_step = make_train_step(run, *more, **named)

        def stepped(state: Any, batch: Any) -> Any:
            state, metrics = train_step(state, batch)
            if int(state.step) == step:
                kernel = state.params["output"]["kernel"]
                parts = [np.array(shard.data) for shard in kernel.addressable_shards]
                parts[5].view(np.uint32)[2, 3] ^= 1
                state.params["output"]["kernel"] = jax.make_array_from_single_device_arrays(
                    kernel.shape,
                    kernel.sharding,
                    [jax.device_put(p, s.device) for p, s in zip(parts, kernel.addressable_shards)],
                )
            return state, metrics

        stepped.lower = train_step.lower
        return stepped

    monkeypatch.setattr(Run, "make_train_step", made)


@pytest.mark.long
@pytest.mark.parametrize(
    "every, backend, actual", [("100 steps", "jit", 8), ("3 steps", "shard_map", 6)]
)
def test_a_run_ends_before_it_saves_differing_copies(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, every: str, backend: str, actual: int
) -> None:
    """Copies are also compared before each save; the update itself neither detects nor repairs the error."""
    config = tiny.digits(guards__desync_every=every, parallel__backend=backend)
    corrupt_at(monkeypatch, 5)
    message = f"after update {actual} the copies of .*device 5 of process 0 differs from the major"
    with pytest.raises(UserError, match=message):
        train(config, tmp_path, quiet=True)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4"}
    monkeypatch.undo()
    train(config, tmp_path, quiet=True)  # from the checkpoint of update 4, with no fault


@pytest.mark.long
def test_two_processes_report_the_parameter(tmp_path: pathlib.Path) -> None:
    launched = tiny.command(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        "--devices-per-process=2",
        "--module=tests.job",
        "--",
        "desync",
        str(tmp_path),
    )
    logs = [(tmp_path / f"{index}.txt").read_text() for index in (0, 1)]
    assert launched.returncode == 0, launched.stderr
    for log in logs:  # both processes report the same error
        assert re.fullmatch(
            r"equal\nafter update 2 the copies of dense/kernel differ .*: device \d+ of process 1 "
            r"differs from the majority\. .*\nafter update 3 the copies of dense/bias differ .*: "
            r"devices \d+, \d+ of process 0 against devices \d+, \d+ of process 1\. .*\n",
            log,
        ), log
