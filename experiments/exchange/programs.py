"""Compiled programs of exchanges alone: what rows.json keeps.

An exchange's program sums the gradient of a model, as the step would, and does nothing else. So its
collectives are the exchange's own, and its cycles are those of casting, packing and adding.
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
from ml_collections import ConfigDict

from experiments.plan.rows import Part
from lamb_tpu import cli
from lamb_tpu.cost import hlo, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.traffic import Collective
from lamb_tpu.parallel.exchange.powersgd import PowerSGD
from lamb_tpu.plan.making import loader
from lamb_tpu.run.build import prepare

FOLDER = pathlib.Path(__file__).parent
HOST_DEVICES = 8  # of a host of TPU v3: four chips of two cores
PER_DEVICE = 16  # examples of a device: 32,768 on 2,048 devices
_LAST_STAGE = 10**9  # an update after every warm-up

# Exchanges with their fields in config.parallel.exchange. With per_leaf=False, which copies all
# arrays into one, onebit has 1.8 times the cycles on ResNet-50 and 32 devices.
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
      step: the program of its step, of which ../plan/rows.json has the computation.
      exchanged: the recipe whose gradient is exchanged.
    """

    step: Part
    exchanged: str


MODELS = {
    # With layers in a loop the gradient has 30 arrays in place of 398, and compiles in a tenth of
    # the time. It has the same values.
    "BERT-Large": Model(
        Part("bert_pretrain:batch=32768,phase=1", {}, 1.0),
        "bert_pretrain:phase=1,scan,batch={batch}",
    ),
    "ResNet-50": Model(
        Part(
            "imagenet_resnet:optimizer=lars,recipe=tpu,batch=32768", {"model.group_size": 128}, 1.0
        ),
        "imagenet_resnet:optimizer=lars,recipe=tpu,batch={batch}",
    ),
}
STEP_SLICE = "v3-2048"


@dataclasses.dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
      model: a key of `MODELS`.
      method: a key of `METHODS`.
      topology: the slice.
      inner: devices within which gradients are first summed in float32; 1: none.
    """

    model: str
    method: str
    topology: str
    inner: int = 1

    @property
    def key(self) -> str:
        """Name of its row; another recipe or option gives another one."""
        within = f", fsdp={self.inner}" * (self.inner > 1)
        fields = ", ".join(f"{key}={value}" for key, value in METHODS[self.method].items())
        return f"{fields} of {MODELS[self.model].exchanged} on {self.topology}{within}"


def cases() -> Iterator[Case]:
    """Yields all programs, those first that the page cannot do without."""
    models = ("ResNet-50", "BERT-Large")
    for model in models:
        for topology in ("v3-32", "v3-128"):
            for method in METHODS:
                yield Case(model, method, topology)
        for topology in ("v3-32", "v3-128"):
            for method in list(METHODS)[2:]:
                yield Case(model, method, topology, HOST_DEVICES)
    for model in models:  # these check the scaling, and the bytes
        for method in METHODS:
            yield Case(model, method, "v5e-16")


def config_of(case: Case, devices: int) -> ConfigDict:
    """Returns the config whose exchange a program is, with the batch of so many devices."""
    recipe = MODELS[case.model].exchanged.format(batch=PER_DEVICE * devices)
    config = cli.load_recipe(recipe)
    config.parallel.backend = "shard_map"
    config.mesh = ConfigDict({"data": -1} | ({"fsdp": case.inner} if case.inner > 1 else {}))
    config.parallel.exchange = ConfigDict(METHODS[case.method])
    # The program is the same for every optimizer, and DGC is refused one with momentum.
    config.optimizer = ConfigDict(
        {"name": "sgd", "learning_rate": 1.0, "rules": config.optimizer.rules}
    )
    return config


def measure(case: Case) -> dict[str, Any]:
    """Compiles a program and returns its row.

    Raises:
      UserError: the config is refused.
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
    placed, mesh = run.exchange.at(_LAST_STAGE), run.mesh
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), run.abstract_state.params
    )
    kept = jax.eval_shape(placed.init, params)
    specs = (PartitionSpec(), placed.specs(kept))
    reduce = jax.shard_map(
        placed.reduce, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )

    def with_sharding(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    given = (
        jax.tree.map(lambda leaf: with_sharding(leaf, PartitionSpec()), params),
        jax.tree.map(with_sharding, kept, specs[1]),
    )
    start = time.monotonic()
    compiled = jax.jit(reduce, donate_argnums=(0, 1)).lower(*given).compile()
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and sizes is not None
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    found = traffic.collectives(text)
    return {
        "devices": count,
        "cycles": hlo.program_cost(text).cycles,
        "clock": slice_.generation.clock,
        "compile_seconds": round(time.monotonic() - start, 1),
        "needed_bytes": sizes.peak_memory_in_bytes,
        **counts(shapes, factors(placed.exchange, params)),
        "sent": traffic.sent_by_dtype(found),
        "collectives": summed(found, count, case.inner),
    }


def factors(exchange: Any, params: Any) -> dict[int, int]:
    """Returns the values of both factors of the leaves that PowerSGD sends so, by their place."""
    if not isinstance(exchange, PowerSGD):
        return {}
    return {
        m.number: m.layers * min(exchange.rank, m.rows, m.columns) * (m.rows + m.columns)
        for m in exchange.matrices(params)
    }


def counts(shapes: Sequence[tuple[int, ...]], factors: Mapping[int, int]) -> dict[str, int]:
    """Returns the numbers of values from which the least bytes follow.

    Args:
      shapes: of the gradient's arrays.
      factors: values of the factors of those that are sent as factors, by their place.
    """
    sizes = list(map(math.prod, shapes))
    return {
        "arrays": len(sizes),
        "values": sum(sizes),
        "vector_values": sum(
            size for size, shape in zip(sizes, shapes, strict=True) if len(shape) < 2
        ),
        "factor_values": sum(factors.values()),
        "unfactored_values": sum(size for place, size in enumerate(sizes) if place not in factors),
    }


def summed(found: Iterable[Collective], devices: int, inner: int) -> list[list[Any]]:
    """Returns [kind, among, dtype, number, operand bytes] of collectives, summed up.

    `among` is 'all', 'inner' (the devices of a host) or 'outer' (one device of each host). A phase
    of a collective in several, which is among fewer of them, has the operand with which one phase
    would send as much.

    Args:
      found: the collectives; `inner` devices that follow each other are on one host.
      devices: number of devices.
      inner: devices within which gradients are summed first; 1: none.
    """
    totals: dict[tuple[str, str, str], list[int]] = {}
    for one in found:
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
    """Returns what a device sends in a collective as a share of its operand."""
    others = members - 1
    if kind == "all-gather":
        return others
    if kind == "all-reduce":
        return 2 * others / members
    is_cut = kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all")
    return others / members if is_cut else 1.0


def load() -> dict[str, dict[str, Any]]:
    """Returns the kept rows by their keys; none if there is no file."""
    path = FOLDER / "rows.json"
    return json.loads(path.read_text()) if path.exists() else {}
