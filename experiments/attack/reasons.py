"""Reasons why an input may be accepted, by area, change and location."""

import re
from typing import NamedTuple

from experiments.attack.inputs import Input


class Reason(NamedTuple):
    """A reason; regular expressions select the changes and locations of an area to which it applies."""

    area: str
    change: str
    location: str
    text: str


_ANY = ".*"
_NUMBER = "zero|negative|fraction|30 digits|10\\*\\*12|1e308|digits that are not ASCII"
# The first matching reason counts.
REASONS = (
    Reason("commands", "flag missing", _ANY, "the flag is optional"),
    Reason(
        "commands",
        _ANY,
        r"train --(num_processes|process_id|coordinator_address)",
        "a run with one process does not need the settings of several processes",
    ),
    Reason("commands", _NUMBER, _ANY, "the number is in the range of the flag"),
    Reason(
        "commands", "None", _ANY, "'None' is a valid text, or means no value for an optional flag"
    ),
    Reason("commands", "seconds|duration", _ANY, "the flag takes a time or duration"),
    Reason(
        "commands",
        _ANY,
        r".* --(workdir|output|out|html|runs|records|data|carry|cache|data-dir)",
        "a file name may have any characters, and the file need not exist yet",
    ),
    Reason("commands", _ANY, r".* --(papers|dir|input)", "the folder or pattern matches files"),
    Reason("commands", _ANY, "predict --text", "any text with a [MASK] has a prediction"),
    Reason("commands", "text file", _ANY, "any text file is a valid vocabulary or corpus"),
    Reason("config keys", _NUMBER, _ANY, "the number is in the range of the key"),
    Reason(
        "config keys",
        "None|words|.*",
        r"\S+ (data|model|task)\.\w*|\S+ .*(name|dir|split)",
        "the component takes the value",
    ),
    Reason(
        "config keys",
        "infinity|nan|1e400|1e308",
        _ANY,
        "a limit may be so large that it is never reached",
    ),
    Reason(
        "config keys",
        "empty|blank|None|comma|list|.*",
        _ANY,
        "the key takes the text, or stays at its default, or this run does not use it",
    ),
    Reason(
        "recipes",
        "argument, .*",
        _ANY,
        "the argument takes the value, and the command only prints the config",
    ),
    Reason("recipes", "warning", _ANY, "the warning of the user's file is printed"),
    Reason("recipes", _ANY, _ANY, "the key takes a value of that type"),
    Reason(
        "records",
        _ANY,
        _ANY,
        "the record is omitted with a warning, or the value is valid for its field",
    ),
    Reason("tables", "line missing", _ANY, "the key is optional"),
    Reason("tables", "byte-order mark", _ANY, "TOML may begin with a byte-order mark"),
    Reason("tables", _ANY, _ANY, "the field takes the text or number"),
    Reason(
        "stored runs",
        _ANY,
        "train .*(metrics|run|parameters).*",
        "the run continues, and the damaged file is written again or not read",
    ),
    Reason("stored runs", _ANY, _ANY, "the command does not use the field"),
    Reason("checkpoints", "further .*", _ANY, "names that are not numbers of updates are ignored"),
    Reason(
        "checkpoints",
        _ANY,
        "train .*|evaluate .*|export .*|critical.*",
        "a message names the damaged checkpoint and an older one is used, or the file is not read",
    ),
    Reason("plans", "slice|odd option", _ANY, "the slice or option is valid"),
    Reason("plans", _ANY, "KEY.*", "a damaged plan is compiled again"),
    Reason("plans", _ANY, _ANY, "the slice is skipped"),
    Reason(
        "images",
        _ANY,
        _ANY,
        "a small image, an odd name or a further column is valid; other files are ignored",
    ),
    Reason(
        "text",
        _ANY,
        "prepare_text .*txt",
        "any UTF-8 text is a valid corpus; other bytes are counted",
    ),
    Reason("text", _ANY, _ANY, "the field is not needed, or the text is valid"),
    Reason("weights", _ANY, _ANY, "the field is not needed for the network"),
    Reason("launch", _ANY, _ANY, "the script quotes the text, or the number is valid"),
    Reason("searches", _ANY, _ANY, "the key takes the value"),
    Reason("processes", "SIG.*", _ANY, "the command had ended, or ends correctly on this signal"),
    Reason("processes", _ANY, _ANY, "the command works despite the change"),
)


def reason(given: Input) -> str:
    """Returns the reason why an input may be accepted; '' if no reason matches."""
    for each in REASONS:
        if (
            each.area == given.area
            and re.fullmatch(each.change, given.change, re.DOTALL)
            and re.fullmatch(each.location, given.location, re.DOTALL)
        ):
            return each.text
    return ""
