"""A lock keeps a second process out and is freed when its holder ends."""

import pathlib
import subprocess
import sys
import threading

from lamb_tpu.errors import UserError
from lamb_tpu.files import locks
from tests.raising import rejected

HOLDER = """
import pathlib, sys
from lamb_tpu.files import locks
with locks.hold(pathlib.Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_hold(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lock"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"holds\n"
    taken = UserError("it", ..., "is taken", "wait")
    with rejected("it", ..., "is taken", "wait"), locks.hold(path, taken):
        pass
    other.kill()
    other.communicate()
    with locks.hold(path, taken):
        pass


def test_hold_waits_for_a_folder(tmp_path: pathlib.Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with locks.hold(tmp_path):
            order.append("second")

    second = threading.Thread(target=wait)
    with locks.hold(tmp_path):
        second.start()
        second.join(0.2)
        order.append("first")
    second.join(60)
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []
