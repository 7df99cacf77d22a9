"""What the model classes return.

Shapes: b batch, l length. This file travels with an exported checkpoint.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from .solver import FixedPointStats
from .state import FPRNNCache, FPRNNState


class FixedPointReport:
    """The FixedPointStats of all layers: the same fields, stacked to (n_layer,b), and `token_iters`
    to (n_layer,b,l); `adjoint_norm` is a list of the layers' own tensors, which the backward writes
    into; None what was not asked for. Of a hybrid n_layer is the number of its
    fixed-point layers, and `layers` says which these are.

    No tuple, since transformers takes tuples in an output apart, to concatenate over batches or to
    compare what is in them; these are not of that kind.
    """

    token_iters: torch.Tensor | None

    def __init__(self, fields: Iterable[Any], layers: list[int] | None = None) -> None:
        self.layers = layers  # their numbers, from 0 on; None: all
        for name, value in zip(FixedPointStats._fields, fields, strict=True):
            setattr(self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._asdict().values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._asdict()})"

    def _asdict(self):
        return {name: getattr(self, name) for name in FixedPointStats._fields}


# torch.export returns what it knows how to take apart. `layers` belongs to the form.
pytree.register_pytree_node(
    FixedPointReport,
    lambda report: (list(report), report.layers),
    FixedPointReport,
    serialized_type_name=f"{FixedPointReport.__module__}.FixedPointReport",
)


@dataclass
class FPRNNOutput(ModelOutput):
    """last_hidden_state (b,l,d_model); hidden_states, one per layer and the last; fixed_point, what
    the solver reports; state, and past_key_values (an FPRNNCache), if they were asked for;
    attentions, always None, which `generate` reads where output_attentions is asked for."""

    last_hidden_state: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointReport | None = None
    state: FPRNNState | None = None
    past_key_values: FPRNNCache | None = None
    attentions: None = None


@dataclass
class FPRNNCausalLMOutput(ModelOutput):
    """loss (scalar); logits (b,l,vocab_size) in fp32, None under `loss_only`; log_z (scalar), if it
    was asked for; the rest as in FPRNNOutput."""

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointReport | None = None
    state: FPRNNState | None = None
    past_key_values: FPRNNCache | None = None
    log_z: torch.FloatTensor | None = None
    attentions: None = None
