"""The faster backends; each is checked against lm/model/scan.py and used only when it can run."""


def available() -> str:
    """What computes the recurrence on this machine, in words, for the head of a run."""
    return "plain PyTorch (no faster backend is built yet)"
