"""Every kind of model on the meta device.

Operations that mix devices, and values that the host reads, are found without a GPU.
"""

import itertools

import pytest
import torch
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lm.model import cell, certified_root, full_rank
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import FIELDS_BY_KIND
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.lm.model import test_causal, test_mixers, test_patterns, test_state
from tests.marks import slow

aten = torch.ops.aten
ACROSS_DEVICES = (aten._to_copy.default, aten.copy_.default)
LIMITS = [
    (certified_root, "MAX_DIRECT_STEPS"),
    (full_rank, "MAX_ACCELERATED_ITERS"),
    *itertools.product((cell, full_rank), ("MAX_PICARD_STEPS", "MAX_NEWTON_STEPS", "BISECTIONS")),
]
PAPER = dict(token="iterate", stopping="paper")
# The cases of the files next to this one, and every kind of layer.
CASES = {
    **{f"kind-{kind}": dict(layers=kind) for kind in FIELDS_BY_KIND},
    **{f"hybrid-{name}": fields for name, fields in test_patterns.HYBRIDS.items()},
    **{f"block-{name}": fields for name, fields in test_state.BLOCKS.items()},
    **{f"model-{name}": fields for name, fields in test_causal.MODELS.items()},
    **{f"mixer-{name}": {"d_model": 6, **fields} for name, fields in test_mixers.CASES.items()},
    **{f"schedule-{name}": dict(schedule=name) for name in test_causal.SCHEDULES},
    **{
        f"paper-{gradient}": dict(gradient=gradient, **PAPER)
        for gradient in ("one_step", "implicit")
    },
}


class Devices(TorchDispatchMode):
    """Refuse operations that mix the CPU and the meta device, and answer the host's questions.

    Args:
        answer: What every boolean of a meta tensor that the host reads is.

    Attributes:
        reads: How often the host has read a value of a meta tensor.
    """

    def __init__(self, monkeypatch, answer):
        super().__init__()
        self.answer, self.reads = answer, 0
        for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):  # no meta device
            monkeypatch.setattr(torch, name, self._on_cpu(getattr(torch, name)))
        monkeypatch.setattr(torch.Tensor, "tolist", self._tolist(torch.Tensor.tolist))

    def _on_cpu(self, function):
        def on_cpu(device_type, *args, **kwargs):
            return function("cpu" if device_type == "meta" else device_type, *args, **kwargs)

        return on_cpu

    def _tolist(self, tolist):
        def all_true(tensor):  # as for flags that all numbers are finite
            if not tensor.is_meta:
                return tolist(tensor)
            self.reads += 1
            return tolist(torch.ones(tensor.shape, dtype=tensor.dtype))

        return all_true

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.reads += 1
            return self.answer if args[0].dtype == torch.bool else int(self.answer)
        places = {t.device.type for t in tensors if t.dim() > 0}
        if len(places) > 1 and func not in ACROSS_DEVICES:
            raise AssertionError(f"{func} mixes {places}")
        return func(*args, **kwargs)


def model_of(fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=1, d_state=4, headdim=4, eos_token_id=0)
    rule = dict(max_iters=3, eval_max_iters=3)
    return FPRNNForCausalLM(FPRNNConfig(**{**sizes, **rule, **fields})).to("meta")


# Combinations that are skipped, with the reason.
EXCEPTIONS = {
    ("paper-implicit", False): "the adjoint did not converge: its warning prints a number",
}


# Next to every kind of layer with the schedule "auto".
QUICK = ("mixer-kronecker_spectral", "schedule-sequential", "schedule-window:4")


def trial(name, answer):
    """Return parameters of the test; slow if other cases cover the same code."""
    is_quick = answer and (name in QUICK or name.startswith("paper-"))
    return (name, answer) if name.startswith("kind-") or is_quick else slow(name, answer)


TRIALS = [
    trial(name, answer)
    for name in CASES
    for answer in (True, False)
    if (name, answer) not in EXCEPTIONS
]


@pytest.mark.parametrize("name, answer", TRIALS)
def test_no_operation_mixes_devices(name, answer, monkeypatch):
    """Training on padded and packed rows, a prompt, and a token that is decoded after it."""
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    for module, limit in LIMITS:  # no search ends early on the meta device
        monkeypatch.setattr(module, limit, 1)
    monkeypatch.setattr(cell, "DECIDE_AFTER", 0)
    model = model_of(CASES[name])
    length = 3 if name == "kind-mamba" else 2  # three tokens: a scan of two chunks, one padded
    ids = torch.ones(2, length, dtype=torch.long, device="meta")
    nonzero = fx_config.patch(meta_nonzero_assume_all_nonzero=True)
    with nonzero, Devices(monkeypatch, answer) as devices:
        loss = model.train()(ids, labels=ids, attention_mask=ids, position_ids=ids).loss
        loss.backward()
        cache = model.eval()(ids, use_cache=True).past_key_values
        logits = model(ids[:, :1], past_key_values=cache).logits
    assert loss.is_meta and logits.shape == (2, 1, 30) and devices.reads
    assert all(p.grad is None or p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    "mix",
    [
        lambda t: t + torch.ones(2),
        lambda t: t[torch.ones(2, dtype=torch.long)],
        lambda t: torch.isin(t, torch.ones(2)),
        lambda t: t @ torch.ones(2, 2),
    ],
)
def test_mixed_devices_are_detected(mix, monkeypatch):
    with Devices(monkeypatch, True), pytest.raises(AssertionError, match="mixes"):
        mix(torch.ones(2, device="meta"))


def test_numbers_and_copies_may_come_from_the_cpu(monkeypatch):
    with Devices(monkeypatch, True) as devices:
        t = torch.ones(2).to("meta") * torch.tensor(2.0)
        assert t.copy_(torch.ones(2)).is_meta and not devices.reads
        assert t.any() and t.tolist() == [1.0, 1.0] and devices.reads == 2
