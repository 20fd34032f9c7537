"""Metrics of updates, fetched from the devices for a record."""

import jax.numpy as jnp

from lamb_tpu.watch.updates import Updates


def sums(total: float, weight: float = 1.0) -> dict:
    return {"loss": (jnp.float32(total), jnp.float32(weight))}


def test_updates_are_fetched_once_and_averaged_by_weight() -> None:
    updates = Updates()
    for step, (total, weight) in enumerate([(1.0, 1.0), (6.0, 3.0), (2.0, 1.0)], start=1):
        updates.add(step, sums(total, weight))
    assert [step for step, _ in updates.fetch()] == [1, 2, 3] and not updates.fetch()
    updates.add(4, sums(11.0, 5.0))
    (last,) = updates.fetch()
    assert last[0] == 4 and float(last[1]["loss"][0]) == 11.0
    assert updates.take() == (4, {"loss": 2.0})
    assert updates.unlogged == [] and updates.take() == (0, {})


def test_updates_of_a_preempted_start_count() -> None:
    before = Updates()
    before.add(1, sums(4.0, 2.0))
    before.fetch()
    after = Updates(before.unlogged)
    after.add(2, sums(2.0, 1.0))
    after.wait()
    after.fetch()
    assert after.take() == (2, {"loss": 2.0})


def test_a_skipped_update_has_no_mean() -> None:
    updates = Updates()
    updates.add(1, {**sums(0.0, 0.0), "skipped": (jnp.float32(1), jnp.float32(1))})
    updates.fetch()
    assert updates.take() == (1, {"skipped": 1.0})
