"""Makes transformers know our models for what they are.

It travels with an exported checkpoint, also with that of a baseline (lm/baselines has a link to
it): such code imports from its own folder only.
"""

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
