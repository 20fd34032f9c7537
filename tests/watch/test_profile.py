"""Profiles of updates: the files, the message, and invalid numbers of updates."""

import contextlib
import gzip
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from lamb_tpu.watch.profile import Profile
from tests.raising import rejected
from tests.watch.observing import start


def profile(folder, updates: int, total: int = 8):
    output: list[str] = []
    run = SimpleNamespace(
        recipe=SimpleNamespace(total_steps=total), folder=SimpleNamespace(path=folder)
    )
    return Profile(updates, run, output.append, lambda *_: contextlib.nullcontext()), output


def train(observer: Profile, steps: range) -> None:
    update = jax.jit(lambda x: x @ x)
    state = jnp.ones((8, 8))
    for step in steps:
        observer.updating(step - 1)
        state = update(state)
        observer.updated(step, state)
    observer.ended()


def test_profile_of_two_updates(tmp_path: pathlib.Path) -> None:
    observer, output = profile(tmp_path, 2)
    observer.started(start(3))
    train(observer, range(4, 9))
    (line,) = output
    (trace,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert line == (
        f"profile of updates 5 to 6: open {trace} at https://ui.perfetto.dev, or run `xprof "
        f"--logdir={tmp_path / 'profile'}` (pip install xprof)"
    )
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "update"]
    assert sorted(map(int, steps)) == [5, 6]


def test_a_start_that_ends_early_keeps_its_profile(tmp_path: pathlib.Path) -> None:
    observer, output = profile(tmp_path, 4)
    observer.started(start())
    train(observer, range(1, 3))
    assert len(output) == 1 and output[0].startswith("profile of the updates up to here: open ")


def test_no_profile_of_a_complete_run(tmp_path: pathlib.Path) -> None:
    observer, output = profile(tmp_path, 2)
    observer.started(start(8, is_over=True))
    observer.ended()
    assert output == ["--profile profiles nothing, because the run is already complete"]
    assert not (tmp_path / "profile").exists()


def test_errors(tmp_path: pathlib.Path) -> None:
    with rejected("--profile", 8, "is too many: the run has 8 update(s)", "use at most 7"):
        profile(tmp_path, 8)
    observer, _ = profile(tmp_path, 5)
    with rejected("--profile", 5, "after update 3 the run has 5 update(s)", "use at most 4"):
        observer.started(start(3))
    with rejected("--profile", 1, "the run has 1 update(s)", "leave out the flag"):
        profile(tmp_path, 1, total=1)
    with rejected("--workdir", ..., "is in a bucket, and --profile=2 needs a local folder"):
        profile("gs://b/run", 2)
