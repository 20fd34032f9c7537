"""Tests initial values, shardings and updates of components of the train state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.optim import parameters
from lamb_tpu.parallel.components import Averages, Carry, Skipped, Update
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.parallel.mesh import make_mesh
from lamb_tpu.parallel.state import TrainState
from tests import tiny

PARAMS = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
STATE = {"mean": jnp.array([4.0]), "count": jnp.array(3)}


def update(step: int, finite: bool | None = None) -> Update:
    params = {"w": jnp.array([3.0, 2.0], jnp.bfloat16)}
    model_state = {"mean": jnp.array([8.0]), "count": jnp.array(5)}
    return Update(
        jnp.int32(step), params, model_state, None if finite is None else jnp.array(finite)
    )


def test_averages_move_by_the_smaller_of_decay_and_its_ramp() -> None:
    part = Averages(0.25)
    began = part.init(PARAMS, STATE)
    assert began[0]["w"].dtype == jnp.float32
    # After 0 updates d = min(0.25, 1 / 10); after 20 it is 0.25.
    for step, decay in ((0, 0.1), (20, 0.25)):
        params, state = part.updated(began, update(step))
        np.testing.assert_allclose(params["w"], [1 + 2 * (1 - decay), 2.0], rtol=1e-6)
        np.testing.assert_allclose(state["mean"], [4 + 4 * (1 - decay)], rtol=1e-6)
        assert int(state["count"]) == 5  # integers are not averaged


def test_run_without_averages() -> None:
    part = Averages()
    assert part.init(PARAMS, STATE) is None and part.updated(None, update(3)) is None
    assert part.shardings(None, None) is None


@pytest.mark.parametrize("finite, expected", [(None, 7), (True, 7), (False, 8)])
def test_skipped_updates_are_counted(finite: bool | None, expected: int) -> None:
    part = Skipped()
    assert int(part.init(PARAMS, STATE)) == 0
    assert int(part.updated(jnp.int32(7), update(3, finite))) == expected


def test_averages_live_where_the_moments_do() -> None:
    params = {"w": jnp.zeros((16, 8))}
    mesh = make_mesh(tiny.digits().mesh)
    layout = make_layout(params, mesh, parameters.resolve(params, "all"), optimizer_state="zero1")
    part = Averages(0.9)
    of_params, of_state = part.shardings(part.init(params, STATE), layout)
    assert of_params == layout.moments and of_params["w"].spec != layout.params["w"].spec
    assert of_state["mean"].is_fully_replicated


def test_parts_stand_beside_the_other_attributes() -> None:
    """In the pytree, and so in a checkpoint, each component is stored under its name."""
    state = TrainState(*range(5), parts={"ema": None, "skipped": 6, "carry": {"h": 7}})
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths == [
        ".step",
        ".params",
        ".model_state",
        ".opt_state",
        ".key",
        ".skipped",
        ".carry['h']",
    ]
    assert jax.tree.map(lambda x: x, state) == state and state.skipped == 6 and state.ema is None
    again = state.replace(step=9, skipped=8)
    assert (again.step, again.skipped, again.parts["carry"]) == (9, 8, {"h": 7})
    with pytest.raises(TypeError, match="a train state has no residual"):
        state.replace(residual=1)


def carry(num_devices: int, steps: int, rows: int = 8) -> Carry:
    mesh = make_mesh({"data": num_devices}, jax.devices()[:num_devices])
    return Carry((2, 3), rows, steps, mesh)


def placed(part: Carry, value: dict[str, jax.Array]) -> dict[str, jax.Array]:
    layout = make_layout({}, part.mesh, {})
    return jax.device_put(value, part.shardings(value, layout))


def test_carry_is_zero_at_first_and_split_as_the_batch() -> None:
    part = carry(4, 2)
    value = placed(part, part.init(PARAMS, STATE))
    assert value["value"].shape == (8, 2, 3) and not value["value"].any()
    assert value["value"].sharding.shard_shape((8, 2, 3)) == (2, 2, 3)
    assert value["example"].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert part.field(value) is value["value"] and Averages(0.9).field(None) is None
    new = jnp.ones((8, 2, 3))
    moved = Update(jnp.int32(0), PARAMS, STATE, None, {"carry": new})
    after = part.updated(value, moved)
    assert after["value"] is new and after["example"] is value["example"]


@pytest.mark.parametrize("before, after", [((4, 2), (4, 2)), ((4, 2), (1, 2)), ((2, 2), (8, 1))])
def test_rows_follow_their_examples_to_other_devices(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    old, new = carry(*before), carry(*after)
    began = old.init(PARAMS, STATE)
    # Each row's state is the index of its example, so that the test can find the row again.
    rows = began["example"][:, None, None] + jnp.zeros((8, 2, 3))
    saved = jax.device_get({**began, "value": rows})
    actual = new.resumed(placed(new, saved))
    assert actual["example"].tolist() == new.init(PARAMS, STATE)["example"].tolist()
    np.testing.assert_array_equal(actual["value"][:, 0, 0], actual["example"])
    assert actual["value"].sharding == new.shardings(actual, make_layout({}, new.mesh, {}))["value"]
    assert Skipped().resumed(7) == 7


def test_mesh_of_an_evaluation_need_not_divide_the_rows() -> None:
    part = carry(8, 1, rows=20)
    value = placed(part, part.init(PARAMS, STATE))
    assert value["value"].is_fully_replicated and value["example"].tolist() == list(range(20))


def test_parts_after_a_skipped_update() -> None:
    before, after = {"count": 0, "average": 1.0}, {"count": 1, "average": float("nan")}
    assert Averages(0.5).skipped(before, after) is before
    assert Skipped().skipped(3, 4) == 4
