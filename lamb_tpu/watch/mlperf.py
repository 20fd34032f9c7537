"""Log in the format of MLPerf's training benchmarks: `config.log.mlperf`.

The package mlperf-logging, whose tools can read WORKDIR/mlperf.log, is not a dependency: it requires
pandas and SciPy, while logging takes a few lines. A submission needs further lines that only the
submitter can provide, such as `submission_org`, `submission_platform` and `cache_clear`.

If the target is reached, `run_stop` has the status 'success' and is the last line, even if the run
continues. If the run ends or is preempted before it reaches the target, `run_stop` has the status
'aborted'. `first_epoch_num` counts epochs from 1.

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
from lamb_tpu.run.build import Run
from lamb_tpu.watch.observer import Observer, Start
from lamb_tpu.watch.target import Target

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"

_SGD = ("sgd", {"momentum": "sgd_opt_momentum", "weight_decay": "sgd_opt_weight_decay"})


def _adam(name: str, **further: str) -> tuple[str, dict[str, str]]:
    names = {"b1": "beta_1", "b2": "beta_2", "eps": "epsilon", **further}
    return name, {ours: f"opt_{name}_{theirs}" for ours, theirs in names.items()}


# Our optimizer name -> MLPerf's name, and our argument names -> MLPerf's.
_OPTIMIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "lamb": _adam("lamb", weight_decay="weight_decay_rate"),
    "lars": (
        "lars",
        {
            "momentum": "lars_opt_momentum",
            "weight_decay": "lars_opt_weight_decay",
            "eps": "lars_epsilon",
        },
    ),
    "adam": _adam("adam"),
    "adamw": _adam("adamw", weight_decay="weight_decay"),
    "adagrad": (
        "adagrad",
        {
            "eps": "opt_adagrad_epsilon",
            "initial_accumulator_value": "opt_adagrad_initial_accumulator_value",
        },
    ),
    "sgd": _SGD,
    "momentum": _SGD,
    "nesterov": _SGD,
}


def hyperparameters(run: Run) -> dict[str, Any]:
    """Returns the hyperparameters of a run under MLPerf's names.

    Learning rates are scaled to the batch size. An optimizer that MLPerf does not know is logged
    under its name in lamb_tpu, with only its weight decay.
    """
    spec, recipe, schedule = run.spec, run.recipe, run.spec.schedule
    arguments = dict(run.optimizer.arguments)
    if recipe.weight_decay is not None:
        arguments["weight_decay"] = recipe.weight_decay
    name, names = _OPTIMIZERS.get(
        spec.optimizer.name, (spec.optimizer.name, {"weight_decay": "opt_weight_decay"})
    )
    values = {
        "global_batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.accumulation_steps,
        "train_samples": recipe.num_examples,
        "eval_samples": len(run.eval_set),
        "seed": spec.seed,
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
    if spec.ema.decay:
        values["model_eval_ema_factor"] = spec.ema.decay
    return values


class MLPerfLog(Observer):
    """In process 0, appends lines to mlperf.log until the target is reached.

    MLPerf calls every target metric `eval_accuracy`.
    """

    def __init__(self, run: Run, target: Target) -> None:
        self._run, self._recipe, self._target = run, run.recipe, target
        self._metric = run.spec.target.metric
        self._file: writing.LineFile | None = None
        self._block: dict[str, Any] | None = None

    def started(self, start: Start) -> None:
        """Writes `init_start`, the hyperparameters, `init_stop` and `run_start`."""
        wanted = self._run.spec.log.mlperf and jax.process_index() == 0
        # Starting a complete run again is not another attempt at the target.
        has_work = start.eval_due or not start.is_over
        if not wanted or not has_work or self._target.reached is not None:
            return
        assert self._run.folder is not None  # every start has a folder
        self._file = writing.LineFile(self._run.folder.path / "mlperf.log", start.fail)
        # Everything is compiled by now, so backdate the line to the moment when the process began.
        self._write(_START, "init_start", ago=start.clock.startup_of_this_start)
        for key, value in hyperparameters(self._run).items():
            self._write(_POINT, key, value)
        self._write(_END, "init_stop")
        self._write(_START, "run_start", metadata=self._samples(start.step))

    def updating(self, step: int) -> None:
        """Begins a block after `step` updates, unless a block has already begun."""
        if self._file is None or self._block is not None:
            return
        recipe = self._recipe
        # The last update is always evaluated, so a later evaluation exists.
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
        """Writes the end of the block, and the beginning and end of an evaluation."""
        if reason != "evaluation":
            if self._file is not None:
                self._file.flush()  # before a save: a resumed run does not repeat these lines
            yield
            return
        # There is no block if a resumed run begins by repeating an evaluation.
        if self._block is not None:
            self._write(_END, "block_stop", metadata=self._block | self._samples(step))
            self._block = None
        self._write(_START, "eval_start", metadata=self._position(step))
        yield
        self._write(_END, "eval_stop", metadata=self._position(step))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metric of an evaluation; if it reaches the target, writes `run_stop`."""
        value = metrics.get(self._metric)
        logged: float | str | None = value
        position = {**self._position(step), "metric": self._metric}
        if value is not None and not math.isfinite(value):
            logged = str(value)  # JSON has no NaN
        self._write(_POINT, "eval_accuracy", logged, position)
        if self._target.reached is not None:
            self._stop("success", self._position(step))

    def ended(self) -> None:
        self._stop("aborted")

    def _stop(self, status: str, position: Mapping[str, Any] | None = None) -> None:
        self._write(_END, "run_stop", metadata={"status": status, **(position or {})})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _samples(self, step: int) -> dict[str, Any]:
        return {"samples_count": step * self._recipe.batch_size}

    def _position(self, step: int) -> dict[str, Any]:
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
