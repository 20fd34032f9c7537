"""Tests the comparison of processes' settings, with threads in place of processes."""

import queue
import threading
from typing import Any

import pytest

from lamb_tpu.cluster import agreement, distributed
from lamb_tpu.cluster.agreement import Group, sentence
from lamb_tpu.errors import UserError


def message(*values: dict[str, str], counts: tuple[int, ...] = ()) -> str:
    groups, number = [], 0
    for each, count in zip(values, counts or (1,) * len(values), strict=True):
        groups.append(Group(tuple((number + i, f"h{number + i}") for i in range(count)), each))
        number += count
    return sentence(groups, lambda key: f"fix {key}")


def test_first_key_in_the_order_of_process_0() -> None:
    assert message({"b": "1", "a": "2"}, {"a": "2", "b": "3"}) == (
        "b is 3 on process 1 (host h1) and 1 on process 0 (host h0); fix b"
    )
    assert message({"b": "1", "a": "2"}, {"a": "9", "b": "3"}) == (
        "b is 3 on process 1 (host h1) and 1 on process 0 (host h0); a differs too; fix b"
    )


def test_fewest_processes_first() -> None:
    assert message({"a": "1"}, {"a": "2"}, {"a": "3"}, counts=(9, 1, 2)) == (
        "a is 2 on process 9 (host h9), 3 on processes 10 (host h10) and 11 (host h11) and 1 on "
        "processes 0 (host h0), 1 (host h1), 2 (host h2), 3 (host h3) and 5 more; fix a"
    )
    # Groups with the same value of the key are merged.
    assert message({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"a": "2", "b": "1"}) == (
        "a is 2 on process 2 (host h2) and 1 on processes 0 (host h0) and 1 (host h1); b differs "
        "too; fix a"
    )


def test_many_values_and_keys() -> None:
    assert message(*({"a": str(i)} for i in range(5))) == (
        "a is 4 on process 4 (host h4), 3 on process 3 (host h3), 2 on process 2 (host h2) and "
        "something else on 2 more; fix a"
    )
    keys = "abcdefg"
    assert "; b, c, d, e and 2 more differ too; " in message(
        dict.fromkeys(keys, "1"), dict.fromkeys(keys, "2")
    )


def test_missing_key_and_long_value() -> None:
    assert message({"a": "1", "b": "x" * 300}, {"a": "1"}) == (
        f"b is missing on process 1 (host h1) and {'x' * 100}... on process 0 (host h0); fix b"
    )
    assert message({"a": "1"}, {"a": "1", "b": "2"}).startswith("b is 2 on process 1 ")


class Store:
    """Replaces the coordination service, for threads that act as processes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, milliseconds / 1000)
            return self.values[key]


@pytest.mark.parametrize(
    "values",
    [
        ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "2"}),
        ({"a": "1"}, {"a": "2"}, {"a": "1"}),
        ({"a": "0"}, {"a": "1"}, {"a": "1"}),
    ],
)
def test_exchange(monkeypatch: pytest.MonkeyPatch, values: tuple[dict[str, str], ...]) -> None:
    """Processes with equal settings send only digests; if settings differ, all raise the same error."""
    store, local = Store(), threading.local()
    monkeypatch.setattr(distributed, "client", lambda: store)
    monkeypatch.setattr(distributed, "index_and_count", lambda: (local.index, len(values)))
    monkeypatch.setattr(distributed, "_leaves_with_all", False)
    monkeypatch.setattr(agreement, "_numbers", iter([0] * len(values)))
    errors: queue.Queue[Any] = queue.Queue()

    def run(index: int) -> None:
        local.index = index
        try:
            agreement.compare(values[index], str)
            errors.put(None)
        except UserError as error:
            errors.put(str(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    actual = [errors.get(timeout=1) for _ in values]
    sent = {key.split("/")[3] for key in store.values}
    if all(each == values[0] for each in values):
        assert actual == [None] * 3 and sent == {"digest", "verdict"}
    else:
        assert len(set(actual)) == 1 and actual[0].startswith("a is ")
        assert distributed._leaves_with_all and sent == {"digest", "verdict", "values", "sentence"}


def test_one_process_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "client", lambda: pytest.fail("uses the service"))
    agreement.compare({"a": "1"}, str)
