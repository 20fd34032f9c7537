"""--cpu_devices: the number that 'auto' takes, and runs on it."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import bert_pretrain, cifar10, digits, imagenet_efficientnet, mnist_lenet
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.errors import UserError
from lamb_tpu.run import cores
from tests import tiny


@pytest.mark.parametrize("changes, count", [
    ({}, 8),
    ({"batch_size": 100}, 5),
    ({"batch_size": 97}, 1),
    ({"accumulation_steps": 256}, 4),
    ({"mesh.data": 1}, 1),
    ({"mesh.fsdp": 2}, 1),
    ({"mesh.data": 4}, 1),
])
def test_lenet(changes: dict[str, Any], count: int) -> None:
    assert cores.choose(tiny.change(mnist_lenet.get_config(), changes), 8) == count


def test_other_networks() -> None:
    assert cores.choose(digits.get_config(), 8) == 1
    own = digits.get_config()
    own.model = ConfigDict({"name": "my_module:Network"})
    assert cores.choose(own, 8) == 1
    mixed = imagenet_efficientnet.get_config()
    mixed.batch_size, mixed.model.group_size = 8, None
    assert cores.choose(mixed, 8) == 8
    mixed.task.mixup_alpha = 0.2
    assert cores.choose(mixed, 8) == 4


def test_groups_of_batch_norm_have_to_fit() -> None:
    config = cifar10.get_config()
    config.batch_size, config.model.group_size = 48, 16
    assert cores.choose(config, 4) == 3  # of 12 rows a device a group would have a part


def test_phases_share_the_devices() -> None:
    config = bert_pretrain.get_config("size=tiny")
    first, second = (config.phases[name] for name in sorted(config.phases))
    first.batch_size, second.batch_size = 32, 12
    assert cores.choose(config, 8) == 4


def test_mistake_in_a_config() -> None:
    config = mnist_lenet.get_config()
    config.batch_size = 0
    with pytest.raises(UserError, match="config.batch_size is 0"):
        cores.choose(config, 8)


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Runs a command in an environment that says nothing of devices."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=tiny.ROOT, env=environment, capture_output=True,
        text=True, timeout=200,
    )


@pytest.mark.long
def test_a_run_goes_on_with_other_devices(tmp_path: pathlib.Path) -> None:
    train = (
        "lamb_tpu.train", "--config=configs/mnist_lenet.py:smoke", f"--workdir={tmp_path}",
        "--config.duration=2 steps", "--config.log.tensorboard=false",
    )
    first = run(*train, "--cpu_devices=2")
    assert "mesh: data=2 over 2 cpu device(s)" in first.stdout, first.stderr
    again = run(*train, "--cpu_devices=1")
    assert "mesh: data=1 over 1 cpu device(s)" in again.stdout, again.stderr
    assert "resumed from the checkpoint of update 2" in again.stdout
    evaluated = [run("lamb_tpu.evaluate", f"--workdir={tmp_path}", f"--cpu_devices={count}")
                 for count in (1, 2)]
    one, two = (json.loads(done.stdout) for done in evaluated)
    assert one == pytest.approx(two, rel=1e-5) and one["step"] == 2
    wrong = run(*train, "--cpu_devices=many")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: --cpu_devices is 'many'; it ")


@pytest.mark.skipif(num_cores() < 2, reason="there is one core")
def test_auto_is_one_a_core_for_convolutions(tmp_path: pathlib.Path) -> None:
    done = run(
        "lamb_tpu.train", "--config=configs/mnist_lenet.py:smoke", f"--workdir={tmp_path}",
        "--config.duration=1 steps", "--config.log.tensorboard=false",
    )
    count = max(n for n in range(1, num_cores() + 1) if 128 % n == 0)
    assert f"mesh: data={count} over {count} cpu device(s)" in done.stdout, done.stderr
