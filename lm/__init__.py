"""The language-model stack. `import lm` registers the model classes with the Auto classes.

Registration waits for transformers' own registries to be imported, so that `import lm` (and
`fprnn --help`) costs milliseconds: when `transformers.models.auto.configuration_auto` or
`…modeling_auto` has been executed, the hook below adds our classes to it. Our modeling file,
stack.py and transformers.modeling_layers, which these need, import the latter themselves: where one
of them is what is being imported, the classes are added once it is whole.
"""

import importlib.abc
import importlib.util
import os
import sys

__version__ = "0.1.0"


def _register_config():
    from transformers import AutoConfig

    from lm.model.configuration_fprnn import FPRNNConfig

    AutoConfig.register(FPRNNConfig.model_type, FPRNNConfig, exist_ok=True)


def _register_models():
    for name, last in _WHOLE.items():
        if name in sys.modules and not hasattr(sys.modules[name], last):
            return  # it is being imported; this is called again at its end
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import (
        FPRNNForCausalLM,
        FPRNNForSequenceClassification,
        FPRNNModel,
    )

    _register_config()
    AutoModel.register(FPRNNConfig, FPRNNModel, exist_ok=True)
    AutoModelForCausalLM.register(FPRNNConfig, FPRNNForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        FPRNNConfig, FPRNNForSequenceClassification, exist_ok=True
    )


# What importing the models runs through, and a name that a module has when it has been executed.
_WHOLE = {
    "transformers.models.auto.modeling_auto": "AutoModelForSequenceClassification",
    "transformers.modeling_layers": "GenericForTokenClassification",
    "lm.model.stack": "initialise_once",
    "lm.model.modeling_fprnn": "FPRNNForSequenceClassification",
}
_REGISTRIES = {
    "transformers.models.auto.configuration_auto": _register_config,
    **dict.fromkeys(_WHOLE, _register_models),
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls the registration once a module that it waits for has run."""

    def find_spec(self, name, path=None, target=None):
        register = _REGISTRIES.pop(name, None)
        if register is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one
        return spec


def register() -> None:
    """Have the Auto classes know our models, as soon as there are both."""
    for name, registration in list(_REGISTRIES.items()):
        if name in sys.modules:
            _REGISTRIES.pop(name)
            registration()
    if _REGISTRIES:
        sys.meta_path.insert(0, _AfterImport())


# An exported checkpoint that imports this package for its kernels keeps classes of its own (0).
if os.environ.get("FPRNN_REGISTER") != "0":
    register()
