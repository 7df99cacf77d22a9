"""Times of the parts of an update: by the clock on a CPU, by events on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from lm.runs import update_times
from lm.runs.metrics import read_metrics
from lm.runs.update_times import UpdateTimes


@pytest.fixture
def clock(monkeypatch):
    """A performance counter that tests advance."""
    fake_clock = SimpleNamespace(seconds=100.0)
    fake_time = SimpleNamespace(perf_counter=lambda: fake_clock.seconds)
    monkeypatch.setattr(update_times, "time", fake_time)
    return fake_clock


def test_seconds_of_an_update_are_split_into_parts(clock):
    times = UpdateTimes("cpu")
    for _ in range(2):
        with times.measure("data"):
            clock.seconds += 1
        clock.seconds += 64  # outside the parts
        with times.measure("forward"):
            clock.seconds += 4
            with times.measure_solve():
                clock.seconds += 8
        with times.measure("backward"), times.measure_solve():  # gradient checkpointing
            clock.seconds += 16
        with times.measure("optimizer"):
            clock.seconds += 32
        times.end_update()
        with times.measure_solve():  # a probe, outside updates
            clock.seconds += 1000
    seconds = {"data": 1, "forward": 4, "solve": 8, "backward": 16, "optimizer": 32}
    assert times.read() == seconds


def test_failing_part_is_closed(clock):
    times = UpdateTimes("cpu")
    with pytest.raises(FloatingPointError), times.measure("forward"):
        clock.seconds += 1
        raise FloatingPointError
    clock.seconds += 2
    times.end_update()
    assert times.read() == {"data": 0, "forward": 1, "backward": 0, "optimizer": 0}


class Device:
    """A fake asynchronous device: work waits in a queue, and an event waits for earlier work."""

    def __init__(self):
        self.host = 0.0  # time of the host in seconds
        self.free_at = 0.0  # time at which the device will have done all work

    def launch(self, seconds):
        self.free_at = max(self.free_at, self.host) + seconds

    def event(device, enable_timing):
        assert enable_timing

        class Event:
            def record(self):
                self.at = max(device.free_at, device.host)

            def synchronize(self):
                device.host = max(device.host, self.at)

            def elapsed_time(self, other):
                assert max(self.at, other.at) <= device.host  # else CUDA raises
                return (other.at - self.at) * 1000

        return Event()


def test_gpu_time_is_measured_on_the_device(monkeypatch):
    """The host launches the parts of an update within 0.3 s, and then waits only for data.

    The device takes 4, 8 and 2 s. When the host begins to wait 14 s for the data of the second
    update, the device still works for 13.8 s on the first. "data" is only the rest of the wait.
    """
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    times = UpdateTimes("cuda")
    for data_s in (0.0, 14.0):
        with times.measure("data"):
            device.host += data_s
        for part, seconds in (("forward", 4.0), ("backward", 8.0), ("optimizer", 2.0)):
            with times.measure(part):
                device.host += 0.1
                device.launch(seconds)
        times.end_update()
        assert device.host < 15  # the host never waited for the device
    actual = times.read()
    assert device.host == pytest.approx(28.4)
    assert actual["forward"] == pytest.approx(4.0, abs=0.11)  # the launch takes 0.1 s
    assert actual["backward"] == pytest.approx(8.0) and actual["optimizer"] == pytest.approx(2.0)
    assert 2 * actual["data"] == pytest.approx(14.3 - 14.1, abs=1e-6)  # idle after 14.1 s


def test_parts_add_up_to_the_time_of_a_run(tiny_run):
    """Compare with another clock. Two of eight updates must agree: in others a process may wait."""
    records = [r for r in read_metrics(tiny_run) if "loss" in r]
    end_times = [0.0] + [r["spent"]["seconds"] for r in records]
    errors = []
    for record, start, end in zip(records, end_times, end_times[1:]):
        parts = record["breakdown"]
        assert set(parts) == set(update_times.PARTS) and min(parts.values()) > 0
        errors.append(abs(1 - sum(parts.values()) / (end - start)))
    assert sorted(errors)[1] < 0.1
