"""Python API: load and train fixed-point language models, and use their layers in other models.

    import fprnn

    model = fprnn.load("runs/demo")  # a run directory, an export, or a name on the hub
    model.generate("The list", max_new_tokens=20)
    model.inspect("f(g(h(x), y))").to_html("inspect.html")  # docs/inspect.md
    fprnn.train("configs/lm/demo.yaml", ["optim.lr=1e-3"])
    layer = fprnn.FixedPointLayer(d_model=256)  # docs/one-layer.md

`import fprnn` imports PyTorch and transformers, and registers the model classes with transformers'
Auto classes. `AutoModelForCausalLM.from_pretrained` then loads an export with the classes of this
package, without `trust_remote_code`.
"""

from fprnn.one_layer import FixedPointLayer
from fprnn.training import train
from lm import __version__
from lm.evaluation.language_model import LanguageModel, load
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.auto_classes import register_auto_classes

__all__ = [
    "FPRNNConfig",
    "FPRNNForCausalLM",
    "FixedPointLayer",
    "LanguageModel",
    "__version__",
    "load",
    "train",
]

register_auto_classes()
