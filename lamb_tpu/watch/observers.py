"""The observers of a run, in the order in which their hooks are called."""

from lamb_tpu.run.build import Run
from lamb_tpu.run.preflight import examine
from lamb_tpu.run.recipe import CurrentRecipe
from lamb_tpu.run.statistics import settings_of
from lamb_tpu.watch.batch_rule import BatchRule
from lamb_tpu.watch.best import Best
from lamb_tpu.watch.desync import Desync
from lamb_tpu.watch.evaluations import Evaluations
from lamb_tpu.watch.guards import Guards
from lamb_tpu.watch.heartbeat import Heartbeat
from lamb_tpu.watch.images import Images
from lamb_tpu.watch.lipschitz import Lipschitz
from lamb_tpu.watch.mlperf import MLPerfLog
from lamb_tpu.watch.module_factors import ModuleFactors
from lamb_tpu.watch.noise_scale import NoiseScale
from lamb_tpu.watch.observer import Observers
from lamb_tpu.watch.profile import Profile
from lamb_tpu.watch.progress import RunProgress
from lamb_tpu.watch.ratios import Ratios
from lamb_tpu.watch.records import Records
from lamb_tpu.watch.target import Target
from lamb_tpu.watch.throughput import Throughput


def make_observers(
    run: Run, current: CurrentRecipe, progress: RunProgress, profile: int = 0
) -> Observers:
    """Returns the observers of a run.

    Observers that add to a record come before the observers that write and show the record.

    Args:
      run: the run.
      current: the run's recipe, with the batch sizes decided so far.
      progress: the observer that shows the progress, and prints lines for the other observers.
      profile: number of updates to profile; 0 profiles nothing.
    """
    spec, report = run.spec, progress.message
    measured = settings_of(run.spec)
    measures = measured.noise_scale or measured.preconditioned
    target = Target(spec.target, current, report)
    throughput = Throughput(run.amounts(), lambda step: current.value.place(step))
    return Observers(
        [
            Guards(
                settings=spec.guards,
                rate=lambda step: current.value.rate(step),
                warn=progress.warn,
                report=report,
                examine=lambda update: examine(run, current.value, update),
            ),
            BatchRule(current),
            Desync(run, current),
            Best(spec.checkpoint.best, spec.checkpoint.best_mode),
            Ratios(run),
            ModuleFactors(spec.optimizer),
            # Only if the noise scale is measured, because every checkpoint contains its averages.
            *([NoiseScale(measured.decay)] if measures else []),
            # Before Throughput, which must not count the time of the estimate.
            Lipschitz(run, throughput.paused),
            throughput,
            Images(run, report),
            Records(current),
            progress,
            Evaluations(spec.guards.allow_nonfinite_eval, progress.warn),
            # After Records: in metrics.jsonl the target follows the evaluation that reached it.
            target,
            # After Target, because it logs Target's result.
            MLPerfLog(run, target),
            Heartbeat(spec.log.heartbeat_seconds),
            *([Profile(profile, run, report, throughput.paused)] if profile else []),
        ]
    )
