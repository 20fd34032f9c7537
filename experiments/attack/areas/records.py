"""Records of tables: *.jsonl, *.configs.json, and a file that `adopt` reads."""

import pathlib
import random

from experiments.attack.inputs import Input, damage

_SHOW = ["show", "small/digits", "--papers=@/papers"]
_REPORT = ["report", "small/digits", "--papers=@/papers", "--output=@/pages", "--html=@/site"]
_RUN = ["run", "small/digits", "--papers=@/papers", "--runs=@/runs", "--dry-run"]
_LIST = ["list", "--papers=@/papers"]
_ADOPT = ["adopt", "@/papers/carried.json", "--papers=@/papers"]
RECORDS, CONFIGS, CARRIED = (
    "papers/small/digits.jsonl",
    "papers/small/digits.configs.json",
    "papers/carried.json",
)
FILES = {
    RECORDS: (_SHOW, _REPORT, _RUN, _LIST),
    CONFIGS: (_SHOW, _REPORT, _RUN),
    CARRIED: (_ADOPT,),
}


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Draws a file of records, and changes a value or damages the file."""
    name = rng.choices(list(FILES), [5, 2, 3])[0]
    content, change, location = damage(rng, prepared, name)
    files = {name: content}
    if name == CARRIED:  # the table starts without records, so that `adopt` adds those of the file
        files |= {RECORDS: "", CONFIGS: "{}"}
    return Input(
        "records",
        change,
        location,
        "lamb_tpu.reproduce.__main__",
        rng.choice(FILES[name]),
        ["papers"],
        files,
    )
