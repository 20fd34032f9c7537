"""The number of devices that --cpu_devices=auto makes of a CPU."""

import os

from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import models, own
from lamb_tpu.cluster import cpu_devices
from lamb_tpu.config import check_keys, check_values

# LeNet, LeNet-5 and BERT gain, see experiments/bench/cpu_step.md; the other networks were not
# measured. The mlp of configs/digits.py takes half a millisecond an update: too little to share.
_SMALL = ("mlp",)


def make_devices(config: ConfigDict | None) -> None:
    """Makes the devices of the flag --cpu_devices; call before anything asks JAX for a device.

    'auto' leaves alone what the environment says, and runs of several processes.

    Args:
      config: the recipe of the run; None if it is not known yet.

    Raises:
      UserError: the flag's value is neither 'auto' nor a whole number of at least 1.
    """
    values = flags.FLAGS
    count = cpu_devices.parse(values.cpu_devices)
    several = values.num_processes or os.environ.get("JAX_NUM_PROCESSES")
    if count is None and not (several or cpu_devices.is_set_elsewhere()):
        count = 1 if config is None else choose(config, cpu_devices.num_cores())
    if count is not None:
        cpu_devices.make(count)


def choose(config: ConfigDict, cores: int) -> int:
    """Returns the number of devices, at most one a core, that pays and that the batch allows.

    It is 1 for a multilayer perceptron, a user's own network, a run of phases, and a mesh whose
    size the config gives.

    Raises:
      UserError: the config has a mistake that shows without its data.
    """
    check_keys(config)
    check_values(config)
    name, mesh = config.model.name, config.mesh
    if config.phases or own.is_own(name) or name not in models.MODULES or name in _SMALL:
        return 1
    if mesh.data != -1 or any(mesh[axis] != 1 for axis in mesh if axis != "data"):
        return 1
    rows, mixes = config.batch_size // config.accumulation_steps, 1
    if config.task.get("mixup_alpha", 0) or config.task.get("cutmix_alpha", 0):
        mixes = 2  # pairs of examples stay on a device
    for count in range(cores, 1, -1):
        if rows % (count * mixes) == 0 and _has_groups(config, rows, count):
            return count
    return 1


def _has_groups(config: ConfigDict, rows: int, count: int) -> bool:
    try:
        models.batch_norm_groups(config.model, rows, count)
    except ValueError:
        return False
    return True
