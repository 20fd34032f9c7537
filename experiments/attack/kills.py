"""Kills and restarts commands, and compares their results with those of uninterrupted commands."""

import hashlib
import itertools
import json
import pathlib
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.attack.bases import BERT, NARROW, SHORT
from experiments.attack.forks import Command, run
from experiments.attack.outcome import End

_STEPS = (
    "--config.duration=8 steps",
    "--config.checkpoint.every=2 steps",
    "--config.eval.every=4 steps",
    "--config.log.every=1 steps",
    "--config.log.tensorboard=false",
)
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Exit statuses after each signal: with the signal's handler, or before the handler is installed.
_STATUSES = {signal.SIGKILL: {-9, 137}, signal.SIGTERM: {75, -15, 143}, signal.SIGINT: {130, -2}}
_MOST_STARTS = 15  # maximum number of starts of a case
# Keys that are not compared: measured times, paths, and values that depend on the number of starts.
_MEASURED = re.compile(
    r"second|startup|starts|_per_|mfu|compil|path|commit|workdir|created|measured|unlogged|eval_due"
)


class Case(NamedTuple):
    """A command to kill, and the path of its results.

    Attributes:
      name: recipe or tool.
      module: the module's name after 'lamb_tpu.'.
      arguments: the command's arguments; '@' is the command's folder.
      result: file or folder of the command's results; '' if the result is the standard output.
      bases: names of prepared folders to copy into the command's folder.
    """

    name: str
    module: str
    arguments: Sequence[str]
    result: str = "new"
    bases: Sequence[str] = ()


class Kill(NamedTuple):
    """A kill and its outcome, or a fault that appears only after a case's last start.

    Attributes:
      case: the name of the command.
      signal: the name of the signal; '' for a fault after the last start.
      seconds: the time from the start to the signal.
      status: exit status of the killed command.
      fault: what was wrong; '' if nothing was.
    """

    case: str
    signal: str
    seconds: float
    status: int
    fault: str


def _train(recipe: str, *more: str) -> Case:
    return Case(
        recipe.partition(":")[0], "train", [f"--config={recipe}", "--workdir=@/new", *_STEPS, *more]
    )


_TABLE = ["small/digits", "--papers=@/papers"]
CASES = (
    _train("digits:smoke"),
    _train("mnist_lenet:smoke"),
    _train("mnist_lstm:smoke"),
    _train("ptb:smoke"),
    _train("cifar10:smoke", "--config.batch_size=16"),
    Case("bert_pretrain", "train", [*BERT, "--workdir=@/new", *_STEPS]),
    _train("bert_squad:smoke", *NARROW),
    _train("translation:smoke", "--config.model.features=16", "--config.eval.every=8 steps"),
    _train("image_folder:smoke", "--config.batch_size=8", "--config.duration=4 steps"),
    _train(
        "imagenet_resnet:smoke,size=18",
        "--config.batch_size=8",
        "--config.duration=4 steps",
        "--config.model.group_size=8",
    ),
    Case(
        "reproduce run",
        "reproduce.__main__",
        ["run", *_TABLE, "--runs=@/runs", "--records=@/new"],
        bases=("papers",),
    ),
    Case(
        "sweep",
        "sweep",
        [
            "--config=digits:smoke",
            "--search=optimizer.learning_rate=0.01,0.02",
            "--workdir=@/new",
            *SHORT,
        ],
    ),
    Case(
        "prepare_text",
        "data.prepare_text",
        [
            "--input=@/text/corpus/*.txt",
            "--output=@/new",
            "--train-vocab=120",
            "--processes=2",
            "--shard-bytes=400",
        ],
        bases=("text",),
    ),
    Case("export", "export", ["--workdir=@/bert", "--output=@/new"], bases=("bert",)),
    Case(
        "report",
        "reproduce.__main__",
        ["report", *_TABLE, "--output=@/new", "--html=@/new/site"],
        bases=("papers",),
    ),
    Case(
        "plan",
        "plan.__main__",
        ["--config=digits", "--topology=v3-8", "--cache=@/new", "--json"],
        "",
    ),
    Case(
        "launch local",
        "launch.__main__",
        [
            "local",
            "--processes=2",
            "--",
            "--config=digits:smoke",
            "--workdir=@/new",
            *_STEPS,
            "--config.eval.batch_size=8",
        ],
    ),
)


def schedule(seed: int, number: int) -> dict[str, list[tuple[signal.Signals, float]]]:
    """Returns each case's kills: a signal, and its moment as a fraction of the time without interruption."""
    rng, moments = random.Random(seed), dict[str, list[tuple[signal.Signals, float]]]()
    for index in range(number):
        iteration, case_index = divmod(index, len(CASES))
        # Each group of three kills of a case includes each signal once.
        sent = _SIGNALS[(iteration + case_index) % len(_SIGNALS)]
        moments.setdefault(CASES[case_index].name, []).append((sent, rng.uniform(0.05, 0.98)))
    return moments


def attack(
    seed: int,
    number: int,
    root: pathlib.Path,
    make: Callable[[Case, pathlib.Path], None],
    jobs: int,
) -> Iterator[list[Kill] | Command]:
    """Yields the list of all kills; in a child process, yields the command that the process must run.

    Every case runs once without interruption. In another folder, the case is then started, killed and
    started again until all its kills are made; its last start is not killed. If the command completes
    before its signal, it is started again in an empty folder. Results are compared at the end, because
    reading checkpoints starts JAX, and a process that has started JAX cannot fork.

    Args:
      seed: seed of the random moments.
      number: number of kills.
      root: folder of all cases.
      make: writes the prepared folders of a case into its folder.
      jobs: number of cases that run at the same time.
    """
    left, kills = schedule(seed, number), list[Kill]()
    cases = [case for case in CASES if case.name in left]
    alone, last = dict[str, End](), list[tuple[Case, pathlib.Path, End]]()
    seconds: dict[str, float] = {}  # of the shortest complete start of each case
    waiting = [*cases]
    for attempt in itertools.count():
        commands = []
        for case in waiting:
            folder = root / ("killed" if attempt else "alone") / case.name / "input"
            if not folder.exists():
                folder.mkdir(parents=True)
                make(case, folder)
            moment = None
            if attempt and left[case.name]:
                sent, share = left[case.name][0]
                moment = sent.value, share * seconds[case.name]
            commands.append(
                Command(
                    f"lamb_tpu.{case.module}",
                    [word.replace("@/", f"{folder}/") for word in case.arguments],
                    folder,
                    {},
                    signals=moment,
                    cpu_seconds=150.0,
                )
            )
        again = []
        for item in run(commands, jobs):
            if isinstance(item, Command):
                yield item
                raise AssertionError("a forked process must pass its command to `become`")
            (index, end), case = item, waiting[item[0]]
            print(
                f"{case.name}, start {attempt}: status {end.status}, {end.seconds:.0f} s",
                flush=True,
            )
            moment = commands[index].signals
            if not end.status:
                seconds[case.name] = min(end.seconds, seconds.get(case.name, end.seconds))
            if not attempt:
                alone[case.name] = end
                seconds.setdefault(case.name, end.seconds)
                again.append(case)
            elif moment is None or not end.status:  # the command ended without a kill
                ended = root / f"ended-{attempt}" / case.name
                shutil.move(commands[index].folder, ended)
                last.append((case, ended, end))
                if left[case.name] and attempt < _MOST_STARTS:
                    again.append(case)
            else:
                sent, _ = left[case.name].pop(0)
                fault = _fault(end, sent, commands[index].folder)
                kills.append(Kill(case.name, sent.name, round(moment[1], 2), end.status, fault))
                again.append(case)
        waiting = [case for case in cases if case in again]
        if not waiting:
            break
    for case, ended, end in last:
        first = root / "alone" / case.name / "input"
        kills += _differences(case, first, alone[case.name], ended, end)
    yield kills


def _fault(end: End, sent: signal.Signals, folder: pathlib.Path) -> str:
    """Returns what was wrong with the way a command ended after a signal; '' if nothing was."""
    printed = end.out + end.err
    if "Traceback" in printed or "Exception ignored" in printed:
        return "traceback"
    if end.stopped:
        return end.stopped
    if end.status not in {0, *_STATUSES[sent]}:  # 0: the command may have ended before the signal
        return f"status {end.status}"
    message = re.search(r"preempted at update (\d+), saved", printed)
    if message and not list(folder.glob(f"new/**/checkpoints/{message[1]}/sha256.json")):
        return f"update {message[1]} was reported as saved, but its checkpoint is not there"
    return ""


def _differences(
    case: Case, first: pathlib.Path, alone: End, second: pathlib.Path, last: End
) -> Iterator[Kill]:
    """Yields a fault if a command failed, or if a case's results in `first` and `second` differ."""
    for end, name in ((alone, "alone"), (last, "the last start")):
        if end.status or end.stopped:
            words = " ".join((end.err or end.out).split())[-300:]
            yield Kill(case.name, "", 0.0, end.status, f"{name}: {end.stopped} {words}")
            return
    ours, theirs = contents(case, first, alone), contents(case, second, last)
    differing = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    if differing:
        yield Kill(case.name, "", 0.0, 0, f"differs: {', '.join(differing[:6])}")


def contents(case: Case, folder: pathlib.Path, end: End) -> dict[str, str]:
    """Returns digests of a command's results by name, without times and paths.

    Of the newest checkpoint, the digests cover only the arrays and the data position; of pages, figures
    and run.jsonl, only the names. Leftover files have digests too, and so count as differences.
    """
    if not case.result:
        return {"standard output": _digest(_plain(json.loads(end.out)))}
    digests = {}
    result = folder / case.result
    for path in sorted(result.rglob("*")):
        name = str(path.relative_to(result))
        if path.is_dir() or re.search(r"(^|/)(compiled|logs|tensorboard)/|\.lock$", name):
            continue
        if "checkpoints/" in name:
            step = name.partition("checkpoints/")[2].partition("/")[0]
            # A preempted run also saves at other updates; the newest checkpoint is the final state.
            if "tmp" in step:
                digests[name] = "leftover"
        elif path.name == "run.jsonl":  # run.jsonl has a line for each start
            digests[name] = "receipts"
        elif path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            digests[name] = _digest([_plain(line) for line in lines])
        elif path.suffix == ".json":
            digests[name] = _digest(_plain(json.loads(path.read_text())))
        elif path.suffix in (".png", ".svg", ".html", ".md", ".toml"):
            digests[name] = "page"
        else:
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    for checkpoints in sorted(result.rglob("checkpoints")):
        newest = max(
            (path for path in checkpoints.iterdir() if path.name.isdecimal()),
            key=lambda path: int(path.name),
        )
        name = str(newest.relative_to(result))
        digests[name] = _arrays(newest / "state")
        digests[f"{name}/position"] = _digest(
            _plain(json.loads((newest / "position" / "data.json").read_text()))
        )
    return digests


def _arrays(folder: pathlib.Path) -> str:
    """Returns the digest of all arrays of a saved tree."""
    import jax
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    known = checkpointer.metadata(folder).item_metadata.tree
    # Read as NumPy arrays, because the run may have had more devices than this process.
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), known)
    tree = checkpointer.restore(folder, restore_args=wanted)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    digest = hashlib.sha256()
    for path, leaf in leaves:
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _plain(node: Any) -> Any:
    """Returns a JSON document without measured values and paths, which may differ between runs."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items() if not _MEASURED.search(key)}
    return [_plain(each) for each in node] if isinstance(node, list) else node


def _digest(node: Any) -> str:
    return hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()
