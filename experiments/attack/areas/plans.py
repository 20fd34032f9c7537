"""Cached plans, and options of the planner."""

import gzip
import pathlib
import random

from experiments.attack.inputs import WORDS, Input, damage, flag

_PLAN = ["--config=digits", "--topology=v3-8", "--cache=@/plans"]
_TOPOLOGIES = (
    "v3-7",
    "v9-8",
    "v4:1000x1000x1000",
    "v4:0x0x0",
    "1000000xv3-8",
    "0xv3-8",
    "v4:1",
    "v3-" + "9" * 30,
    "v5e-3",
    "xv3-8",
    "v4:2x2",
    "v5p-8x",
    "tpu7x-1",
    "v3-8\x1b[31m",
)
_OPTIONS = {
    "batches": ("9" * 30, "0", "32,,64", "32," * 5_000 + "64", "-32", "32.5", "1e3", "nan", "7"),
    "price-per-device-hour": ("1e308", "nan", "-1", "inf", "0", "1e-320"),
    "examples": ("9" * 30, "0", "-1", "1.5", "1e9"),
    "network-gbps": ("nan", "0", "-1", "1e308", "inf", "1e-320"),
    "measured": ("v3-8=1e308min", "v3-8=nan", "v3-8", "=1min", "v9-1=1min", "v3-8=-1min"),
    "html": ("@/odd.folder", "@/odd.dangling", "@/odd.pipe", "@/missing/x.html", "@/odd.loop"),
    "cache": ("@/odd.txt", "@/odd.dangling", "@/odd.pipe", "@/odd.loop", "gs:", "none", "/proc/x"),
}


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Damages a cached plan, or draws an odd option."""
    number, module = rng.random(), "lamb_tpu.plan.__main__"
    if number < 0.6:
        names = sorted(path.name for path in (prepared / "plans").iterdir() if path.is_file())
        name = f"plans/{rng.choice(names)}"
        content, change, location = damage(rng, prepared, name, 0.4)
        if name.endswith(".gz") and rng.random() < 0.15:
            # 500 MB of zeros from half a megabyte: gzip reads concatenated members as one file.
            change, content = "decompression bomb", gzip.compress(bytes(10**7)) * 50
        more = rng.choice(([], [], ["--json"], ["--batches=32,64"]))
        location = f"KEY{location[location.rindex('.json') if '.json' in location else -7 :]}"
        return Input("plans", change, location, module, [*_PLAN, *more], ["plans"], {name: content})
    if number < 0.72:
        change = rng.choice(_TOPOLOGIES)
        return Input(
            "plans",
            "slice",
            ascii(change)[:30],
            module,
            [_PLAN[0], flag("topology", change), _PLAN[2]],
            ["plans"],
        )
    if number < 0.8:
        change, value = rng.choice(list(WORDS.items()))
        return Input(
            "plans",
            change,
            "--topologies",
            module,
            [_PLAN[0], flag("topologies", f"v3-8,{value}"), _PLAN[2]],
            ["plans"],
        )
    name = rng.choice(list(_OPTIONS))
    value = rng.choice(_OPTIONS[name])
    arguments = [word for word in _PLAN if not word.startswith(f"--{name}")]
    if name == "price-per-device-hour":
        arguments.append("--batches=32")
    if name == "measured":
        arguments[1] = "--topologies=v3-8"
    return Input(
        "plans",
        "odd option",
        f"--{name}={value[:30]}",
        module,
        [*arguments, flag(name, value)],
        ["plans"],
    )
