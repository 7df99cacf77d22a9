"""A command line with faults injected: `python -m tests.faults FAULT[=N][,FAULT...] COMMAND...`.

Each fault happens at the N-th call of the function that it replaces.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

ENGINE = "lm.training.engine:Engine"
SYNTHETIC = "synthetic.train"


def wrap(place: str, name: str, act: Callable[..., Any], counts: Callable[..., bool] | None = None):
    """Return a fault that replaces the N-th call of a function by `act`.

    Args:
        place: The function's module, or module:Class.
        name: Name of the function.
        act: Called with the original function and the arguments of the call.
        counts: Returns whether a call with these arguments counts; None: every call counts.
    """

    def inject(count: int) -> None:
        module, _, cls = place.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, cls) if cls else owner
        real, calls = getattr(owner, name), [0]

        def wrapped(*args, **options):
            calls[0] += counts is None or counts(*args)
            is_due = calls[0] == count and (counts is None or counts(*args))
            return act(real, *args, **options) if is_due else real(*args, **options)

        setattr(owner, name, wrapped)

    return inject


def _trains(engine, *_) -> bool:
    return engine.deepspeed.module.training


def _nan_loss(real, *args):
    output = real(*args)
    output.loss = output.loss * float("nan")
    return output


def _synthetic_nan_loss(real, *args):
    loss, answers = real(*args)
    return loss * float("nan"), answers


def _nonfinite(*_):
    raise FloatingPointError("block 0 has made NaN")


def _no_data(*_):
    from lm.data.sources.errors import DataError

    raise DataError("the disk with the text is gone")


def _suspended(real, *args, **options):
    """Stop this process, like a node that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args, **options)


def _suspended_at_the_end(real, training):
    """Stop this process before the last validation."""
    training.validation.measure = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    real(training)


def _endless(real, *args, **options):
    time.sleep(600)
    return real(*args, **options)


def _nan_weight(real, engine, *args, **options):
    result = real(engine, *args, **options)
    optimized = engine.base_optimizer.param_groups[0]["params"]
    for parameter in [*optimized, *engine.deepspeed.module.parameters()]:
        if parameter.numel():
            parameter.data.view(-1)[0] = float("nan")
    return result


def _nan_moment(real, trainer, *args, **options):
    result = real(trainer, *args, **options)
    optimizer = getattr(trainer, "base_optimizer", None) or trainer.optimizer
    next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = float("nan")
    return result


def plain_kernels(_: int) -> None:
    """Let this rank find no kernels."""
    os.environ["FPRNN_KERNELS"] = "plain"


def check_interval(count: int) -> None:
    """Check every `count` updates whether a stage is learned; this is no fault."""
    from lm.training import curriculum

    curriculum.CHECK_INTERVAL = count


FAULTS = {
    "plain_kernels": plain_kernels,
    "check_interval": check_interval,
    # In the count-th forward pass of training.
    "nan_at": wrap(ENGINE, "forward", _nan_loss, _trains),
    "nonfinite_at": wrap(ENGINE, "forward", _nonfinite, _trains),
    # At the count-th micro-batch.
    "no_data_at": wrap("lm.data.batches.mixture_loader:MixtureLoader", "__next__", _no_data),
    # At the count-th update.
    "stop_at": wrap(ENGINE, "step", _suspended),
    "sleep_at": wrap(ENGINE, "step", _endless),
    "weight_nan_at": wrap(ENGINE, "step", _nan_weight),
    "moment_nan_at": wrap(ENGINE, "step", _nan_moment),
    "stop_at_the_end": wrap("lm.training.train:Training", "conclude", _suspended_at_the_end),
    # The same in the synthetic trainer.
    "synthetic_nan_at": wrap(SYNTHETIC, "compute_loss", _synthetic_nan_loss),
    "synthetic_nonfinite_at": wrap(SYNTHETIC, "compute_loss", _nonfinite),
    "synthetic_moment_nan_at": wrap(f"{SYNTHETIC}:Training", "update", _nan_moment),
}


def main() -> int:
    for fault in sys.argv[1].split(","):
        name, _, count = fault.partition("=")
        FAULTS[name](int(count))
    if name.startswith("synthetic"):
        from synthetic.cli import main as command
    else:
        from lm.cli.main import main as command
    return command(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
