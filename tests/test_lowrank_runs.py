"""Tests that runs that send low-rank factors are close to float32 runs, and resume bit for bit."""

import pathlib

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.updating import make_updating
from lamb_tpu.train import train
from tests import tiny

EXCHANGES = {
    "float32": {},
    "powersgd": {"rank": 4},
    "lgreco": {"rank": 2, "interval": 5, "min_saving": 1.0},
}


def config(name: str, **changes) -> ConfigDict:
    return tiny.digits(
        **{
            "parallel__backend": "shard_map",
            "model": ConfigDict({"name": "mlp", "hidden_sizes": (64,)}),
            "parallel__exchange": ConfigDict({"name": name, **EXCHANGES[name]}),
            **changes,
        }
    )


def losses(config: ConfigDict, updates: int) -> tuple[np.ndarray, list[str], object]:
    run, output = prepare(config, None), []
    loader = data.TrainLoader(run.train_set, config.batch_size, config.seed, run.local_rows())
    update = make_updating(run, loader, compiles=False, report=output.append)
    state, actual = run.first_state(), []
    for number in range(updates):
        state, sums = update(state, number)
        actual.append(float(sums["loss"][0]))
    return np.array(actual), output, state


@pytest.mark.long
def test_loss_is_near_that_of_float32() -> None:
    expected, _, _ = losses(config("float32", duration="40 steps"), 40)
    actual, output, _ = losses(config("powersgd", duration="40 steps"), 40)
    assert not output and expected[-1] < 0.5 * expected[0]
    assert actual[-1] < 1.15 * expected[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"batch_rule": ConfigDict({"name": "ramp", "points": ((0, 64),)})},
            marks=pytest.mark.long,
        ),
        pytest.param({"mesh__data": 2, "mesh__fsdp": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_are_chosen_in_a_run(changes) -> None:
    actual, output, state = losses(config("lgreco", **changes), 7)
    choices = np.asarray(state.parts["residual"]["kept"].whole["choices"]).reshape(-1, 2)
    assert [2, 2] in choices.tolist() and len(np.unique(choices, axis=0)) == 3  # including zeros
    if "batch_rule" not in changes:
        assert output == ["update 6 begins another stage, which is compiled now"]
    assert np.isfinite(actual).all()


def test_a_rank_that_fits_no_matrix_is_rejected() -> None:
    with pytest.raises(UserError, match=r"config\.parallel\.exchange\.rank=100 gives factors"):
        prepare(
            config("powersgd", parallel__exchange=ConfigDict({"name": "powersgd", "rank": 100})),
            None,
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ["powersgd", "lgreco"])
def test_resumed_is_uninterrupted(name: str, tmp_path: pathlib.Path) -> None:
    """The run resumes at update 4 or 8; the ranks of lgreco are chosen every 5 updates."""
    full = tmp_path / "full"
    train(config(name), full, quiet=True)
    expected, _ = tiny.restored(config(name), full)
    assert any(
        np.abs(leaf).max() > 0
        for leaf in jax.tree.leaves(expected.parts["residual"]["kept"].device)
    )
    for last in (4, 8):
        cut = tiny.cut(full, tmp_path / str(last), last)
        train(config(name), cut, quiet=True)
        tiny.same_state(config(name), cut, full)
