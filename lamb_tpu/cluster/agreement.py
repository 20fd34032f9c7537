"""Comparison of what the processes of a run were started with, before they compute together.

Processes with other settings would train one model by several configs, or wait for each other
forever. They compare short digests through JAX' coordination service, which needs no device and no
compiled program. Only if digests differ are the values themselves sent.
"""

import hashlib
import itertools
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError

# Of one request to the service; between two of them Ctrl-C is noticed.
_REQUEST_SECONDS = 10
_LISTED = 4  # processes in a message
_VALUES = 3  # different values in a message
_LENGTH = 100  # characters of a value in a message
# Each comparison has keys of its own, because a key of the service is set once.
_numbers = itertools.count()


class Group(NamedTuple):
    """Processes with equal values.

    Attributes:
      processes: number and host of each, by number.
      values: text by key, in the order in which keys are compared.
    """

    processes: tuple[tuple[int, str], ...]
    values: Mapping[str, str]


def compare(values: Mapping[str, str], remedy: Callable[[str], str]) -> None:
    """Raises in every process if the processes have different values; all must call it.

    A process waits here for the slowest. If one ends instead, JAX ends the others.

    Args:
      values: text by key, such as {'config.seed': '0'}; the message names the first key that
        differs.
      remedy: returns the last part of the message for a key, such as 'start all processes with the
        same command'.

    Raises:
      UserError: the values differ.
    """
    index, count = distributed.index_and_count()
    if count == 1:
        return
    prefix, text = f"lamb_tpu/agreement/{next(_numbers)}", json.dumps(values)
    # The order of the keys is for messages alone.
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    mine = json.dumps([digest, socket.gethostname()])
    client = distributed.client()
    client.key_value_set(f"{prefix}/digest/{index}", mine)
    if index:
        verdict = _get(f"{prefix}/verdict")
        if verdict == "differ":
            client.key_value_set(f"{prefix}/values/{index}", text)
            verdict = _get(f"{prefix}/sentence")
    else:
        members: dict[str, list[tuple[int, str]]] = {}
        for number in range(count):
            digest, host = json.loads(_get(f"{prefix}/digest/{number}"))
            members.setdefault(digest, []).append((number, host))
        verdict = "" if len(members) == 1 else "differ"
        client.key_value_set(f"{prefix}/verdict", verdict)
        if verdict:
            # One process of each group speaks for it, and a message has few groups.
            groups = [
                Group(tuple(them), json.loads(_get(f"{prefix}/values/{them[0][0]}")))
                if them[0][0]
                else Group(tuple(them), values)
                for them in list(members.values())[:8]
            ]
            verdict = sentence(groups, remedy)
            client.key_value_set(f"{prefix}/sentence", verdict)
    if verdict:
        raise distributed.of_all(UserError(verdict))


def sentence(groups: Sequence[Group], remedy: Callable[[str], str]) -> str:
    """Returns a sentence about the first key in which groups of processes differ.

    Args:
      groups: the groups, with that of process 0 first; two of them differ.
      remedy: see `compare`.
    """
    keys = dict.fromkeys(key for group in groups for key in group.values)
    different = [key for key in keys if len({group.values.get(key) for group in groups}) > 1]
    key, *others = different
    found: dict[str, list[tuple[int, str]]] = {}
    for group in groups:
        value = group.values.get(key)
        text = "missing" if value is None else _short(value)
        found.setdefault(text, []).extend(group.processes)
    # The fewest first: most likely it is they that are wrong.
    order = sorted(found, key=lambda value: (len(found[value]), -found[value][0][0]))
    parts = [f"{value} on {_processes(sorted(found[value]))}" for value in order[:_VALUES]]
    if len(order) > _VALUES:
        parts.append(f"other values on {sum(len(found[value]) for value in order[_VALUES:])} more")
    more = ""
    if others:
        listed = ", ".join(others[:_LISTED])
        listed += f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        more = f"; {listed} {'differ' if len(others) > 1 else 'differs'} too"
    return f"{key} is {_join(parts)}{more}; {remedy(key)}"


def _processes(members: Sequence[tuple[int, str]]) -> str:
    listed = [f"{number} (host {host})" for number, host in members[:_LISTED]]
    if len(members) > _LISTED:
        listed.append(f"{len(members) - _LISTED} more")
    return f"process{'es' if len(members) > 1 else ''} {_join(listed)}"


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _short(value: str) -> str:
    return value if len(value) <= _LENGTH else f"{value[:_LENGTH]}..."


def _get(key: str) -> str:
    """Waits for a key of the coordination service."""
    while True:
        try:
            return distributed.client().blocking_key_value_get(key, _REQUEST_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
