"""What transformers does for its own models alone: it knows their names, initialises all layers."""

from typing import Any


def let_be_known(model: Any) -> None:
    """Enter a language model's name, and its base model's, in transformers' lists of names: under
    label smoothing the Trainer shifts labels only for models in it, and pipelines warn of others.
    """
    # Not at the top: the Auto classes may be importing the file that imports this one.
    from transformers.models.auto import modeling_auto

    kind = model.config.model_type
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(kind, type(model).__name__)
    modeling_auto.MODEL_MAPPING_NAMES.setdefault(kind, type(model.base_model).__name__)


def initialise_once(model: Any, module: Any) -> None:
    """Have a PreTrainedModel initialise a module if it, or a child, has weights that no checkpoint
    has loaded. transformers looks at a module's own parameters alone, where the code is not its
    own: a layer that has none, or all of them loaded, would not initialise its children's.
    """
    if getattr(module, "_is_hf_initialized", False):
        return
    if all(getattr(p, "_is_hf_initialized", False) for p in module.parameters()):
        return
    model._init_weights(module)
    module._is_hf_initialized = True
