"""BERT-Large's bfloat16 update with LAMB at 128 and 512 tokens, compared with PyTorch's.

Our update is that of `configs/bert_pretrain.py`, on batches of real text. The PyTorch peer is the
network of the package transformers, with scaled-dot-product attention, autocast and torch.compile. It
is measured twice: with timm's LAMB and with PyTorch's fused AdamW. The two networks get the same
batches, use dropout, and predict only the masked positions. Our step compiles while PyTorch measures,
but only one of the two libraries uses the device at a time. JAX keeps memory that it has allocated, so
the largest batches are measured after PyTorch has ended. MFU is model FLOPs (`lamb_tpu.cost.flops`, the
same number for both networks) divided by the time and by the device's peak FLOP/s.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments.accelerator import lines
from experiments.bench import peers
from lamb_tpu import cli, overrides
from lamb_tpu.cluster import children
from lamb_tpu.cost import topology
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.spec import Spec, changed

LENGTHS = (128, 512)
_FIRST = {128: 64, 512: 16}  # examples per batch, by number of tokens; these batches certainly fit
_PEER = {128: (256, 128, 64), 512: (64, 32, 16)}  # PyTorch uses the first batch that fits
_SECONDS = 3.0  # seconds of timed updates
_FREE = 0.94  # share of the device's memory that a step may use
_SMALL = {"num_layers": 2, "hidden_size": 128, "num_heads": 2, "intermediate_size": 512}


def config_of(length: int, batch: int, data: pathlib.Path, small: bool) -> Spec:
    """Returns bert_pretrain's config with sequences of `length` tokens, this batch size and this text."""
    changes: dict[str, Any] = {
        "batch_size": batch,
        "duration": "1000 steps",
        "data.dir": str(data / "bert"),
        "data.train_split": "text",
        "data.eval_split": "text",
        "parallel.backend": "jit",  # one device
    }
    if small:
        changes |= {f"model.{key}": value for key, value in _SMALL.items()}
    return changed(overrides.load(f"bert_pretrain:phase={1 + LENGTHS.index(length)}"), changes)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits until no other process measures; other processes wait until the block ends."""
    path = pathlib.Path(tempfile.gettempdir()) / f"lamb_tpu_device_{os.getuid()}"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(update: Callable[[], None], finish: Callable[[], Any], seconds: float) -> float:
    """Times groups of four updates, after two warm-up updates; returns the median seconds per update."""
    for _ in range(2):
        update()
    finish()
    times, end = list[float](), time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(4):
            update()
        finish()
        times.append((time.perf_counter() - began) / 4)
    return statistics.median(times)


def rates(run: Run, seconds: float, peak: float | None) -> dict[str, Any]:
    """Returns the rates (such as MFU) of an update that takes `seconds`."""
    flops = run.model_flops
    return {
        "batch": run.spec.batch_size,
        "ms": round(1e3 * seconds, 3),
        "sequences_per_second": round(run.spec.batch_size / seconds, 2),
        "mfu": round(flops / seconds / peak, 4) if flops and peak else None,
    }


class Ours:
    """Our update at one sequence length; `needs` maps each compiled batch size to its bytes of memory."""

    def __init__(self, length: int, options: Any, output: lines.Lines) -> None:
        self._length, self._options, self._output = length, options, output
        self.needs: dict[int, int] = {}

    def measure(self, batch: int) -> bool:
        """Compiles and times the update at a batch size; returns whether the batch fits into memory."""
        name = f"ours, {self._length} tokens, batch {batch}"
        options, began = self._options, time.perf_counter()
        run = prepare(config_of(self._length, batch, options.data, options.small), None)
        compiled = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile()
        compile_seconds = round(time.perf_counter() - began, 1)
        memory = compiled.memory_analysis()
        needs = self.needs[batch] = (
            memory.temp_size_in_bytes
            + memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        if self._output.has(name):
            return True
        values = {"compile_seconds": compile_seconds, "needs_bytes": needs}
        try:
            with alone():
                seconds = self._seconds(run, compiled)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._output.add(name, **values, problem="out of memory")
            return False
        stats = jax.devices()[0].memory_stats() or {}
        self._output.add(
            name,
            **rates(run, seconds, run.peak_flops),
            **values,
            peak_bytes=stats.get("peak_bytes_in_use"),
        )
        return True

    def _seconds(self, run: Run, compiled: Any) -> float:
        state = run.first_state()
        batch = run.shard_batch(run.train_set.gather(np.arange(run.spec.batch_size)))

        def update() -> None:
            nonlocal state
            state, _ = compiled(state, batch)

        limit = 0.2 if self._options.small else _SECONDS
        return timed(update, lambda: jax.block_until_ready(state), limit)

    def larger(self, limit: int) -> int:
        """Returns the largest batch that should fit into `limit` bytes, extrapolated from `needs`."""
        batches = sorted(self.needs)
        large = batches[-1]
        # With a single batch, the fixed part of its bytes is unknown; this overstates the bytes per example.
        fixed, slope = 0.0, self.needs[large] / large
        if len(batches) > 1:
            small = batches[0]
            slope = (self.needs[large] - self.needs[small]) / (large - small)
            fixed = self.needs[large] - slope * large
        return int((limit - fixed) / slope) // 8 * 8


def measure_largest(job: Ours) -> None:
    """Measures larger batches that should just fit into memory; on a CPU, measures a single batch."""
    total = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if total is None:  # a CPU
        job.measure(4)
        return
    before = max(job.needs)
    for _ in range(3):
        if (batch := job.larger(int(_FREE * total))) < 1.1 * before:
            break
        while not job.measure(batch):
            batch = batch * 9 // 10 // 8 * 8
        before = batch


def peer_loss(torch: Any, network: Any) -> Any:
    """Returns a module that maps one of our batches to the loss: masked words plus next sentence."""
    functional = torch.nn.functional

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, batch: Any) -> Any:
            hidden, pooled = self.network.bert(
                input_ids=batch["input_ids"],
                token_type_ids=batch["token_type_ids"],
                attention_mask=batch["attention_mask"],
                return_dict=False,
            )
            positions = batch["masked_positions"].unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            scores, relation = self.network.cls(hidden.gather(1, positions), pooled)
            weights = batch["masked_weights"]
            words = functional.cross_entropy(
                scores.float().flatten(0, 1), batch["masked_ids"].flatten(), reduction="none"
            )
            return (words * weights.flatten()).sum() / weights.sum() + functional.cross_entropy(
                relation.float(), batch["next_sentence_label"]
            )

    return Loss()


def measure_peer(options: Any, output: lines.Lines) -> None:
    """Measures compiled PyTorch at each length, with timm's LAMB and with fused AdamW."""
    try:
        torch, timm = importlib.import_module("torch"), importlib.import_module("timm.optim")
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        output.add("PyTorch", problem=f"{error.name} is not installed")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for length in LENGTHS:
        for batch in (2,) if options.small else _PEER[length]:
            try:
                with alone():
                    try:
                        _measure_peer(
                            options, output, torch, timm, transformers, device, length, batch
                        )
                    finally:  # our step needs the memory
                        torch.compiler.reset()
                        gc.collect()
                        torch.cuda.empty_cache()
                break
            except torch.OutOfMemoryError:
                output.add(f"PyTorch, {length} tokens, batch {batch}", problem="out of memory")


def _measure_peer(
    options: Any,
    output: lines.Lines,
    torch: Any,
    timm: Any,
    transformers: Any,
    device: Any,
    length: int,
    batch: int,
) -> None:
    names = {
        kind: f"PyTorch compiled, {kind}, {length} tokens, batch {batch}"
        for kind in ("timm's LAMB", "fused AdamW")
    }
    if all(map(output.has, names.values())):
        return
    run = prepare(config_of(length, batch, options.data, options.small), None)
    model = run.spec.model
    network = (
        transformers.BertForPreTraining(
            transformers.BertConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads,
                intermediate_size=model.intermediate_size,
                attn_implementation="sdpa",
            )
        )
        .to(device)
        .train()
    )
    loss = torch.compile(peer_loss(torch, network))
    arrays = run.train_set.gather(np.arange(batch))
    tensors = {
        key: torch.from_numpy(value.astype(np.int64) if value.dtype == np.int32 else value).to(
            device
        )
        for key, value in arrays.items()
    }
    peak = topology.peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    for kind, name in names.items():
        parameters = list(network.parameters())
        optimizer = (
            torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)
            if kind == "fused AdamW"
            else peers.lamb(timm, parameters, True, lr=1e-3, weight_decay=0.01)
        )

        def update() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(tensors)
            value.backward()
            optimizer.step()

        began = time.perf_counter()
        update()  # compiles
        finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        finish()
        first = round(time.perf_counter() - began, 1)
        seconds = timed(update, finish, 0.2 if options.small else _SECONDS)
        output.add(
            name,
            **rates(run, seconds, peak),
            compile_seconds=first,
            peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        )


def main(options: Any) -> None:
    """Measures our update in this process, and PyTorch's update in a second process."""
    output = lines.Lines(options.out, "bert")
    if options.peer:
        measure_peer(options, output)
        return
    peer = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *given, "--peer"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},  # it uses JAX only to count FLOPs
        preexec_fn=children.following(),
    )
    jobs = {length: Ours(length, options, output) for length in LENGTHS}
    try:
        for length, job in jobs.items():
            job.measure(2 if options.small else _FIRST[length])
    finally:
        peer.wait()
    for job in jobs.values():
        measure_largest(job)


if __name__ == "__main__":
    # PyTorch needs memory too, and the largest batch needs nearly all of the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    given = sys.argv[1:]
    del sys.argv[1:]
    cli.run_main(lambda: main(lines.parse("bert", given)))
