"""The observers of a run, in the order in which their hooks are called."""

import functools

from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import examine
from lamb_tpu.run.statistics import settings_of
from lamb_tpu.watch.batch_rule import BatchRule
from lamb_tpu.watch.best import Best
from lamb_tpu.watch.desync import Desync
from lamb_tpu.watch.evaluations import Evaluations
from lamb_tpu.watch.guards import Guards
from lamb_tpu.watch.heartbeat import Heartbeat
from lamb_tpu.watch.lipschitz import Lipschitz
from lamb_tpu.watch.mlperf import MLPerfLog
from lamb_tpu.watch.module_factors import ModuleFactors
from lamb_tpu.watch.noise_scale import NoiseScale
from lamb_tpu.watch.observer import Observers
from lamb_tpu.watch.pictures import Pictures
from lamb_tpu.watch.progress import RunProgress
from lamb_tpu.watch.ratios import Ratios
from lamb_tpu.watch.records import Records
from lamb_tpu.watch.target import Target
from lamb_tpu.watch.throughput import Throughput


def make_observers(run: Run, progress: RunProgress) -> Observers:
    """Returns the observers of a run.

    Observers that add to a record come before those that write and show it.

    Args:
      run: the run.
      progress: the observer that prints lines for all others.
    """
    config, recipe, tell = run.config, run.recipe, progress.message
    measured = settings_of(config)
    measures = measured.noise_scale or measured.preconditioned
    target = Target(config.target, recipe, tell)
    throughput = Throughput(run.amounts(), recipe.place)
    return Observers(
        [
            Guards(
                config.guards, recipe.rate, progress.warn, tell, functools.partial(examine, run)
            ),
            BatchRule(recipe),
            Desync(run),
            Best(config.checkpoint.best, config.checkpoint.best_mode),
            Ratios(run),
            ModuleFactors(run.config),
            # Without it a checkpoint has no averages.
            *([NoiseScale(measured.decay)] if measures else []),
            # Before the throughput, in which its time does not count.
            Lipschitz(run, throughput.paused),
            throughput,
            Pictures(run, tell),
            Records(recipe),
            progress,
            Evaluations(config.guards.allow_nonfinite_eval, progress.warn),
            # After the records: in metrics.jsonl the target follows the evaluation that reached it.
            target,
            # After the target, which it asks.
            MLPerfLog(run, target),
            Heartbeat(config.log.heartbeat_seconds),
        ]
    )
