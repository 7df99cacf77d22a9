"""The faster backends; each is checked against lm/model/scan.py and used only when it can run."""


def available() -> str:
    """What computes the recurrence on a CPU of this machine, in words, for the head of a run."""
    from lm.kernels import cpu

    usable, why = cpu.usable()
    return "compiled for this CPU" if usable else f"plain PyTorch ({why})"
