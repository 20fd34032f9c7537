"""Properties of a run that decide which of its components can be combined, see `compatibility`."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from lamb_tpu import components, data, tasks
from lamb_tpu.batching.rules import Rule
from lamb_tpu.batching.rules.base import Bounded
from lamb_tpu.optim import parameters
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange import EXCHANGES, Exchange
from lamb_tpu.parallel.gradient_statistics import NO_STATISTICS, Statistics
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run import batches
from lamb_tpu.run.optimizer import Optimizer
from lamb_tpu.run.statistics import SWITCHES
from lamb_tpu.spec import Spec
from lamb_tpu.types import Params

_UNKNOWN: Any = None


@dataclasses.dataclass(frozen=True)
class Combination:
    """The components of a run; components that are not known yet are None.

    Attributes:
      training: False for an evaluation.
      plain_task, batch_norm: see `build.Run`.
      rule: the batch rule; None for a constant batch.
      asked: the requested statistics of gradients.
      group_replicas: number of devices that share a group of BatchNorm.
      example: a batch of one training example.
      layout: shardings of parameters and moments.
      params, state: shapes of the parameters and of the state.
      metadata: parameter metadata, see `parameters.resolve`.
    """

    spec: Spec
    training: bool = True
    # Not annotated as Optional: each stage of checks reads only components that are known by then.
    mesh: Mesh = _UNKNOWN
    task: tasks.Task = _UNKNOWN
    plain_task: tasks.Task = _UNKNOWN
    batch_norm: str = ""
    optimizer: Optimizer = _UNKNOWN
    exchange: Exchange = _UNKNOWN
    rule: Rule | None = None
    asked: Statistics = NO_STATISTICS
    group_replicas: int = 1
    train_set: data.Source = _UNKNOWN
    example: Any = None
    tx: optax.GradientTransformation = _UNKNOWN
    layout: Layout = _UNKNOWN
    params: Params = None
    metadata: Any = None
    state: TrainState = _UNKNOWN

    @property
    def named(self) -> bool:
        """True if collectives are explicit (shard_map)."""
        return self.spec.parallel.backend == "shard_map"

    @property
    def shards(self) -> int:
        """Number of shards into which the mesh splits a batch."""
        return mesh_lib.num_batch_shards(self.mesh)

    @property
    def devices(self) -> int:
        """Number of devices whose gradients the step sees separately; 1 under jit."""
        return self.shards if self.named else 1

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and largest batch size of the rule; config.batch_size for both if it has no bounds."""
        if isinstance(self.rule, Bounded):
            return self.rule.smallest, self.rule.upper
        return self.spec.batch_size, self.spec.batch_size

    @property
    def exchange_name(self) -> str:
        return EXCHANGES.name_in(self.spec.parallel.exchange)

    @property
    def rounds_only(self) -> bool:
        """True if the sums of the exchange differ from float32 sums only by rounding."""
        return bool(getattr(self.exchange, "rounds_only", False))

    @property
    def compared(self) -> str:
        """The rule or key that compares parts of each batch; '' if none does."""
        return batches.compares_parts(self.spec, self.rule)

    @property
    def switch(self) -> str:
        """The first requested statistic, except AGVM's halves, that compares parts of the batch, or ''."""
        # Ignore the halves for AGVM: AGVM is meant for detectors, which often have BatchNorm groups
        # over several devices.
        asked = (
            key
            for key in SWITCHES
            if getattr(self.asked, key) and not (key == "halves" and self.asked.to_optimizer)
        )
        return next(asked, "")

    @property
    def of_sums(self) -> str:
        """The rule or key that compares parts of the batch with their sum; '' if none does."""
        key = next((each for each in SWITCHES if getattr(self.asked, each)), "")
        if not key or getattr(self.spec.statistics, key):
            return key and f"config.statistics.{key}"
        return self.compared

    @property
    def mixed(self) -> str:
        """The task's field that mixes pairs of examples; '' for none."""
        return next(iter(getattr(self.task, "mixed_by", ())), "")

    @property
    def axis(self) -> str:
        """A mesh axis that does not split the batch; '' for none."""
        return min(set(self.mesh.shape) - set(mesh_lib.BATCH_AXES), default="")

    @property
    def order(self) -> str:
        """The training set's reading order if that order needs a constant batch size; otherwise ''."""
        if self.train_set.streams is not None:
            return "streams of text"
        return "batches of similar length" if self.train_set.buckets is not None else ""

    @property
    def sums(self) -> bool:
        """True if the optimizer itself sums over devices, so that the step must not sum too."""
        return isinstance(self.tx, Reducing)

    @property
    def momentum(self) -> str:
        """The name of the optimizer's momentum argument, if its value is not 0; '' for none."""
        keys = ("momentum", "b1", "beta")
        return next((key for key in keys if self.optimizer.arguments.get(key)), "")

    @property
    def split(self) -> str:
        """Path of a parameter whose update is sharded inside shard_map; '' for none."""
        if not self.named:
            return ""
        paths = parameters.leaf_paths(self.params)
        return next(filter(self.layout.axis_name, paths), "")

    @property
    def takes_axis(self) -> bool:
        """True if the optimizer has an argument for the mesh axes over which a parameter is sharded."""
        build = self.optimizer.build
        if not callable(build):
            return True
        return "axis_name" in {each.name for each in components.parameters(build)}

    @property
    def stack(self) -> str:
        """Path of a parameter of stacked layers that the rules treat as one layer; '' for none."""
        stacked = self.task.model.stacked
        if stacked is None:
            return ""
        leaves = zip(
            parameters.leaf_paths(self.metadata), jax.tree.leaves(self.metadata), strict=True
        )
        return next(
            (
                path
                for path, meta in leaves
                if parameters.matches(stacked, path) and meta.adapt and 0 not in meta.layer_axes
            ),
            "",
        )

    @property
    def layer(self) -> str:
        """Path of a layer that stores batch statistics, such as BatchNorm; '' for none."""
        path = next(iter(parameters.leaf_paths(self.state.model_state)), "")
        return path.rpartition("/")[0].partition("/")[2] or path
