"""The timing script, which is run by hand on a GPU, runs: here on the driver's stand-in, with one small case."""

import torch
from gpu import timing
from simt.driver import Driver, install

SMALL = {"DEVICE": torch.device("cpu"), "DEPTH": 4, "LAYERS": 2, "KV_HEADS": 2, "HEAD_DIM": 16, "CACHE": 64}


def test_every_operation_is_timed(monkeypatch):
    install(monkeypatch, Driver())
    for name, value in {**SMALL, "FEATURES": 24, "PAST": 20}.items():
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(timing, "median_microseconds", lambda run, repeats: (run(), 2.0)[1])
    timings = list(timing.time_all(batch=2, budget=10, vocab=100, repeats=1))
    assert [each.operation.split(",")[0] for each in timings] == [
        "build_tree",
        "encode_tree",
        *["verify_tree"] * 4,
        "commit",
        "gather_features",
    ]
    moved = {each.operation: each.bytes for each in timings}
    assert moved["build_tree"] == 2 * 4 * 100 * 2
    assert moved["encode_tree"] == 2 * 11 * 64 * 2
    assert 2 * 200 < moved["verify_tree, greedy"] <= 2 * 5 * 200  # something is accepted
    assert moved["commit"] == 2 * (2 * 2 * 2 * 2) * 4 * 16 * 2  # read and written: caches, slots, heads, rows
    assert timings[0].gigabytes_per_second == moved["build_tree"] / 2.0 / 1e3
