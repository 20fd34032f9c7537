"""Recorded choices and runs of L-GreCo, recomputed with `lamb_tpu.parallel.exchange`."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lamb_tpu.parallel.exchange import choosing
from lamb_tpu.parallel.exchange.lgreco import LGreCo, squared_errors
from tests.optim.golden_common import Settings
from tests.parallel.golden_powersgd import Run
from tests.parallel.torch_random import TorchGenerator

Arrays = Mapping[str, np.ndarray]
# The authors' hook multiplies its average gradient by this factor before a measurement.
DELTA = 0.01
SOLVED, GARBAGE, INDEX_ERROR = range(3)


def repeat(entry: Mapping[str, Any], recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Returns our choices, tables and means under the keys of the record."""
    del inputs
    implementation = entry["implementation"]
    if implementation not in REPEATS:
        raise ValueError(f"implementation={implementation!r} must be a key of REPEATS")
    settings = Settings(entry["hyper"])
    settings.legend("arrays")
    return REPEATS[implementation](settings, recorded)


def _choices(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Repeats the choices from one table of errors with several budgets."""
    settings.legend("kind")
    errors, sizes = recorded["errors"], recorded["sizes"]
    if errors.shape != (settings.take("layers"), settings.take("choices")):
        raise ValueError(f"errors must be (layers, choices), not {errors.shape}")
    reference, layers = int(recorded["reference_column"]), np.arange(len(errors))
    rows = []
    factors = settings.take("alphas")
    settings.check_empty("author_dp")
    for factor in factors:
        target = choosing.budget(errors, reference, factor)
        buckets = choosing.in_buckets(errors, target)
        choice = choosing.choose(errors, sizes, reference, factor)
        rows.append(
            {
                "alpha": factor,
                "target": target,
                "buckets": buckets,
                "reference_buckets": buckets[:, reference].sum(),
                "choice": [-1] * len(errors) if choice is None else choice,
                "total_size": np.inf if choice is None else sizes[layers, choice].sum(),
                "outcome": SOLVED if choice is not None else _unguarded(buckets, sizes),
            }
        )
        if "exact_optimum_size" in recorded:
            rows[-1]["exact_optimum_size"] = _least_size(errors, sizes, target)
    given = {name: recorded[name] for name in ("errors", "sizes", "values", "reference_column")}
    return given | {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _unguarded(buckets: np.ndarray, sizes: np.ndarray) -> int:
    """Returns what the published code does if no choice is within the budget.

    The code starts from budget 0, for which the last layer has no option, and uses -1 as an index.
    It then returns a meaningless choice, or raises an IndexError.
    """
    options, used = choosing.tables(buckets, sizes).options, 0
    for layer in reversed(range(len(buckets))):
        if used < -options.shape[1]:
            return INDEX_ERROR
        used -= buckets[layer, options[layer, used]]
    return GARBAGE


def _least_size(errors: np.ndarray, sizes: np.ndarray, target: float) -> float:
    """Returns the least size by enumerating all choices, without rounding of errors to buckets."""
    layers, best = np.arange(len(errors)), np.inf
    for choice in itertools.product(range(errors.shape[1]), repeat=len(errors)):
        if errors[layers, choice].sum() <= target:
            best = min(best, sizes[layers, choice].sum())
    return best


def _hook(settings: Settings, recorded: Arrays) -> dict[str, np.ndarray]:
    """Repeats a run of the authors' hook in one process, with all its choices of ranks."""
    shapes, rank = settings.take("shapes"), settings.take("matrix_approximation_rank")
    lower = settings.take("gamma", 0.5)
    if rank * lower < 1:
        raise NotImplementedError("gamma * rank must be at least 1, because rank 0 drops a layer")
    method = settings.take("error_method")
    exchange = LGreCo(
        ("workers",),
        1,
        rank=rank,
        lower=lower,
        upper=settings.take("beta", 2),
        factor=settings.take("alpha"),
        interval=settings.take("adjust_freq"),
        start=settings.take("start_iter"),
        min_saving=settings.take("min_compression_rate"),
        measure={"Power": "power", "SVD": "svd"}[method],
        error_feedback=settings.take("error_feedback"),
        max_programs=100,
    )
    random = TorchGenerator(settings.take("seed"))
    settings.check_empty("author_powersgd_hook")
    names = [str(index) for index in range(len(shapes))]
    grads = {name: recorded["grad/" + name][None] for name in names}
    run, params = Run(exchange, grads), {name: leaf[0, 0] for name, leaf in grads.items()}
    sent = {m.path: m for m in exchange.matrices(params)}
    widths = {m.path: min(rank, m.rows, m.columns) for m in sent.values()}
    seeds = np.random.RandomState(0)
    actual: dict[str, np.ndarray] = {key: recorded[key] for key in recorded if key[:5] == "grad/"}
    ranks, adjusted = [], 0
    for step in range(len(recorded["output"])):
        if step == exchange.start:
            first = TorchGenerator(seeds.randint(1_000_000_000))
            _set_q(run, {m.path: first.randn(m.columns, widths[m.path]) for m in sent.values()})
        if exchange.due(step):
            whole = {k: v[0] for k, v in run.residual.whole.items() if k in ("errors", "choices")}
            if method == "Power":
                whole["errors"] = _errors_by_rank(random, exchange, sent, run)
            errors = np.asarray(whole["errors"], np.float64) * DELTA
            target = choosing.budget(errors, exchange.options.index(rank), exchange.factor)
            run.exchange = run.exchange.chosen(params, whole)
            chosen = run.exchange.ranks or (rank,) * len(sent)
            new = {
                "buckets": choosing.in_buckets(errors, target),
                "target": np.array(target),
                "sizes": exchange.sizes(list(sent.values())),
                "ranks": np.array(chosen),
            } | {
                f"accumulated/{m.path}": np.asarray(run.residual.device["average"][m.path][0, 0])
                * np.float32(DELTA)
                for m in sent.values()
            }
            actual |= {f"adjust{adjusted}/{key}": value for key, value in new.items()}
            adjusted += 1
            _set_q(run, _redrawn(random, sent, chosen))
        run.update(step)
        ranks.append(run.exchange.ranks or (rank,) * len(sent))
    flat = [np.concatenate([mean[name].ravel() for name in names]) for mean in run.means]
    return actual | {"output": np.stack(flat), "ranks": np.array(ranks)}


def _errors_by_rank(
    random: TorchGenerator, exchange: LGreCo, sent: Mapping[str, Any], run: Run
) -> np.ndarray:
    """Returns the errors of separate power iterations for each rank, from the hook's random starts.

    The exchange instead takes all errors from one power iteration with the largest rank. These
    errors are nearer to the optimal errors.
    """
    table = np.zeros((len(sent), len(exchange.options)))
    for row, m in zip(table, sent.values(), strict=True):
        for column, width in enumerate(exchange.options):
            if width <= min(m.rows, m.columns):
                start = random.randn(m.columns, width)[None]
                average = run.residual.device["average"][m.path][0]
                squares = squared_errors(average, jnp.asarray(start), [width], "power")
                row[column] = np.sqrt(float(squares[0]))
    return table


def _redrawn(
    random: TorchGenerator, sent: Mapping[str, Any], ranks: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Returns the hook's new Q of all matrices after a choice; the hook draws them together."""
    widths = [min(r, m.rows, m.columns) for r, m in zip(ranks, sent.values(), strict=True)]
    lengths = [w * m.columns for w, m in zip(widths, sent.values(), strict=True)]
    parts = np.split(random.randn(sum(lengths)), np.cumsum(lengths)[:-1])
    return {
        m.path: part.reshape(m.columns, width)
        for m, part, width in zip(sent.values(), parts, widths, strict=True)
    }


def _set_q(run: Run, given: Mapping[str, np.ndarray]) -> None:
    """Replaces the first columns of Q for the matrices in `given`."""
    held = {name: np.array(value[0, 0]) for name, value in run.residual.whole["q"].items()}
    for name, value in given.items():
        held[name][:, : value.shape[1]] = value
    run.set_whole("q", held)


REPEATS = {"author_dp": _choices, "author_powersgd_hook": _hook}
