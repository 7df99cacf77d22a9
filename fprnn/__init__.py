"""The facade: `import fprnn`, then `fprnn.load(PATH)`. It imports nothing heavy before that.

m = fprnn.load("runs/demo")        # a run directory, an export, any from_pretrained folder
m.generate("The list", max_new_tokens=20)
m.inspect("def f(x):").bits_per_byte
m.inspect("f(g(h(x), y))").to_html("inspect.html")     # docs/inspect.md
layer = fprnn.FixedPointLayer(d_model=256)             # docs/one-layer.md
"""

from typing import TYPE_CHECKING, Any

from lm import __version__
from lm.evaluation.facade import LanguageModel, load

if TYPE_CHECKING:
    from fprnn.one_layer import FixedPointLayer

__all__ = ["FixedPointLayer", "LanguageModel", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import FixedPointLayer, and PyTorch with it, when it is first asked for."""
    if name == "FixedPointLayer":
        from fprnn.one_layer import FixedPointLayer

        return FixedPointLayer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
