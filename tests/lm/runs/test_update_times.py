"""The breakdown of an update's time: on a CPU by the clock, on a device by what it had to do."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from lm.runs import clock as update_times
from lm.runs.clock import UpdateTimes
from lm.runs.metrics import read_metrics


@pytest.fixture
def clock(monkeypatch):
    """The performance counter, moved by hand."""
    now = SimpleNamespace(seconds=100.0)
    counter = SimpleNamespace(perf_counter=lambda: now.seconds)
    monkeypatch.setattr(update_times, "time", counter)
    return now


def an_update(times, clock, of):
    """An update whose parts take `of` seconds; between and after them is what is left."""
    with times.part("data"):
        clock.seconds += of["data"]
    clock.seconds += of["between"]
    with times.part("forward"):
        clock.seconds += of["prepare"]
        with times.solving():
            clock.seconds += of["solve"]
        clock.seconds += of["prepare"]
    with times.part("backward"), times.solving():  # of a layer that is computed again
        clock.seconds += of["backward"]
    with times.part("optimizer"):
        clock.seconds += of["optimizer"]
    times.end_update()


SECONDS = {"data": 1, "between": 2, "prepare": 4, "solve": 8, "backward": 16, "optimizer": 32}


def test_every_second_of_an_update_is_in_one_part(clock):
    times = UpdateTimes("cpu", solves=True)
    clock.seconds += 1000  # before training
    times.skip()
    an_update(times, clock, SECONDS)
    clock.seconds += 64  # between two updates: the second one's
    an_update(times, clock, SECONDS)
    clock.seconds += 1000
    times.skip()  # a validation
    with times.solving():  # of a probe: of no update
        clock.seconds += 1000
    times.skip()
    an_update(times, clock, SECONDS)
    clock.seconds += 1000
    found = times.read()
    assert found == pytest.approx(
        {
            "data": 1,
            "forward": 8,
            "solve": 8,
            "backward": 16,
            "optimizer": 32,
            "other": 23.3333,
        }
    )
    assert times.read() == {}
    times.skip()
    an_update(times, clock, SECONDS)
    assert times.read()["other"] == 2  # the mean begins anew


def test_a_part_that_fails_ends(clock):
    times = UpdateTimes("cpu")  # which solves nothing
    times.skip()
    with pytest.raises(FloatingPointError), times.part("forward"):
        clock.seconds += 1
        raise FloatingPointError
    clock.seconds += 2
    times.end_update()
    assert times.read() == {"data": 0, "forward": 1, "backward": 0, "optimizer": 0, "other": 2}


class Device:
    """A device that works behind its host: orders wait in a queue, an event is passed when what was
    ordered before it is done."""

    def __init__(self):
        self.host = self.free_at = 0.0

    def order(self, seconds):
        self.free_at = max(self.free_at, self.host) + seconds

    def event(device, enable_timing):
        assert enable_timing

        class Event:
            def record(self):
                self.at = max(device.free_at, device.host)

            def query(self):
                return self.at <= device.host

            def synchronize(self):
                device.host = max(device.host, self.at)

            def elapsed_time(self, other):
                assert self.query() and other.query()  # else CUDA raises
                return (other.at - self.at) * 1000

        return Event()


def test_a_device_is_charged_what_it_does_not_what_the_host_orders(monkeypatch):
    """The host orders all within 0.4 s and waits for nothing but data; the device takes 4, 8 and 2
    s. While the host waits for the data of the second update, the optimizer of the first still
    works: only what is left of the wait is the data's."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    times = UpdateTimes("cuda")
    times.skip()
    for wait in (0.0, 14.0):
        with times.part("data"):
            device.host += wait
        for part, seconds in (("forward", 4.0), ("backward", 8.0), ("optimizer", 2.0)):
            with times.part(part):
                device.host += 0.1
                device.order(seconds)
        times.end_update()
        assert times.updates and device.host < 15  # nothing has waited
    found = times.read()
    assert device.host == pytest.approx(28.4)
    assert found["forward"] == pytest.approx(4.0, abs=0.11)  # until its order has come
    assert found["backward"] == pytest.approx(8.0) and found["optimizer"] == pytest.approx(2.0)
    assert 2 * found["data"] == pytest.approx(14.3 - 14.1, abs=1e-6)
    assert 2 * sum(found.values()) == pytest.approx(device.host)


def test_the_parts_of_a_real_run_add_up(tiny_run):
    """The parts of an update add up to its seconds by another clock.

    The two best of eight updates decide, because a process may wait between two readings.
    """
    records = [r for r in read_metrics(tiny_run) if "loss" in r]
    spent = [0.0] + [r["spent"]["seconds"] for r in records]
    misses, shares = [], []
    for record, before, after in zip(records, spent, spent[1:]):
        parts = record["breakdown"]
        assert set(parts) == set(update_times.PARTS) and min(parts.values()) > 0
        misses.append(abs(sum(parts.values()) - (after - before)))
        shares.append((parts["forward"] + parts["backward"]) / sum(parts.values()))
    assert sorted(misses)[1] < 0.0015 and statistics.median(shares) > 0.5
