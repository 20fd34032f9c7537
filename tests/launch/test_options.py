"""Options of each kind of launch."""

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.launch import options

NEEDED = {
    "local": [],
    "compute": ["--topology=v6e-4", "--name=a", "--zone=z"],
    "tpu-vm": ["--topology=v4-8", "--name=a", "--zone=z"],
    "queued-resource": ["--topology=v4-8", "--name=a", "--zone=z"],
    "cluster": [
        *("--topology=v6e-4", "--name=a", "--zone=z"),
        *("--project=p", "--bucket=gs://bucket"),
    ],
    "jobset": ["--topology=v6e-4", "--name=a", "--image=i"],
    "slurm": [],
}


@pytest.mark.parametrize("kind", NEEDED)
def test_required_options(kind):
    assert options.parse("", [kind, *NEEDED[kind]]).kind == kind
    for left_out in NEEDED[kind]:
        rest = [word for word in NEEDED[kind] if word != left_out]
        with pytest.raises(UserError, match=left_out.partition("=")[0]):
            options.parse("", [kind, *rest])


def test_options_of_one_name_differ_between_kinds():
    cluster = options.parse("", ["cluster", *NEEDED["cluster"]])
    jobset = options.parse("", ["jobset", *NEEDED["jobset"]])
    assert (cluster.service_account, jobset.service_account) == ("lamb-tpu", None)
    assert options.parse("", ["slurm"]).name == "lamb_tpu"


def test_an_option_of_another_kind_is_unknown():
    with pytest.raises(UserError, match="unrecognized arguments: --nodes=2"):
        options.parse("", ["local", "--nodes=2"])


def test_bounds_of_numbers():
    assert options.parse("", ["slurm", "--gpus-per-node=0"]).gpus_per_node == 0
    with pytest.raises(UserError, match="--nodes: 0 is less than 1"):
        options.parse("", ["slurm", "--nodes=0"])
