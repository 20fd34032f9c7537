"""Compiled programs that only exchange gradients; rows.json stores their cycles and bytes.

A program only sums the gradient of a model, as a training step would. So the program's collectives are
those of the exchange, and its cycles are spent on casting, packing and adding.
"""

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.plan.rows import Phase
from lamb_tpu import overrides
from lamb_tpu.cost import hlo, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.traffic import Collective
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.plan.making import loader
from lamb_tpu.run.build import prepare
from lamb_tpu.spec import Spec, changed

FOLDER = pathlib.Path(__file__).parent
HOST_DEVICES = 8  # devices of a TPU v3 host: four chips of two cores
PER_DEVICE = 16  # examples per device: 32,768 on 2,048 devices
_LAST_STAGE = 10**9  # an update after any warm-up

# Exchanges with their fields in config.parallel.exchange. With per_leaf=False, which copies all
# arrays into one, onebit takes 1.8 times the cycles for ResNet-50 on 32 devices.
METHODS: dict[str, dict[str, Any]] = {
    "float32": {"name": "float32"},
    "bfloat16": {"name": "bfloat16"},
    "aps e4m3": {"name": "aps", "exponent_bits": 4, "mantissa_bits": 3},
    "aps e3m0": {"name": "aps", "exponent_bits": 3, "mantissa_bits": 0},
    "onebit": {"name": "onebit"},
    "dgc 0.1 %": {"name": "dgc", "ratio": 0.001},
    "powersgd rank 4": {"name": "powersgd", "rank": 4},
}


class Model(NamedTuple):
    """A model of the table.

    Attributes:
      step: the program of the training step; ../plan/rows.json has its computation time.
      exchanged: the recipe whose gradient is exchanged.
    """

    step: Phase
    exchanged: str


MODELS = {
    # Stacked layers give a gradient of 30 arrays instead of 398, which compiles in a tenth of the time.
    # The values are the same.
    "BERT-Large": Model(
        Phase("bert_pretrain:batch=32768,phase=1", {}, 1.0),
        "bert_pretrain:phase=1,scan,batch={batch}",
    ),
    "ResNet-50": Model(
        Phase(
            "imagenet_resnet:optimizer=lars,recipe=tpu,batch=32768", {"model.group_size": 128}, 1.0
        ),
        "imagenet_resnet:optimizer=lars,recipe=tpu,batch={batch}",
    ),
}
STEP_SLICE = "v3-2048"


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
      model: a key of `MODELS`.
      method: a key of `METHODS`.
      topology: name of the slice.
      inner: number of devices in each group that first sums gradients in float32; 1 if there are no groups.
    """

    model: str
    method: str
    topology: str
    inner: int = 1

    @property
    def key(self) -> str:
        """Name of the program's row, with the recipe and all options."""
        within = f", fsdp={self.inner}" * (self.inner > 1)
        fields = ", ".join(f"{key}={value}" for key, value in METHODS[self.method].items())
        return f"{fields} of {MODELS[self.model].exchanged} on {self.topology}{within}"


def cases() -> Iterator[Case]:
    """Yields all programs; those that the page needs most come first."""
    models = ("ResNet-50", "BERT-Large")
    for model in models:
        for topology in ("v3-32", "v3-128"):
            for method in METHODS:
                yield Case(model, method, topology)
        for topology in ("v3-32", "v3-128"):
            for method in list(METHODS)[2:]:
                yield Case(model, method, topology, HOST_DEVICES)
    for model in models:  # programs that check the scaling law and the bytes
        for method in METHODS:
            yield Case(model, method, "v5e-16")


def config_of(case: Case, devices: int) -> Spec:
    """Returns the config for a program's exchange, with a batch for this number of devices."""
    recipe = MODELS[case.model].exchanged.format(batch=PER_DEVICE * devices)
    config = overrides.load(recipe)
    rules = config.optimizer.fields["rules"]
    changes = {
        "parallel.backend": "shard_map",
        "mesh": {"data": -1} | ({"fsdp": case.inner} if case.inner > 1 else {}),
        "parallel.exchange": METHODS[case.method],
        # The program does not depend on the optimizer, and DGC rejects an optimizer with momentum.
        "optimizer": {"name": "sgd", "learning_rate": 1.0, "rules": rules},
    }
    return changed(config, changes)


def measure(case: Case) -> dict[str, Any]:
    """Compiles a program and returns its row.

    Raises:
      UserError: the config is rejected.
    """
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return dataclasses.asdict(case) | _exchange(case) | {"versions": versions}


def _exchange(case: Case) -> dict[str, Any]:
    slice_ = topology_lib.topology(case.topology)
    devices = topology_lib.devices(slice_)
    count = len(devices)
    config = config_of(case, count)
    run = prepare(config, None, devices, load=loader(config, None))
    assert run.exchange is not None  # the backend is shard_map
    sharded, mesh = run.exchange.at(_LAST_STAGE), run.mesh
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), run.abstract_state.params
    )
    residual = jax.eval_shape(sharded.init, params)
    specs = (PartitionSpec(), sharded.specs(residual))
    reduce = jax.shard_map(
        sharded.reduce, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )

    def with_sharding(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    given = (
        jax.tree.map(lambda leaf: with_sharding(leaf, PartitionSpec()), params),
        jax.tree.map(with_sharding, residual, specs[1]),
    )
    start = time.monotonic()
    compiled = jax.jit(reduce, donate_argnums=(0, 1)).lower(*given).compile()
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and sizes is not None
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    collectives = traffic.collectives(text)
    return {
        "devices": count,
        "cycles": hlo.program_cost(text).cycles,
        "clock": slice_.generation.clock,
        "compile_seconds": round(time.monotonic() - start, 1),
        "needed_bytes": sizes.peak_memory_in_bytes,
        **counts(shapes, factors(sharded.exchange, params)),
        "sent": traffic.sent_by_dtype(collectives),
        "collectives": summed(collectives, count, case.inner),
    }


def factors(exchange: Any, params: Any) -> dict[int, int]:
    """Returns the number of values in the two factors of each leaf that PowerSGD factorizes, by index."""
    if not isinstance(exchange, PowerSGD):
        return {}
    return {
        m.number: m.layers * min(exchange.rank, m.rows, m.columns) * (m.rows + m.columns)
        for m in exchange.matrices(params)
    }


def counts(shapes: Sequence[tuple[int, ...]], factors: Mapping[int, int]) -> dict[str, int]:
    """Returns the counts that determine the minimum number of bytes, see `wire.least`.

    Args:
      shapes: shapes of the gradient's arrays.
      factors: number of values in the factors of each array that is sent as factors, by index.
    """
    sizes = list(map(math.prod, shapes))
    return {
        "arrays": len(sizes),
        "values": sum(sizes),
        "vector_values": sum(
            size for size, shape in zip(sizes, shapes, strict=True) if len(shape) < 2
        ),
        "factor_values": sum(factors.values()),
        "unfactored_values": sum(size for index, size in enumerate(sizes) if index not in factors),
    }


def summed(collectives: Iterable[Collective], devices: int, inner: int) -> list[list[Any]]:
    """Returns collectives, summed by type, as lists [kind, among, dtype, number, operand bytes].

    `among` is 'all', 'inner' (the devices of a host) or 'outer' (one device of each host). If a
    collective runs in several phases among fewer devices, each phase gets the operand size of a
    single-phase collective that would send the same number of bytes.

    Args:
      collectives: the collectives; each `inner` consecutive devices share a host.
      devices: number of devices.
      inner: number of devices in each group that first sums gradients; 1 if there are no groups.
    """
    totals: dict[tuple[str, str, str], list[int]] = {}
    for one in collectives:
        among, members = "all", devices
        if inner > 1 and all(len({i // inner for i in group}) == 1 for group in one.groups):
            among, members = "inner", inner
        elif inner > 1 and all(len({i % inner for i in group}) == 1 for group in one.groups):
            among, members = "outer", devices // inner
        size = one.operand_bytes
        if one.group_size != members:
            size = round(one.sent_bytes / sent_share(one.kind, members))
        total = totals.setdefault((one.kind, among, one.dtype), [0, 0])
        total[0] += one.count
        total[1] += one.count * size
    return [[*key, *total] for key, total in sorted(totals.items())]


def sent_share(kind: str, members: int) -> float:
    """Returns the bytes that a device sends in a collective, relative to the bytes of the operand."""
    others = members - 1
    if kind == "all-gather":
        return others
    if kind == "all-reduce":
        return 2 * others / members
    is_cut = kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all")
    return others / members if is_cut else 1.0


def load() -> dict[str, dict[str, Any]]:
    """Returns the stored rows by key; {} if the file is missing."""
    path = FOLDER / "rows.json"
    return json.loads(path.read_text()) if path.exists() else {}
