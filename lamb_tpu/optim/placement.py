"""Former name of `sharding`: `placement.partition` is `sharding.state_sharding`."""

from lamb_tpu.optim.sharding import state_sharding as partition

__all__ = ["partition"]
