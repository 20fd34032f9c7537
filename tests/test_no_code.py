"""Tests that reading data runs no code in it: inputs contain payloads that leave a mark when executed."""

import contextlib
import gzip
import json
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import numpy as np
import pytest
import yaml
from PIL import Image

from lamb_tpu.config import flatten
from lamb_tpu.data import prepare_text
from lamb_tpu.data.images import check as check_images
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.export import export
from lamb_tpu.plan.cache import Cache, Compiled, Memory
from lamb_tpu.predict import predict
from lamb_tpu.reproduce import __main__ as reproduce
from lamb_tpu.reproduce.loading import load_all
from lamb_tpu.reproduce.report import pages, site
from lamb_tpu.store import checksums, runs
from lamb_tpu.train import train
from tests import tiny
from tests.reproduce import papers
from tests.trap import NAME, Trap, in_keys, in_names, in_strings


@pytest.fixture
def trap(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    folder = tmp_path / "data"
    folder.mkdir()
    actual = Trap(folder)
    (folder / f"{NAME}.py").write_text(
        f"import pathlib\npathlib.Path({str(folder / 'mark')!r}).touch()\n"
        "class Net: ...\ndef get_config(argument=None): ...\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield actual
    sys.modules.pop(NAME, None)


@pytest.fixture
def run(trap: Trap, trained: pathlib.Path) -> pathlib.Path:
    shutil.copytree(trained, trap.folder, dirs_exist_ok=True)
    return trap.folder


def test_payloads_leave_marks_when_executed(trap: Trap) -> None:
    module, dotted, _, called, _, _, code, template, document, shell = trap.texts[:10]
    __import__(module.partition(":")[0])
    assert trap.sprung()
    pickle.loads(trap.pickled)
    assert trap.sprung()
    eval(code)
    assert trap.sprung()
    jinja2.Environment().from_string(template).render()
    assert trap.sprung()
    yaml.unsafe_load(document)
    assert trap.sprung()
    subprocess.run(f"echo {shell}", shell=True, check=True, capture_output=True)
    assert trap.sprung() and not trap.sprung()
    with pytest.raises(AssertionError):
        trap.check(lambda: eval(code), "code")


@pytest.fixture
def table(trap: Trap) -> pathlib.Path:
    folder = trap.folder / "papers"
    papers.write(folder)
    config = flatten(tiny.digits())
    records = [papers.record("lamb", seed, 0.9, config="0" * 12) for seed in (0, 1)]
    (folder / "small" / "digits.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    (folder / "small" / "digits.configs.json").write_text(json.dumps({"0" * 12: [config]}))
    return folder


def _reproduce(*arguments: str) -> Callable[[], None]:
    return lambda: reproduce.main(reproduce._parse(list(arguments)))


@pytest.mark.parametrize("name", ["digits.jsonl", "digits.configs.json"])
@pytest.mark.parametrize("command", ["show", "run", "list"])
def test_records(trap: Trap, table: pathlib.Path, command: str, name: str) -> None:
    more = {"show": ["small/digits"], "run": ["small/digits", "--dry-run"], "list": []}[command]
    trap.into_json(table / "small" / name, _reproduce(command, *more, "--papers", str(table)))


def test_records_in_a_report(trap: Trap, table: pathlib.Path) -> None:
    """Changes only the names in the config, because each report takes a second."""
    path = table / "small" / "digits.configs.json"
    configs = json.loads(path.read_text())
    report = _reproduce("report", "--papers", str(table), "--output", str(trap.folder / "o"))
    texts = [json.dumps(in_names(configs, payload)) for payload in trap.texts[:3]]
    trap.into_text(path, texts, report)


def test_adopted_records(trap: Trap, table: pathlib.Path) -> None:
    carried = trap.folder / "carried.json"
    records = [
        json.loads(line) for line in (table / "small" / "digits.jsonl").read_text().splitlines()
    ]
    carried.write_text(
        json.dumps(
            [
                {
                    "table": "small/digits",
                    "form": load_all(table)["small/digits"].form,
                    "runs": [
                        {"record": record, "configs": [flatten(tiny.digits())]}
                        for record in records
                    ],
                }
            ]
        )
    )
    trap.into_json(carried, _reproduce("adopt", str(carried), "--papers", str(table)))


def test_adopted_run(trap: Trap, table: pathlib.Path, run: pathlib.Path) -> None:
    for name in ("config.json", "metrics.jsonl", "run.jsonl"):
        trap.into_json(run / name, _reproduce("adopt", str(run), "--papers", str(table)))


@pytest.mark.parametrize(
    "value",
    ['"digits:batch=128"', '"4 steps"', '"accuracy"', '"optimizer=lamb"', '"lamb"', '"Table 9"'],
)
def test_tables(trap: Trap, table: pathlib.Path, value: str) -> None:
    """In an untrusted folder of papers, recipe files and custom code are not loaded."""
    trap.install()
    path = table / "small" / "digits.toml"
    text = path.read_text()
    texts = [text.replace(value, json.dumps(payload)) for payload in trap.texts]
    run = _reproduce("run", "small/digits", "--dry-run", "--papers", str(table))
    trap.into_text(path, texts, run)


@pytest.mark.parametrize("key", ["model.name", "optimizer.name", "data.name", "task.name", None])
def test_overrides_of_tables(trap: Trap, table: pathlib.Path, key: str | None) -> None:
    trap.install()
    path = table / "small" / "digits.toml"
    text = path.read_text()
    texts = []
    for payload in trap.texts:
        more = f"{json.dumps(key or payload)} = {json.dumps(payload)}"
        texts.append(text.replace('"log.every" =', f'{more}, "log.every" ='))
    for command, option in (("commands", "--scale=small"), ("run", "--dry-run")):
        read = _reproduce(command, "small/digits", option, "--papers", str(table))
        trap.into_text(path, texts, read)


def test_template(trap: Trap, table: pathlib.Path) -> None:
    template = table / "README.md.j2"
    (table / "small" / "digits.jsonl").unlink()  # its config ids are not in the table
    actual = [pages.of_table(each, None) for each in load_all(table).values()]
    command = f"touch {trap.folder / 'mark'}"
    texts = [
        *trap.texts,
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        f"{{{{ captions.__class__.__init__.__globals__.os.system('{command}') }}}}",
        f"{{{{ papers.__globals__.__builtins__.__import__('os').system('{command}') }}}}",
        f"{{{{ lipsum.__globals__['os'].popen('{command}').read() }}}}",
        "{{ pages[0].table.path.with_name('mark').touch() }}",
        "{{ (pages | map(attribute='table') | first).path.write_text('x') }}",
        f"{{% include '{trap.folder / NAME}.py' %}}",
        f"{{% import '{NAME}.py' as x %}}",
        "{{ '%s' | format(cycler.__init__.__globals__) }}",
    ]
    # Only the overview uses the template; the other pages would take a second.
    trap.into_text(template, texts, lambda: site._write_overview(actual, table, table / "report"))
    assert not list(table.rglob("mark"))


def test_stored_config(trap: Trap, run: pathlib.Path) -> None:
    trap.into_json(run / "config.json", lambda: evaluate_checkpoint(None, run))


@pytest.mark.parametrize(
    "read",
    [
        lambda run: runs.read(str(run), "RUN").records("eval"),
        lambda run: export(run, run / "out"),
        lambda run: predict(str(run), "a [MASK]"),
        lambda run: train(tiny.digits(), run, quiet=True),
    ],
    ids=["compare and plots", "export", "predict", "train"],
)
def test_other_commands(trap: Trap, run: pathlib.Path, read: Callable[[pathlib.Path], Any]) -> None:
    trap.into_json(run / "config.json", lambda: read(run))


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.jsonl"])
def test_metrics_and_receipts(trap: Trap, run: pathlib.Path, name: str) -> None:
    def read() -> None:
        actual = runs.read(str(run), "RUN")
        actual.records("train"), actual.receipt(), actual.unfinished()

    trap.into_json(run / name, read)


def test_resumed_run(trap: Trap, run: pathlib.Path) -> None:
    """A run continues even if its metrics and receipts contain payloads."""
    for name in ("metrics.jsonl", "run.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        texts = [
            "".join(json.dumps(in_strings(line, payload)) + "\n" for line in lines)
            for payload in trap.texts[:3]
        ]
        trap.into_text(run / name, texts, lambda: train(tiny.digits(), run, quiet=True))


def test_checkpoint(trap: Trap, run: pathlib.Path) -> None:
    """Replaces each file in turn with a pickle, then puts code into the JSON files; checksums stay valid."""
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for other in (run / "checkpoints").iterdir():  # leave no checkpoint to fall back to
        if other != newest:
            shutil.rmtree(other)

    def read() -> None:
        evaluate_checkpoint(None, run)

    for path in sorted(newest.rglob("*")):
        if path.is_file() and path.name != "sha256.json":
            before = path.read_bytes()
            path.write_bytes(trap.pickled)
            _seal(newest)
            with contextlib.suppress(Exception):  # errors are allowed, running code is not
                trap.check(read, str(path))
            assert not trap.sprung(), path
            path.write_bytes(before)
    for name in ("state/_METADATA", "position/data.json", "_CHECKPOINT_METADATA"):
        path = newest / name
        before = path.read_text()
        for payload in trap.texts[:3]:
            for change in (in_strings, in_keys):
                path.write_text(json.dumps(change(json.loads(before), payload)))
                _seal(newest)
                with contextlib.suppress(Exception):
                    trap.check(read, f"{name}: {payload}")
                assert not trap.sprung(), f"{name}: {payload}"
        path.write_text(before)


def _seal(checkpoint: pathlib.Path) -> None:
    with contextlib.suppress(ValueError):
        checksums.write(checkpoint)


def test_cached_plan(trap: Trap) -> None:
    cache = Cache(trap.folder)
    compiled = Compiled(1.5, "", Memory(*[7] * 6), "HloModule f\n")
    cache.store("k", compiled, tiny.digits(), "v3-8")

    def read() -> None:
        cache.load("k")
        cache.batches(tiny.digits(), "v3-8")

    trap.into_json(trap.folder / "k.json", read)
    for content in (trap.pickled, gzip.compress(trap.pickled)):
        (trap.folder / "k.hlo.gz").write_bytes(content)
        trap.check(read, "a pickle as the program")


def test_prepared_text(trap: Trap) -> None:
    corpus, output = trap.folder / "corpus.txt", trap.folder / "prepared"
    corpus.write_text("The cat sat on the mat.\nIt was warm.\n\n" * 9)

    def prepare() -> None:
        prepare_text.main(
            [f"--input={corpus}", f"--output={output}", "--train-vocab=60", "--processes=1"]
        )

    prepare()
    trap.into_json(output / "manifest.json", prepare)
    config = tiny.bert(data__name="masked_lm", data__dir=str(trap.folder))
    config.data.train_split = "prepared"
    manifest = json.loads((output / "manifest.json").read_text())
    texts = [json.dumps(in_strings(manifest, payload)) for payload in trap.texts[:4]]
    trap.into_text(
        output / "manifest.json", texts, lambda: train(config, trap.folder / "run", quiet=True)
    )
    for path in output.iterdir():
        if path.suffix != ".json" and path.is_file():
            before = path.read_bytes()
            path.write_bytes(trap.pickled)
            trap.check(prepare, path.name)
            path.write_bytes(before)


def test_exported_model(trap: Trap) -> None:
    """A BERT folder as written by transformers, with additional weights in a pickle."""
    folder = trap.folder / "bert"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "bert",
                "hidden_act": "gelu",
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "num_attention_heads": 2,
                "intermediate_size": 8,
                "vocab_size": 10,
                "max_position_embeddings": 16,
                "architectures": ["BertForMaskedLM"],
                "type_vocab_size": 2,
            }
        )
    )
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\ne\n")
    (folder / "pytorch_model.bin").write_bytes(trap.pickled)

    def read() -> None:
        predict(str(folder), "a [MASK]")

    weights = folder / "model.safetensors"
    trap.check(read, "only a pickle")
    for payload in (*trap.texts, None):
        header = (
            {
                "__metadata__": {"format": payload, payload: payload},
                "a": {"dtype": payload, "shape": [1], "data_offsets": [0, 4], "module": payload},
            }
            if payload is not None
            else {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        )
        text = json.dumps(header).encode()
        weights.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        trap.check(read, f"header: {payload}")
    trap.into_json(folder / "config.json", read)
    weights.write_bytes(trap.pickled)
    trap.check(read, "a pickle as the weights")


def test_image_folder(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trap.folder / "images"
    pixels = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    for index, payload in enumerate(trap.texts):
        name = payload.replace("/", "_")
        (folder / "train" / name).mkdir(parents=True)
        pixels.save(folder / "train" / name / f"{name}.png")
        (folder / "train" / name / f"{index}.png").write_bytes(trap.pickled)
    trap.check(lambda: check_images.main([f"--dir={folder}"]), "names")
    texts = [f"file\tlabel\tsplit\n{each}\t{each}\ttrain\n" for each in trap.texts]
    trap.into_text(folder / "labels.tsv", texts, lambda: check_images.main([f"--dir={folder}"]))
