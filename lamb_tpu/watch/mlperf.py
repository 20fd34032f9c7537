"""A log in the format of MLPerf's training benchmarks: `config.log.mlperf`.

Each line of WORKDIR/mlperf.log is `:::MLLOG` and a JSON object, with the keys of the package
mlperf-logging, so the tools of that package can read it. The package itself is not used: it would
bring pandas and SciPy for its tools, and its logging is a few lines.

A start writes `init_start` when it begins, then its hyperparameters, `init_stop` when everything is
compiled, `run_start`, a block for each interval from one evaluation to the next, and `run_stop`.
The status of `run_stop` is 'success' if the target was reached, and nothing follows it; otherwise
it is 'aborted'. A start that was killed has no `run_stop`. `first_epoch_num` counts epochs from 1.
`epoch_num` is the number of completed epochs, with a fraction, and `samples_count` the number of
examples.

A submission needs further lines that only the submitter knows, such as `submission_org`,
`submission_platform` and `cache_clear`. The rules do not allow pausing the clock, so a run of
several starts cannot be submitted.

References: mlcommons/logging, mllog/constants.py and compliance_checker/training_*/common.yaml;
mlcommons/training_policies, training_rules.adoc ("Run Results", "Hyperparameters").
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from lamb_tpu.files import writing
from lamb_tpu.optim import factory
from lamb_tpu.run.build import Run
from lamb_tpu.run.recipe import optimizer_of
from lamb_tpu.watch.observer import Observer, Start
from lamb_tpu.watch.target import Target

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"

_ADAM = {"b1": "beta_1", "b2": "beta_2", "eps": "epsilon"}
_SGD = ("sgd", {"momentum": "sgd_opt_momentum", "weight_decay": "sgd_opt_weight_decay"})
# Our names of optimizers -> MLPerf's names, and the same for their arguments.
_OPTIMIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "lamb": (
        "lamb",
        {key: f"opt_lamb_{name}" for key, name in _ADAM.items()}
        | {"weight_decay": "opt_lamb_weight_decay_rate"},
    ),
    "lars": (
        "lars",
        {
            "momentum": "lars_opt_momentum",
            "weight_decay": "lars_opt_weight_decay",
            "eps": "lars_epsilon",
        },
    ),
    "adam": ("adam", {key: f"opt_adam_{name}" for key, name in _ADAM.items()}),
    "adamw": (
        "adamw",
        {key: f"opt_adamw_{name}" for key, name in _ADAM.items()}
        | {"weight_decay": "opt_adamw_weight_decay"},
    ),
    "adagrad": (
        "adagrad",
        {"eps": "opt_adagrad_epsilon"}
        | {"initial_accumulator_value": "opt_adagrad_initial_accumulator_value"},
    ),
    "sgd": _SGD,
    "momentum": _SGD,
    "nesterov": _SGD,
}


def hyperparameters(run: Run) -> dict[str, Any]:
    """Returns the hyperparameters of a run under MLPerf's names.

    The learning rates are those after scaling to the batch size. An optimizer without a name in
    MLPerf gets its own name, and only its weight decay.
    """
    config, recipe, schedule = run.config, run.recipe, run.config.schedule
    arguments = _arguments(run)
    name, names = _OPTIMIZERS.get(
        config.optimizer.name, (config.optimizer.name, {"weight_decay": "opt_weight_decay"})
    )
    values = {
        "global_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "train_samples": recipe.num_examples,
        "eval_samples": len(run.eval_set),
        "seed": config.seed,
        "opt_name": name,
        "opt_base_learning_rate": recipe.peak_learning_rate,
        "opt_learning_rate_warmup_steps": recipe.warmup_steps,
        "opt_learning_rate_warmup_epochs": recipe.epoch(recipe.warmup_steps),
        "opt_learning_rate_training_steps": recipe.total_steps,
    }
    values |= {key: arguments[ours] for ours, key in names.items() if ours in arguments}
    if name in ("lars", "sgd"):
        values[f"{name}_opt_base_learning_rate"] = recipe.peak_learning_rate
        if name == "lars":
            values["lars_opt_learning_rate_warmup_epochs"] = recipe.epoch(recipe.warmup_steps)
        if schedule.decay == "polynomial":
            values |= {
                f"{name}_opt_end_learning_rate": schedule.end_factor * recipe.peak_learning_rate,
                f"{name}_opt_learning_rate_decay_poly_power": schedule.power,
                f"{name}_opt_learning_rate_decay_steps": recipe.total_steps,
            }
    if config.ema.decay:
        values["model_eval_ema_factor"] = config.ema.decay
    return values


def _arguments(run: Run) -> dict[str, Any]:
    """Returns every argument of the optimizer, including those left at their defaults."""
    fields = run.config.optimizer.to_dict()
    arguments = factory.arguments_of({**fields, "name": optimizer_of(fields["name"])})
    if run.recipe.weight_decay is not None:
        arguments["weight_decay"] = run.recipe.weight_decay
    return arguments


class MLPerfLog(Observer):
    """Appends the lines of one start, in the first process, until the target is reached.

    Args:
      run: the run; nothing is written unless `config.log.mlperf` is True.
      target: the run's target. MLPerf calls its metric `eval_accuracy`, whatever it is.
    """

    def __init__(self, run: Run, target: Target) -> None:
        self._run, self._recipe, self._target = run, run.recipe, target
        self._metric = run.config.target.metric
        self._file: writing.LineFile | None = None
        self._block: dict[str, Any] | None = None

    def started(self, start: Start) -> None:
        """Writes the beginning of the start, its `hyperparameters`, and `run_start`."""
        wanted = self._run.config.log.mlperf and jax.process_index() == 0
        # A complete run that is started again is no further attempt at the target.
        has_work = start.eval_due or not start.is_over
        if not wanted or not has_work or self._target.reached is not None:
            return
        assert self._run.folder is not None  # a start has one
        self._file = writing.LineFile(self._run.folder.path / "mlperf.log", start.fail)
        # Compiling is over at this point, so the line is dated back to when the start began.
        self._write(_START, "init_start", ago=start.clock.startup_of_this_start)
        for key, value in hyperparameters(self._run).items():
            self._write(_POINT, key, value)
        self._write(_END, "init_stop")
        self._write(_START, "run_start", metadata=self._samples(start.step))

    def updating(self, step: int) -> None:
        """Begins a block after `step` updates, unless one has begun."""
        if self._file is None or self._block is not None:
            return
        recipe = self._recipe
        # There always is one: the last update is evaluated.
        due = next(
            later
            for later in range(step + 1, recipe.total_steps + 1)
            if recipe.is_due(recipe.eval_every, later)
        )
        first = math.floor(recipe.epoch(step)) + 1
        count = recipe.epoch(due) - recipe.epoch(step)
        self._block = {"first_epoch_num": first, "epoch_count": count}
        self._write(_START, "block_start", metadata=self._block | self._samples(step))

    @contextlib.contextmanager
    def paused(self, step: int, reason: str) -> Iterator[None]:
        """Writes the beginning and the end of an evaluation, which also ends the block."""
        if reason != "evaluation":
            if self._file is not None:
                self._file.flush()  # a resumed run does not write these lines again
            yield
            return
        # An evaluation that a resumed run repeats comes before its first block.
        if self._block is not None:
            self._write(_END, "block_stop", metadata=self._block | self._samples(step))
            self._block = None
        self._write(_START, "eval_start", metadata=self._place(step))
        yield
        self._write(_END, "eval_stop", metadata=self._place(step))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metric of an evaluation; if it reaches the target, writes `run_stop`."""
        value = metrics.get(self._metric)
        told: float | str | None = value
        place = {**self._place(step), "metric": self._metric}
        if value is not None and not math.isfinite(value):
            told = str(value)  # JSON has no NaN
        self._write(_POINT, "eval_accuracy", told, place)
        if self._target.reached is not None:
            self._stop("success", self._place(step))

    def ended(self) -> None:
        self._stop("aborted")

    def _stop(self, status: str, place: Mapping[str, Any] | None = None) -> None:
        self._write(_END, "run_stop", metadata={"status": status, **(place or {})})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _samples(self, step: int) -> dict[str, Any]:
        return {"samples_count": step * self._recipe.batch_size}

    def _place(self, step: int) -> dict[str, Any]:
        return {"epoch_num": self._recipe.epoch(step), **self._samples(step)}

    def _write(
        self,
        event_type: str,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        ago: float = 0.0,
    ) -> None:
        if self._file is None:
            return
        line = {
            "namespace": "",
            "time_ms": int((time.time() - ago) * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": metadata or {},
        }
        self._file.write(f":::MLLOG {json.dumps(line)}")
