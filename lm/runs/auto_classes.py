"""Registration of the model classes with transformers' Auto classes.

`import fprnn` registers them. Importing `lm` does not, because an exported model that imports
`lm.kernels` must keep the classes of its own code.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM, FPRNNForSequenceClassification, FPRNNModel


def register_auto_classes() -> None:
    """Register the classes of this package for the model type `fprnn`.

    `AutoModelForCausalLM.from_pretrained(path)` then loads an export with these classes, without
    `trust_remote_code`. Calling it again changes nothing.
    """
    AutoConfig.register(FPRNNConfig.model_type, FPRNNConfig, exist_ok=True)
    AutoModel.register(FPRNNConfig, FPRNNModel, exist_ok=True)
    AutoModelForCausalLM.register(FPRNNConfig, FPRNNForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        FPRNNConfig, FPRNNForSequenceClassification, exist_ok=True
    )
