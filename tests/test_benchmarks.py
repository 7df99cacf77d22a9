"""Helpers of the benchmarks: timing, and the rates that `fprnn plan` uses."""

import argparse
import time

import pytest
import torch

from benchmarks import gpu_constants, harness


@pytest.mark.parametrize("failing_call", [1, 3])  # the warm-up call, and the second repeat
def test_function_without_memory_has_no_time_and_no_result(failing_call):
    calls = []

    def exhaust_memory():
        calls.append("call")
        if len(calls) == failing_call:
            raise torch.cuda.OutOfMemoryError
        return "result"

    options = {"device": torch.device("cpu"), "read_clock": time.perf_counter, "rows": ""}
    args = argparse.Namespace(**options, repeats=4)
    functions = {"wide": exhaust_memory, "narrow": lambda: "other result"}
    seconds, results = harness.time_in_turns(functions, args)
    assert seconds["wide"] is None and len(calls) == failing_call
    assert seconds["narrow"] > 0 and results == {"wide": None, "narrow": "other result"}


def test_rates_need_both_layers():
    exact, mamba = gpu_constants.EXACT, gpu_constants.MAMBA
    layers = {8: {exact: 1.0}, 16: {exact: 5.0, mamba: 1.0}, 64: {exact: 9.0, mamba: 1.0}}
    rates = gpu_constants.fit_token_seconds(layers, length=2)
    # 2 s and 4 s per token at batch 16 and 64.
    assert rates["sequence_s"] == pytest.approx(2 / 48)
    assert rates["token_s"] == pytest.approx(2 - 16 * 2 / 48)
    assert gpu_constants.fit_token_seconds({16: {mamba: 1.0}}, length=2) == {}
