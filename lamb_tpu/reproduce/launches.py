"""Prints launches of a table's cells on a TPU slice, as commands of `lamb_tpu.launch`.

If the batch of a later stage, such as fine-tuning, is not divisible by the number of devices, that stage
uses the largest slice of the same TPU generation whose number of devices divides the batch.
"""

import pathlib
import re
from collections.abc import Iterator, Sequence

from lamb_tpu.cost import slices
from lamb_tpu.cost.topology import Topology, topology
from lamb_tpu.errors import UserError
from lamb_tpu.launch import generations
from lamb_tpu.launch.pod import Pod, make_pod
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.reproduce import commands
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.commands import BUCKET, PROJECT, ZONE, comment, quote
from lamb_tpu.reproduce.jobs import Job, JobStage
from lamb_tpu.reproduce.tables import Cell, Scale, Table
from lamb_tpu.run import checks, phases
from lamb_tpu.spec import Spec

_LONGEST_NAME = 63
# Folder beside the code on every host; the launch copies --data into it.
_COPIED = "data"


def lines(
    table: Table, scale: Scale, cells: Sequence[Cell], data: str | None, name: str
) -> list[str]:
    """Returns the launches of cells on the slice `name`, after lines about their data and variables.

    `data` is a bucket folder that contains the data sets' folders; None: gs://${BUCKET}/data.
    """
    slice_ = topology(name)
    if slice_.slices > 1:
        raise UserError(
            "--topology",
            name,
            "names several slices",
            f"use one slice, such as {name.partition('x')[2]}",
        )
    interface = preferred(slice_.version)
    root = data or f"gs://{BUCKET}/data"
    needed = commands.needs(table, scale, cells, _COPIED)
    missing = {key: folder for key, folder in needed.items() if not folder.downloaded}
    shown = needed if data is not None else missing
    result = []
    if shown:
        result += [
            comment(f"{root.replace(BUCKET, 'BUCKET')} must contain a copy of ./{_COPIED}:"),
            *commands.listing(shown, _COPIED),
            comment(f"  gcloud storage rsync {_COPIED} {quote(root)} --recursive"),
        ]
    result += [
        comment("each launch prints its steps; add --run before -- to run them"),
        *commands.checked("BUCKET", "ZONE", *(["PROJECT"] if interface == "compute" else [])),
    ]
    rejected, printed = list[UserError](), 0
    for cell in cells:
        stages = jobs_lib.stages(Job(table, scale, cell, 0), root if shown else None)
        try:
            launched = list(_launches(table, cell, stages, slice_, interface, root))
        except UserError as error:
            prefix = f"{table.key}: cell {cell.name} does not run on --topology={name}"
            rejected.append(error.at(prefix))
            result.append(comment(str(rejected[-1])))
        else:
            result += launched
            printed += 1
    if rejected and not printed:
        raise rejected[0]
    return result


def preferred(version: str) -> str:
    """Returns a TPU generation's launch type that needs neither a container image nor a cluster.

    >>> preferred("v3"), preferred("v6e")
    ('queued-resource', 'compute')
    """
    # The Cloud TPU API gets no new features, so use its queue only if a generation has no alternative.
    return "compute" if "compute" in generations.interfaces(version) else "queued-resource"


def _launches(
    table: Table,
    cell: Cell,
    stages: Sequence[JobStage],
    slice_: Topology,
    interface: str,
    root: str,
) -> Iterator[str]:
    folder = pathlib.Path("runs", table.key, cell.name)
    workdirs = [f"gs://{BUCKET}/{path}" for path in jobs_lib.stage_folders(folder, stages)]
    for number, (stage, workdir) in enumerate(zip(stages, workdirs)):
        config = stage.config()
        chosen = _largest(config, slice_) if number else slice_
        batches = _batches(config, chosen)
        stage, copied = _on_hosts(stage, root)
        train = stage.arguments(workdir, workdirs[number - 1] if number else None)
        suffix = f"-{number + 1}" if len(stages) > 1 else ""
        machines = _machine_name(f"{table.key}-{cell.name}", suffix)
        pod = make_pod(
            interface, chosen.name, machines, [word.replace(BUCKET, "BUCKET") for word in train]
        )
        which = f", stage {number + 1} of {len(stages)}" * (len(stages) > 1)
        yield comment(f"{cell.name}{which}: {_shares(batches, pod)}")
        if chosen != slice_:
            yield comment(
                f"  {chosen.name} is the largest slice up to {slice_.name} for a batch of "
                f"{config.batch_size:,}"
            )
        words = [
            "python",
            "-m",
            "lamb_tpu.launch",
            interface,
            f"--topology={chosen.name}",
            f"--name={machines}",
            f"--zone={ZONE}",
            *([f"--project={PROJECT}"] if interface == "compute" else []),
            *([f"--data={copied}"] if copied else []),
            "--",
            *train,
        ]
        yield " ".join(map(quote, words))


def _batches(config: Spec, slice_: Topology) -> list[tuple[str, int, int]]:
    """Returns (name, batch size, microbatches) of each phase, after checking the batch on a slice."""
    batches = []
    for phase in phases.split(config):
        with phases.errors_in_phase(phase.name):
            mesh = mesh_lib.abstract_mesh(phase.config.mesh, slice_.num_devices)
            checks.check_batch(phase.config, mesh)
        batches.append((phase.name, phase.config.batch_size, phase.config.accumulation_steps))
    return batches


def _largest(config: Spec, most: Topology) -> Topology:
    """Returns `most`, or else the largest smaller slice, that splits all batches of a config evenly."""
    sizes = sorted(slices.shapes(most.version), reverse=True)
    others = (topology(f"{most.version}-{size}") for size in sizes)
    reasons = []
    for each in (most, *(other for other in others if other.num_devices < most.num_devices)):
        try:
            _batches(config, each)
        except UserError as error:
            reasons.append(error)
        else:
            return each
    raise reasons[0]


def _shares(batches: Sequence[tuple[str, int, int]], pod: Pod) -> str:
    """Describes how many examples of each batch each device, and each process, gets."""
    devices, hosts = pod.topology.num_devices, pod.hosts
    texts = []
    for phase, batch, steps in batches:
        text = f"a batch of {batch:,} is {batch // devices:,} per device"
        if steps > 1:
            text += f" in {steps} microbatches"
        texts.append(
            (f"in {phase} " if phase else "") + f"{text} and {batch // hosts:,} per process"
        )
    return f"{pod.topology.name} has {devices:,} devices in {hosts:,} processes; {'; '.join(texts)}"


def _on_hosts(stage: JobStage, root: str) -> tuple[JobStage, str | None]:
    """Returns a stage that reads the copied data, and the bucket folder to copy (None for no data)."""
    data_paths = {
        key: value
        for key, value in stage.overrides.items()
        if isinstance(value, str) and value.startswith(f"{root}/")
    }
    if not data_paths:
        return stage, None
    # Copy one folder: that of the data set, or the parent folder if the stage reads several data sets.
    copied = root if len(data_paths) > 1 else next(iter(data_paths.values()))
    changed = {key: _COPIED + value.removeprefix(copied) for key, value in data_paths.items()}
    return stage._replace(overrides={**stage.overrides, **changed}), copied


def _machine_name(text: str, suffix: str) -> str:
    """Returns a machine name that Google Cloud accepts: lower-case letters, digits and hyphens."""
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return plain[: _LONGEST_NAME - len(suffix)].rstrip("-") + suffix
