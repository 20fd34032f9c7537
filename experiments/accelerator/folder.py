"""Makes and checks the folder that a machine without a package index needs beside the source tree.

FOLDER/wheels/*.whl                    packages that the machine lacks
FOLDER/data/mnist/*.gz                 MNIST's original files
FOLDER/data/cifar10/*.npz              CIFAR-10 as JPEGs of quality 75
FOLDER/data/bert/text                  a tokenized text, with BERT's vocabulary
FOLDER/commit.json                     the source tree's commit, and a digest of the tree's code
"""

import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator

from lamb_tpu.cluster import children
from lamb_tpu.data import originals
from lamb_tpu.data.images import cifar10_jpeg
from lamb_tpu.errors import UserError
from lamb_tpu.store import checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_BYTES, MOST_WITH_TREE = 50 * 10**6, 64 * 10**6
# Packages of the extra train, and their requirements, that a machine with JAX, Flax, Optax, Orbax and
# PyTorch lacks. Only text, percent slices and other data sets need more than the first three packages.
WHEELS = (
    "ml_collections==1.1.0",
    "msgspec==0.22.0",
    "simplejpeg==1.9.0",
    "array_record==0.8.6",
    "dm-tree==0.1.10",
    "grain==0.2.18",
    "immutabledict==4.3.1",
    "importlib_resources==7.1.0",
    "portpicker==1.6.0",
    "tensorboardX==2.6.5",
    "tensorflow-datasets==4.9.10",
    "tensorflow-metadata==1.21.0",
    "termcolor==3.3.0",
    "toml==0.10.2",
)
_SOURCES = ("promise==2.3",)  # published without a wheel
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")

_CHECK = """
import sys
from lamb_tpu import data
from lamb_tpu.store import checkout
folder = sys.argv[1]
assert checkout.commit().isalnum(), f"the code of the copy differs from its commit {checkout.commit()}"
assert len(data.load("mnist", "test", source_dir=folder + "/mnist")) == 10_000
assert len(data.load("cifar10_jpeg", "test[:64]", source_dir=folder + "/cifar10")) == 64
assert len(data.load("masked_lm", "text", source_dir=folder + "/bert")) > 0
"""


def prepare(
    folder: pathlib.Path, data: pathlib.Path, text: str, wheels: pathlib.Path | None
) -> Iterator[str]:
    """Makes the folder, and checks that a copy of the source tree can read the folder's data.

    Args:
      folder: the folder; existing content is replaced.
      data: folder with a subfolder for each data set.
      text: glob pattern of the text files.
      wheels: folder with the wheels; None downloads them.

    Yields:
      A line for each completed step.

    Raises:
      UserError: the code is not committed, a file is missing, there is no network, the folder is
        too large, or the check fails.
    """
    # Make paths absolute: the commands below run in the source tree.
    folder, data, text = folder.absolute(), data.absolute(), os.path.abspath(text)
    folder.mkdir(parents=True, exist_ok=True)
    yield f"commit {checkout.stamp(folder / 'commit.json')}"
    _copy_data(folder / "data", data)
    _write_text(folder / "data" / "bert" / "text", text, data / "bert_vocab" / "vocab.txt")
    yield "data: MNIST, CIFAR-10 as JPEGs, text"
    if wheels is None:
        _download(folder / "wheels")
    else:
        _copy_wheels(folder / "wheels", wheels)
    yield f"{len(list((folder / 'wheels').glob('*.whl')))} wheels"
    size, tree = num_bytes(folder), _tree_bytes()
    sizes = f"{folder} with {size / 1e6:.1f} MB ({(size + tree) / 1e6:.1f} MB with the source tree)"
    if size > MOST_BYTES or size + tree > MOST_WITH_TREE:
        limits = f"the limits of {MOST_BYTES / 1e6:.0f} MB ({MOST_WITH_TREE / 1e6:.0f} MB)"
        raise UserError(sizes, problem=f"exceeds {limits}", remedy="use fewer --text files")
    yield sizes
    check(folder)
    yield "check: the data can be read in a copy of the tree"


def check(folder: pathlib.Path) -> None:
    """Reads each data set of the folder with the code of a copy of the source tree, without git.

    Under Python 3.12, the packages come from the folder's wheels.

    Raises:
      UserError: a wheel is damaged or cannot be installed, the copied code differs from its commit, or
        a data set cannot be read.
    """
    wheels = sorted((folder / "wheels").glob("*.whl"))
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as opened:
                damaged = opened.testzip()
        except zipfile.BadZipFile as error:
            damaged = str(error)
        if damaged is not None:
            raise UserError(wheel, problem=f"is damaged ({damaged})", remedy="download it again")
    with tempfile.TemporaryDirectory(prefix="lamb_tpu_accelerator_") as temporary:
        tree, site = pathlib.Path(temporary, "tree"), pathlib.Path(temporary, "site")
        tree.mkdir()
        packed = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(tree, filter="data")
        if ".".join(map(str, sys.version_info[:2])) == _PYTHON:
            _call(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--no-index",
                    "--no-deps",
                    "--disable-pip-version-check",
                    "--target",
                    str(site),
                    *map(str, wheels),
                ],
                "wheels",
                "cannot be installed",
            )
        done = subprocess.run(
            [sys.executable, "-c", _CHECK, str((folder / "data").absolute())],
            cwd=tree,
            capture_output=True,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([str(site), str(tree)]),
                checkout.VARIABLE: str((folder / "commit.json").absolute()),
            },
        )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise UserError(
            folder,
            problem=f"cannot be read by a copied source tree's code ({reason}); prepare the folder again",
        )


def num_bytes(folder: pathlib.Path) -> int:
    """Returns the total size of a folder's files, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tree_bytes() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in listed if (ROOT / name).is_file())


def _copy_data(target: pathlib.Path, data: pathlib.Path) -> None:
    names = [("mnist", name) for name in originals.SETS["mnist"].files]
    for folder, name in [*names, ("cifar10", cifar10_jpeg.FILE)]:
        source = data / folder / name
        if not source.is_file():
            problem = f"has no {folder}/{name}"
            raise UserError(f"--data={data}", problem=problem, remedy="copy the file there")
        (target / folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / folder / name)
    if originals.load("mnist", "test", str(target / "mnist")) is None:
        problem = "has files in mnist that differ from the original ones"
        raise UserError(f"--data={data}", problem=problem, remedy="download them again")


def _write_text(target: pathlib.Path, pattern: str, vocabulary: pathlib.Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    _call(
        [
            sys.executable,
            "-m",
            "lamb_tpu.prepare_text",
            f"--input={pattern}",
            "--documents=titles",
            f"--vocab={vocabulary}",
            f"--output={target}",
            "--processes=1",
        ],
        f"--text={pattern}",
        "cannot be prepared",
    )


def _download(target: pathlib.Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    where = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    error = "wheels", "cannot be downloaded", "check the network, or give --wheels=DIR"
    _call(
        [
            *pip,
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            _PYTHON,
            "--implementation",
            "cp",
            *where,
            "-d",
            str(target),
            *WHEELS,
        ],
        *error,
    )
    _call([*pip, "wheel", "-q", "--no-deps", "-w", str(target), *_SOURCES], *error)


def _copy_wheels(target: pathlib.Path, wheels: pathlib.Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    paths = {_name(path.name.partition("-")[0]): path for path in sorted(wheels.glob("*.whl"))}
    missing = [spec for spec in (*WHEELS, *_SOURCES) if _name(spec.partition("=")[0]) not in paths]
    if missing:
        problem = f"has no wheel of {', '.join(missing)}"
        raise UserError(f"--wheels={wheels}", problem=problem, remedy="add the missing wheels")
    for spec in (*WHEELS, *_SOURCES):
        path = paths[_name(spec.partition("=")[0])]
        shutil.copyfile(path, target / path.name)


def _name(package: str) -> str:
    return package.lower().replace("-", "_")


def _call(command: list[str], subject: str, problem: str, remedy: str = "") -> None:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, preexec_fn=children.following()
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "ERROR" in line or "error:" in line), lines[-1])
        problem = f"{problem} ({' '.join(reason.split())})"
        raise UserError(subject, problem=problem, remedy=remedy)
