"""The position in checkpoints of this and older versions."""

import json

from lamb_tpu.store.position import Position

SAVED = {
    "loader": {"next_batch": 4},
    "seconds": 2.5,
    "startup": 7.0,
    "starts": 2,
    "total_steps": 9,
    "end_reason": "",
    "records": {"train": 4},
    "unlogged": [{"loss": [1.0, 2.0]}],
    "eval_due": True,
    "best": {"step": 4},
    "target": None,
    "guards": [0.5],
}


def test_position_goes_to_json_and_back() -> None:
    position = Position.from_json(json.loads(json.dumps(SAVED)))
    assert position.observers == {"best": {"step": 4}, "target": None, "guards": [0.5]}
    assert (position.seconds, position.starts, position.eval_due) == (2.5, 2, True)
    assert json.loads(json.dumps(position.to_json())) == SAVED


def test_missing_keys_have_their_defaults() -> None:
    assert Position.from_json({"loader": {}}) == Position(loader={})
    assert Position().starts == 0 and Position().observers == {}
