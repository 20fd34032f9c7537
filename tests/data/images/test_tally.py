"""Counts of unusual images, and their reports."""

import logging

import pytest

from lamb_tpu.data.images.tally import Tally


def test_each_example_counts_once() -> None:
    tally = Tally("own")
    assert [tally.add("grey", index) for index in (4, 9, 4)] == [1, 2, 0]
    assert tally.add("cmyk", 4) == 1
    assert tally.counts() == {"cmyk": 1, "grey": 2}
    assert tally.describe() == "data set own: images read in training include 2 grey, 1 CMYK"
    assert Tally("own").describe() == ""


def test_bad_records_are_named_and_then_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally("own:train")
    with caplog.at_level(logging.WARNING):
        for index in range(70):
            for _ in range(2):  # read again in the next epoch
                tally.skip(index, f"file {index}", "it is not an image")
    output = [record.getMessage() for record in caplog.records]
    assert output[0] == (
        "data set own:train: file 0 is left out, and the next good record replaces it: "
        "it is not an image (1 so far)"
    )
    assert [text.split()[4] for text in output[:20]] == [str(index) for index in range(20)]
    assert output[20:] == [
        "data set own:train: 32 records are left out",
        "data set own:train: 64 records are left out",
    ]
    assert tally.counts() == {"bad": 70}
    assert tally.describe() == (
        "data set own:train: images read in training include 70 bad, and the bad ones were left out"
    )
