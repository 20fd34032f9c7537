"""Facts in which all processes of a run must agree: code, libraries, settings, config and data.

One host with an old checkout, another seed or another copy of the data would train with the others
and spoil the run and its record. `check_start` compares what is known before anything is built,
`check_data` the data sets and the custom code once they are loaded. In a run of one process neither
does anything.

The package is compared by the content of its files, not by its commit: an installed package has no
commit, and a commit says nothing of changed files. Paths are compared as they are given: every
process writes its shards of a checkpoint below --workdir, so it must be one folder for all.
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
from ml_collections import ConfigDict

from lamb_tpu import __version__, config, own, trust
from lamb_tpu.cluster import agreement, distributed
from lamb_tpu.data import Source
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Files of the package that change what is computed; pages do not.
_SUFFIXES = {".py", ".npz"}
_LIBRARIES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "chex",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "ml_collections",
    "array-record",
    "tensorflow-datasets",
    "tokenizers",
    "pillow",
)
# JAX' settings that change numbers, random keys or the program.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_dtype_bits",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_platforms",
    "jax_enable_custom_prng",
    "jax_softmax_custom_jvp",
    "jax_random_seed_offset",
)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Flags of XLA that may differ: where it writes, and how many devices a CPU has.
_FREE_FLAG = re.compile(r"--xla_(dump_|force_host_platform_device_count|gpu_per_fusion_autotune)")
# A set in memory of at most this size is compared completely, of a larger or another one some
# examples, evenly spread.
_COMPLETE_BYTES = 32 * 2**20
_IN_MEMORY, _READ = 1024, 8
_REMEDIES = {
    "lamb_tpu": "install the same version on every host",
    "library": "install the same versions on every host",
    "setting": "start all processes in the same environment",
    "module": "copy the same file to every host",
    "set": "give every process the same data",
    "": "start all processes with the same command",
}


def check_start(
    given: ConfigDict | None,
    workdir: str | os.PathLike[str] | None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Compares code, libraries, settings, config and options of all processes.

    Call it first, before anything can fail or wait in one process alone.

    Args:
      given: the config; None if it is read from the workdir later.
      workdir: the run's folder.
      options: further flags of the command, by their names.

    Raises:
      UserError: processes differ; it is raised in all of them.
    """
    if distributed.index_and_count()[1] == 1:
        return
    flat = {} if given is None else _flat(given)
    folder = None if workdir is None else os.fspath(workdir)
    if folder is not None and not buckets.is_remote(folder):
        folder = os.path.abspath(os.path.expanduser(folder))
    agreement.compare(
        {
            **dict(_code()),
            **dict(_libraries()),
            **dict(_environment()),
            **{f"config.{key}": json.dumps(value) for key, value in flat.items()},
            "--workdir": str(folder),
            **{name: str(value) for name, value in (options or {}).items()},
            **dict(_named_modules(flat)),
        },
        _remedy,
    )


def check_data(training: Source, evaluation: Source) -> None:
    """Compares the data sets of all processes, and the custom modules that they have loaded.

    Of a set these are compared: its name, which has a digest for some, length, fields, classes,
    vocabulary, and all or some examples.

    Raises:
      UserError: processes differ; it is raised in all of them.
    """
    if distributed.index_and_count()[1] == 1:
        return
    facts: dict[str, str] = {}
    # An example can be damaged in one process alone.
    with distributed.together():
        facts |= dict(_loaded_modules())
        for noun, source in (("training set", training), ("evaluation set", evaluation)):
            facts |= {f"{what} of the {noun}": text for what, text in _of_set(source)}
    agreement.compare(facts, _remedy)


def _remedy(key: str) -> str:
    for part, pattern in (
        ("lamb_tpu", r"the (version|file) .*lamb_tpu"),
        ("library", "the version of"),
        ("setting", "the (setting|environment)"),
        ("module", "the custom module"),
        ("set", ".* of the (training|evaluation) set"),
    ):
        if re.match(pattern, key):
            return _REMEDIES[part]
    return _REMEDIES[""]


def _flat(given: ConfigDict) -> dict[str, Any]:
    try:
        return config.flatten(given)
    except UserError as error:  # a value that no config may have, perhaps in this process alone
        return {"*": str(error)}


def _code() -> Iterator[tuple[str, str]]:
    yield "the version of lamb_tpu", __version__
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix in _SUFFIXES:
            yield f"the file {path.relative_to(_PACKAGE.parent)} of lamb_tpu", _digest_of(path)


def _libraries() -> Iterator[tuple[str, str]]:
    # Bug fixes of Python change no numbers.
    yield "the version of Python", ".".join(platform.python_version_tuple()[:2])
    for name in _LIBRARIES:
        try:
            yield f"the version of {name}", importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _environment() -> Iterator[tuple[str, str]]:
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
    found = {name for value in flat.values() if (name := own.module_of(value)) is not None}
    for name in sorted(found):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None:
            try:
                spec = importlib.util.find_spec(name)
            except (Exception, SystemExit):  # a parent package, which this imports, can fail
                spec = None
            file = None if spec is None else spec.origin
        if file is not None and os.path.isfile(file):
            yield f"the custom module {name}", _digest_of(pathlib.Path(file))


def _loaded_modules() -> Iterator[tuple[str, str]]:
    """Yields the digest of each loaded module beside or below a custom one, its helpers too."""
    folders = {
        str(
            pathlib.Path(file).parent.parent
            if pathlib.Path(file).stem == "__init__"
            else pathlib.Path(file).parent
        )
        for top in own.imported_tops()
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
