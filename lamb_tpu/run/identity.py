"""Checks that all processes of a run agree in code, libraries, settings, config and data.

One host with an old checkout, another seed or another copy of the data would silently spoil the
run and its record. The package is compared by the content of its files: an installed package has no
commit, and a commit does not show uncommitted changes.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lamb_tpu import __version__, custom, trust
from lamb_tpu.cluster import agreement, distributed
from lamb_tpu.data import Source
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.spec import Config, flatten

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Files of the package that can change the results.
_SUFFIXES = {".py", ".npz"}
_LIBRARIES = (
    "jax jaxlib libtpu flax optax chex orbax-checkpoint grain numpy ml_collections "
    "array-record tensorflow-datasets tokenizers pillow"
).split()
# Settings of JAX that change numbers, random keys or the program.
_SETTINGS = (
    "jax_enable_x64 jax_default_matmul_precision jax_default_prng_impl "
    "jax_threefry_partitionable jax_numpy_dtype_promotion jax_numpy_rank_promotion "
    "jax_default_dtype_bits jax_disable_jit jax_debug_nans jax_debug_infs jax_platforms "
    "jax_enable_custom_prng jax_softmax_custom_jvp jax_random_seed_offset"
).split()
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# XLA flags that may differ: output and cache folders, and the number of simulated CPU devices.
_FREE_FLAG = re.compile(r"--xla_(dump_|force_host_platform_device_count|gpu_per_fusion_autotune)")
# Data sets in memory up to this size are compared completely.
_COMPLETE_BYTES = 32 * 2**20
# Numbers of evenly spaced examples to compare: in a larger set in memory, and in a set read from files.
_IN_MEMORY, _READ = 1024, 8
# Remedies for a difference, by a pattern of its key; the first pattern that matches decides.
_REMEDIES = (
    (r"the (version|file) .*lamb_tpu", "install the same version on every host"),
    ("the version of", "install the same versions on every host"),
    ("the (setting|environment)", "start all processes in the same environment"),
    ("the custom module", "copy the same file to every host"),
    (".* of the (training|evaluation) set", "give every process the same data"),
    ("", "start all processes with the same command"),
)


def check_start(
    given: Config | None,
    workdir: str | os.PathLike[str] | None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Compares code, libraries, settings, config and options of all processes.

    Call this function first, before anything can fail or wait in only one process.

    Args:
      given: the config; None if it is read from the workdir later.
      workdir: the run's folder, compared as a path: all processes write their shards into it.
      options: further flags of the command, by name.

    Raises:
      UserError: the processes differ; all processes raise the error.
    """
    if distributed.index_and_count()[1] == 1:
        return
    flat = {} if given is None else _flat(given)
    folder = None if workdir is None else os.fspath(workdir)
    if folder is not None and not buckets.is_remote(folder):
        folder = os.path.abspath(os.path.expanduser(folder))
    agreement.compare(
        {
            **dict(_of_host()),
            **{f"config.{key}": json.dumps(value) for key, value in flat.items()},
            "--workdir": str(folder),
            **{name: str(value) for name, value in (options or {}).items()},
            **dict(_named_modules(flat)),
        },
        _remedy,
    )


def check_data(training: Source, evaluation: Source) -> None:
    """Compares the data sets and the loaded custom modules of all processes."""
    if distributed.index_and_count()[1] == 1:
        return
    details: dict[str, str] = {}
    # An example can be damaged in only one process.
    with distributed.together():
        details |= dict(_loaded_modules())
        for noun, source in (("training set", training), ("evaluation set", evaluation)):
            details |= {f"{what} of the {noun}": text for what, text in _of_set(source)}
    agreement.compare(details, _remedy)


def _remedy(key: str) -> str:
    return next(remedy for pattern, remedy in _REMEDIES if re.match(pattern, key))


def _flat(given: Config) -> dict[str, Any]:
    try:
        return flatten(given)
    except UserError as error:  # an invalid value, perhaps in this process only
        return {"*": str(error)}


def _of_host() -> Iterator[tuple[str, str]]:
    yield "the version of lamb_tpu", __version__
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix in _SUFFIXES:
            yield f"the file {path.relative_to(_PACKAGE.parent)} of lamb_tpu", _digest_of(path)
    # Python's bug-fix releases change no results.
    yield "the version of Python", ".".join(platform.python_version_tuple()[:2])
    for name in _LIBRARIES:
        try:
            yield f"the version of {name}", importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in _SETTINGS:
        if (value := getattr(jax.config, name, None)) is not None:
            yield f"the setting {name}", str(value)
    for name in _VARIABLES:
        words = os.environ.get(name, "").split()
        yield (
            f"the environment variable {name}",
            repr(" ".join(word for word in words if not _FREE_FLAG.match(word))),
        )


def _named_modules(flat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the digest of each custom module that a config names, imported or not."""
    names = {name for value in flat.values() if (name := custom.module_of(value)) is not None}
    for name in sorted(names):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None:
            try:
                spec = importlib.util.find_spec(name)
            except (Exception, SystemExit):  # this imports the parent package, which can fail
                spec = None
            file = None if spec is None else spec.origin
        if file is not None and os.path.isfile(file):
            yield f"the custom module {name}", _digest_of(pathlib.Path(file))


def _loaded_modules() -> Iterator[tuple[str, str]]:
    """Yields the digest of each loaded module in or below the folder of a custom module."""
    folders = {
        str(
            pathlib.Path(file).parent.parent
            if pathlib.Path(file).stem == "__init__"
            else pathlib.Path(file).parent
        )
        for top in custom.imported_tops()
        if (file := getattr(sys.modules.get(top), "__file__", None)) and not trust.is_library(file)
    }
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            name != "__main__"
            and isinstance(file, str)
            and os.path.isfile(file)
            and any(pathlib.Path(file).is_relative_to(folder) for folder in folders)
            and not trust.is_library(file)
        ):
            yield f"the custom module {name}", _digest_of(pathlib.Path(file))


def _of_set(source: Source) -> Iterator[tuple[str, str]]:
    yield "the name", source.name
    yield "the length", f"{len(source):,}"
    yield (
        "the fields",
        ", ".join(
            f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in source.element_spec.items()
        ),
    )
    yield "the number of classes", str(source.num_classes)
    if source.vocabulary is not None:
        yield "the vocabulary", _digest("\n".join(source.vocabulary.tokens).encode())
    number = min(len(source), _IN_MEMORY if source.in_memory else _READ)
    size = len(source) * sum(spec.num_bytes for spec in source.element_spec.values())
    if source.in_memory and size <= _COMPLETE_BYTES:
        number = len(source)
    batch = source.gather(np.linspace(0, len(source) - 1, number).astype(np.int64))
    for name, values in sorted(batch.items()):
        yield f"examples (SHA-256 of {name!r})", _digest(np.ascontiguousarray(values).tobytes())


def _digest_of(path: pathlib.Path) -> str:
    return _digest(path.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
