"""The facade: `import fprnn`, then `fprnn.load(PATH)`. It imports nothing heavy before that.

m = fprnn.load("runs/demo")        # a run directory, an export, any from_pretrained folder
m.generate("The list", max_new_tokens=20)
m.score("def f(x):").bits_per_byte
m.inspect("f(g(h(x), y))").to_html("inspect.html")     # docs/inspect.md
"""

from lm import __version__
from lm.evaluation.facade import LanguageModel, load

__all__ = ["LanguageModel", "__version__", "load"]
