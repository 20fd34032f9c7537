"""Exported networks: config.json and model.safetensors."""

import json
import pathlib
import random
import struct

from experiments.attack.bases import BERT
from experiments.attack.inputs import JSON, Input, damage

_TRAIN = [*BERT, "--workdir=@/new", "--config.init_from=@/exported"]
_PREDICT = ["--checkpoint=@/exported", "--text=a [MASK] b"]


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Damages a file of an exported network, or changes the header of model.safetensors."""
    module, arguments = rng.choice([("train", _TRAIN)] + [("predict", _PREDICT)] * 4)
    name = rng.choice(("exported/config.json", "exported/model.safetensors"))
    if name.endswith(".safetensors") and rng.random() < 0.6:
        content, change, location = _header(rng, (prepared / name).read_bytes())
    else:
        content, change, location = damage(rng, prepared, name)
    return Input(
        "weights",
        change,
        f"{module} {location.removeprefix('exported/')}",
        f"lamb_tpu.{module}",
        arguments,
        ["exported"],
        {name: content},
    )


def _header(rng: random.Random, data: bytes) -> tuple[bytes, str, str]:
    length = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.3:
        claimed = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", claimed) + data[8:], "length of the header", "model.safetensors"
    header = json.loads(data[8 : 8 + length])
    array = rng.choice([key for key in header if key != "__metadata__"])
    field = rng.choice(("dtype", "shape", "data_offsets", "whole"))
    change, value = rng.choice(
        [
            *JSON.items(),
            ("huge shape", [2**40, 2**40]),
            ("offsets beyond the file", [0, 2**50]),
            ("offsets backward", [8, 0]),
            ("unknown dtype", "F128"),
        ]
    )
    if field == "whole":
        header[array] = value
    else:
        header[array][field] = value
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :], change, f"header {field}"
