"""The mixers that this model's code brings along: the built-in ones.

`fprnn export` writes another file in the place of this one where a model has a mixer of its
author's own: it registers that as well (lm/export/travelling.py).
"""

from .mixers import build_mixer

__all__ = ["build_mixer"]
