"""A command line with faults injected: `python -m tests.faults FAULT[=N][,FAULT...] COMMAND...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable


def nan_at(count: int) -> None:
    """The loss of the count-th forward pass in training is NaN."""
    from lm.training.engine import Engine

    real, passes = Engine.forward, [0]

    def forward(self, batch):
        output = real(self, batch)
        if self.deepspeed.module.training:
            passes[0] += 1
            if passes[0] == count:
                output.loss = output.loss * float("nan")
        return output

    Engine.forward = forward


def nonfinite_at(count: int) -> None:
    """The count-th forward pass in training finds a number that is not finite, inside a block."""
    from lm.training.engine import Engine

    real, passes = Engine.forward, [0]

    def forward(self, batch):
        if self.deepspeed.module.training:
            passes[0] += 1
            if passes[0] == count:
                raise FloatingPointError("block 0 has made NaN")
        return real(self, batch)

    Engine.forward = forward


def plain_kernels(_: int) -> None:
    """This rank finds no kernels."""
    os.environ["FPRNN_KERNELS"] = "plain"


def no_data_at(count: int) -> None:
    """The count-th micro-batch cannot be read."""
    from lm.data.batches.mixture_loader import MixtureLoader
    from lm.data.sources.errors import DataError

    real, read = MixtureLoader.__next__, [0]

    def following(self):
        read[0] += 1
        if read[0] == count:
            raise DataError("the disk with the text is gone")
        return real(self)

    MixtureLoader.__next__ = following


def _before_update(count: int, what: Callable[[], None]) -> None:
    from lm.training.engine import Engine

    real, updates = Engine.step, [0]

    def step(self, *args, **options):
        updates[0] += 1
        if updates[0] == count:
            what()
        return real(self, *args, **options)

    Engine.step = step


def stop_at(count: int) -> None:
    """SIGSTOP before the count-th update, as of a node that hangs."""
    _before_update(count, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stop_at_the_end(_: int) -> None:
    """SIGSTOP before the last validation."""
    from lm.training.train import Training

    real = Training.conclude

    def conclude(self):
        self.validation.measure = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        real(self)

    Training.conclude = conclude


def sleep_at(count: int) -> None:
    """The count-th update never ends."""
    _before_update(count, lambda: time.sleep(600))


def _after_update(count: int, spoil: Callable) -> None:
    """Call spoil(base optimizer, model) after the count-th update."""
    from lm.training.engine import Engine

    real, updates = Engine.step, [0]

    def step(self, *args, **options):
        made = real(self, *args, **options)
        updates[0] += 1
        if updates[0] == count:
            spoil(self.base_optimizer, self.deepspeed.module)
        return made

    Engine.step = step


def looks_every(count: int) -> None:
    """No fault: a stage that waits is looked at every so many updates."""
    from lm.training import curriculum

    curriculum.EVERY = count


def _spoil_weight(optimizer, model) -> None:
    for parameter in [*optimizer.param_groups[0]["params"], *model.parameters()]:
        if parameter.numel():
            parameter.data.view(-1)[0] = float("nan")


def _spoil_moment(optimizer, model) -> None:
    next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = float("nan")


def weight_nan_at(count: int) -> None:
    """The count-th update leaves NaN in a weight."""
    _after_update(count, _spoil_weight)


def moment_nan_at(count: int) -> None:
    """The count-th update leaves NaN in a moment of the optimizer."""
    _after_update(count, _spoil_moment)


def synthetic_moment_nan_at(count: int) -> None:
    """The count-th update of the synthetic trainer leaves NaN in a moment of the optimizer."""
    from synthetic.train import Training

    real, updates = Training.update, [0]

    def update(self):
        real(self)
        updates[0] += 1
        if updates[0] == count:
            _spoil_moment(self.optimizer, self.model)

    Training.update = update


def synthetic_nan_at(count: int) -> None:
    """The loss of the count-th pass of the synthetic trainer is NaN."""
    import synthetic.train

    real, passes = synthetic.train.loss_of, [0]

    def loss_of(*args):
        made = real(*args)
        passes[0] += 1
        return made._replace(loss=made.loss * float("nan")) if passes[0] == count else made

    synthetic.train.loss_of = loss_of


def synthetic_nonfinite_at(count: int) -> None:
    """The count-th pass of the synthetic trainer finds a number that is not finite, in a block."""
    import synthetic.train

    real, passes = synthetic.train.loss_of, [0]

    def loss_of(*args):
        passes[0] += 1
        if passes[0] == count:
            raise FloatingPointError("block 0 has made NaN")
        return real(*args)

    synthetic.train.loss_of = loss_of


INJECTED = (
    plain_kernels,
    nan_at,
    nonfinite_at,
    no_data_at,
    stop_at,
    stop_at_the_end,
    sleep_at,
    weight_nan_at,
    moment_nan_at,
    looks_every,
    synthetic_moment_nan_at,
    synthetic_nan_at,
    synthetic_nonfinite_at,
)
FAULTS = {fault.__name__: fault for fault in INJECTED}


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
