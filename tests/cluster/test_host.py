"""The CPU cores that a process may use, and the name of the processor."""

import os
import pathlib
import platform

import pytest

from lamb_tpu.cluster import host


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system cannot bind a process to cores"
)
def test_cores_are_those_that_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    assert host.num_cores() == len(mine)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert host.num_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_system_without_information(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host.num_cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host.num_cores() == 1


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx avx2 avx512f\n",
            "AMD EPYC (family 25, model 17, avx512f)",
        ),
        ("model name\t: Old\nflags\t\t: fpu sse4_2\n", "Old (sse4_2)"),
        ("model name\t: Older\n", "Older"),
        ("processor\t: 0\nBogoMIPS\t: 243.75\n", "aarch64"),
        (None, "aarch64"),
    ],
)
def test_processor(text: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: pathlib.Path) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return f"{text}\n{text}"  # a block of lines for each CPU core

    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert host.processor() == expected
