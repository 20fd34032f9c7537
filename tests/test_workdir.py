"""The folder of a run: receipts, and whether it may be used again."""

import json
import pathlib
import subprocess
import sys

import pytest

from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.workdir import Workdir
from tests import tiny


def test_config_comes_back(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(optimizer__rules=(("bias$", {"decay": False}), ("", {})))
    folder = Workdir(tmp_path / "new" / "run")
    folder.check(config)
    folder.write_receipt(config, "table", {})
    assert folder.read_config() == flatten(config)
    folder.check(config)  # tuples have become lists in JSON, and still compare equal
    assert folder.parameters.read_text() == "table"


def test_each_start_adds_a_line(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    for name in ("first", "second"):
        folder.write_receipt(tiny.digits(), "table", {"start": name})
    first, second = (json.loads(line) for line in folder.run.read_text().splitlines())
    assert (first["start"], second["start"]) == ("first", "second")
    assert first["devices"] == 8 and first["python"].startswith("3.")
    versions = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "lamb_tpu")
    assert all(first[name][0].isdigit() for name in versions)
    assert isinstance(first["command"], list) and "commit" in first


def test_free_keys_may_differ(copy: pathlib.Path) -> None:
    folder = Workdir(copy)
    folder.check(tiny.digits(checkpoint__every="1 steps", log__every="2 steps", data__dir="x"))
    with pytest.raises(UserError, match="config .duration: '12 steps' there, '13 steps' now"):
        folder.check(tiny.digits(duration="13 steps"))


def test_checkpoints_of_an_unknown_run(copy: pathlib.Path) -> None:
    (copy / "config.json").unlink()
    before = tiny.fingerprint(copy)
    with pytest.raises(UserError, match="holds checkpoints but no config.json"):
        Workdir(copy).check(tiny.digits())
    assert tiny.fingerprint(copy) == before


@pytest.mark.parametrize("content", [b"", b'{"seed": 0', b"\xff\xfe"])
def test_damaged_config(copy: pathlib.Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="config.json is damaged .*; restore it or give another"):
        Workdir(copy).check(tiny.digits())


def test_folder_without_a_run(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=f"--workdir {tmp_path} holds no run: config.json is miss"):
        Workdir(tmp_path).read_config()


def test_table_must_be_the_one_the_run_began_with(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    folder.check_parameters("anything, for there is none yet")
    folder.write_receipt(tiny.digits(), "a table", {})
    folder.check_parameters("a table")
    with pytest.raises(UserError, match="differs from .*parameters.txt"):
        folder.check_parameters("another")


def test_one_run_at_a_time(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    with folder.hold():
        with pytest.raises(UserError, match=f"--workdir {tmp_path} is in use by another run"):
            with Workdir(tmp_path).hold():
                raise AssertionError
        with Workdir(tmp_path).hold(enabled=False):
            pass  # the other processes of the same run
    with folder.hold():
        pass


def test_killed_run_frees_its_folder(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys, time; from lamb_tpu.workdir import Workdir\n"
        "with Workdir(sys.argv[1]).hold(): print('held', flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tiny.ROOT, text=True,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="in use"), Workdir(tmp_path).hold():
        pass
    holder.kill()
    holder.communicate()
    with Workdir(tmp_path).hold():
        pass


def test_home_folder_is_understood(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Workdir("~/run").path == tmp_path / "run"
