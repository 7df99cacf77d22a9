"""Run a command line with faults: `python -m tests.faults FAULT=N[,FAULT=N...] COMMAND...`.

Most faults happen at the N-th call of the function that they replace.
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


def replace_call(
    owner_path: str,
    name: str,
    replacement: Callable[..., Any],
    is_counted: Callable[..., bool] = lambda *_: True,
):
    """Return a fault that replaces the N-th call of a function of a module, or of module:Class.

    `replacement` gets the original function and the arguments of the call. Calls for whose
    arguments `is_counted` returns False do not count.
    """

    def inject(count: int) -> None:
        module, _, cls = owner_path.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, cls) if cls else owner
        original, calls = getattr(owner, name), 0

        def call(*args, **options):
            nonlocal calls
            if not is_counted(*args):
                return original(*args, **options)
            calls += 1
            if calls == count:
                return replacement(original, *args, **options)
            return original(*args, **options)

        setattr(owner, name, call)

    return inject


def _is_training(engine, *_) -> bool:
    return engine.deepspeed.module.training


def _spoil_loss(original, *args):
    output = original(*args)
    output.loss = output.loss * float("nan")
    return output


def _spoil_synthetic_loss(original, *args):
    loss, answers = original(*args)
    return loss * float("nan"), answers


def _raise_nonfinite(*_):
    raise FloatingPointError("block 0 has made NaN")


def _raise_no_data(*_):
    from lm.data.sources.errors import DataError

    raise DataError("the disk with the text is gone")


def _suspend(original, *args, **options):
    """Stop this process, like a node that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args, **options)


def _suspend_at_end(original, training):
    """Stop this process before the last validation."""
    training.validation.measure = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    original(training)


def _sleep_long(original, *args, **options):
    time.sleep(600)
    return original(*args, **options)


def _spoil_weight(original, engine, *args, **options):
    result = original(engine, *args, **options)
    optimized = engine.base_optimizer.param_groups[0]["params"]
    for parameter in [*optimized, *engine.deepspeed.module.parameters()]:
        if parameter.numel():
            parameter.data.view(-1)[0] = float("nan")
    return result


def _spoil_moment(original, trainer, *args, **options):
    result = original(trainer, *args, **options)
    optimizer = getattr(trainer, "base_optimizer", None) or trainer.optimizer
    next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = float("nan")
    return result


def use_plain_kernels(_: int) -> None:
    """Make this rank use no kernels."""
    os.environ["FPRNN_KERNELS"] = "plain"


def check_interval(count: int) -> None:
    """Check every `count` updates whether a stage is learned; this is no fault."""
    from lm.training import curriculum

    curriculum.CHECK_INTERVAL = count


FAULTS = {
    "plain_kernels": use_plain_kernels,
    "check_interval": check_interval,
    # In the N-th forward pass of training.
    "nan_at": replace_call(ENGINE, "forward", _spoil_loss, _is_training),
    "nonfinite_at": replace_call(ENGINE, "forward", _raise_nonfinite, _is_training),
    # At the N-th micro-batch.
    "no_data_at": replace_call(
        "lm.data.batches.mixture_loader:MixtureLoader", "__next__", _raise_no_data
    ),
    # At the N-th update.
    "stop_at": replace_call(ENGINE, "step", _suspend),
    "sleep_at": replace_call(ENGINE, "step", _sleep_long),
    "weight_nan_at": replace_call(ENGINE, "step", _spoil_weight),
    "moment_nan_at": replace_call(ENGINE, "step", _spoil_moment),
    "stop_at_the_end": replace_call("lm.training.train:Training", "conclude", _suspend_at_end),
    # The same in the synthetic trainer.
    "synthetic_nan_at": replace_call(SYNTHETIC, "compute_loss", _spoil_synthetic_loss),
    "synthetic_nonfinite_at": replace_call(SYNTHETIC, "compute_loss", _raise_nonfinite),
    "synthetic_moment_nan_at": replace_call(f"{SYNTHETIC}:Training", "update", _spoil_moment),
}


def main() -> int:
    for fault in sys.argv[1].split(","):
        name, _, count = fault.partition("=")
        FAULTS[name](int(count))
    is_synthetic = name.startswith("synthetic")  # all faults of a run are of the same trainer
    if is_synthetic:
        from synthetic.cli import main as command
    else:
        from lm.cli.main import main as command
    return command(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
