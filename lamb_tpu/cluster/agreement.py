"""Checks that all processes of a run were started with the same settings.

Processes with different settings would train one model with several configs, or wait for each other
forever. So all processes compare short digests of their settings through JAX's coordination service,
which needs no device and no compiled program, and send the settings only if the digests differ.
"""

import hashlib
import itertools
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError, listed

# Time limit of one request to the service; Ctrl-C is handled only between requests.
_REQUEST_SECONDS = 10
_LISTED = 4  # processes in a message
_VALUES = 3  # different values in a message
_LENGTH = 100  # characters of a value in a message
# Each comparison uses new keys, because a key of the service can be set only once.
_numbers = itertools.count()


class Group(NamedTuple):
    """Processes with equal values: their sorted (index, host) pairs, and the values by key."""

    processes: tuple[tuple[int, str], ...]
    values: Mapping[str, str]


def compare(values: Mapping[str, str], remedy: Callable[[str], str]) -> None:
    """Raises a UserError in every process if `values` differ between them; all processes must call it.

    Waits for the slowest process. If a process has ended, JAX ends the others. The message names
    the first key that differs, such as 'config.seed', and ends with `remedy(key)`.
    """
    index, count = distributed.index_and_count()
    if count == 1:
        return
    prefix, text = f"lamb_tpu/agreement/{next(_numbers)}", json.dumps(values)
    # The order of the keys matters only for messages, so it must not change the digest.
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
            # Read the values from one process of each of the first eight groups.
            groups = [
                Group(tuple(them), json.loads(_get(f"{prefix}/values/{them[0][0]}")))
                if them[0][0]
                else Group(tuple(them), values)
                for them in list(members.values())[:8]
            ]
            verdict = sentence(groups, remedy)
            client.key_value_set(f"{prefix}/sentence", verdict)
    if verdict:
        key, _, problem = verdict.partition(" ")
        raise distributed.of_all(UserError(key, ..., *problem.rsplit("; ", 1)))


def sentence(groups: Sequence[Group], remedy: Callable[[str], str]) -> str:
    """Returns a message about the first key, in the order of the first group, whose values differ."""
    keys = dict.fromkeys(key for group in groups for key in group.values)
    different = [key for key in keys if len({group.values.get(key) for group in groups}) > 1]
    key, *others = different
    processes_of: dict[str, list[tuple[int, str]]] = {}
    for group in groups:
        value = group.values.get(key)
        text = "missing" if value is None else _short(value)
        processes_of.setdefault(text, []).extend(group.processes)
    # List the smallest group first, because its value is most likely the wrong one.
    order = sorted(
        processes_of, key=lambda value: (len(processes_of[value]), -processes_of[value][0][0])
    )
    parts = [f"{value} on {_processes(sorted(processes_of[value]))}" for value in order[:_VALUES]]
    if len(order) > _VALUES:
        parts.append(
            f"something else on {sum(len(processes_of[value]) for value in order[_VALUES:])} more"
        )
    more = ""
    if others:
        names = ", ".join(others[:_LISTED])
        names += f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        more = f"; {names} {'differ' if len(others) > 1 else 'differs'} too"
    return f"{key} is {listed(parts, 'and')}{more}; {remedy(key)}"


def _processes(members: Sequence[tuple[int, str]]) -> str:
    hosts = [f"{number} (host {host})" for number, host in members[:_LISTED]]
    if len(members) > _LISTED:
        hosts.append(f"{len(members) - _LISTED} more")
    return f"process{'es' if len(members) > 1 else ''} {listed(hosts, 'and')}"


def _short(value: str) -> str:
    return value if len(value) <= _LENGTH else f"{value[:_LENGTH]}..."


def _get(key: str) -> str:
    """Waits until a key of the coordination service is set, and returns its value."""
    while True:
        try:
            return distributed.client().blocking_key_value_get(key, _REQUEST_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
