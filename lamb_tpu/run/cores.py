"""The number of devices that --cpu_devices=auto makes of a CPU."""

import os

from absl import flags
from ml_collections import ConfigDict

from lamb_tpu import models, own
from lamb_tpu.cluster import cpu_devices
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.run import phases

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
    # A study has no flags for processes.
    flagged = "num_processes" in values and values.num_processes
    several = flagged or os.environ.get("JAX_NUM_PROCESSES")
    if count is None and not (several or cpu_devices.is_set_elsewhere()):
        count = 1 if config is None else choose(config, num_cores())
    if count is not None:
        cpu_devices.make(count)


def choose(config: ConfigDict, cores: int) -> int:
    """Returns the number of devices, at most one a core, that pays and that the batch allows.

    It is 1 for a multilayer perceptron, a user's own network, and a mesh whose size the config
    gives. Phases share the devices: a number that each of them allows.

    Raises:
      UserError: the config has a mistake that shows without its data.
    """
    configs = [phase.config for phase in phases.split(config)]
    fits = (count for count in range(cores, 1, -1) if all(_pays(each, count) for each in configs))
    return next(fits, 1)


def _pays(config: ConfigDict, count: int) -> bool:
    name, mesh = config.model.name, config.mesh
    if own.is_own(name) or name not in models.MODULES or name in _SMALL:
        return False
    if mesh.data != -1 or any(mesh[axis] != 1 for axis in mesh if axis != "data"):
        return False
    rows, mixes = config.batch_size // config.accumulation_steps, 1
    if config.task.get("mixup_alpha", 0) or config.task.get("cutmix_alpha", 0):
        mixes = 2  # pairs of examples stay on a device
    if rows % (count * mixes):
        return False
    try:
        models.batch_norm_groups(config.model, rows, count)
    except ValueError:
        return False
    return True
