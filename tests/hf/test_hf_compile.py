"""Under torch.compile a model gives the same; torch.export is refused."""

import pytest
import torch

from lm.model.solver import NonFiniteError
from tests.hf.models import BLOCKS, build, ids
from tests.marks import slow

SETTINGS = [
    *({"name": name} for name in BLOCKS),
    {"layers": "mamba attention fp_mamba1", "n_layer": 3},
    {"schedule": "window:4", "mixer": "kronecker"},
]


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


def padded():
    mask = torch.ones_like(ids())
    mask[0, :3] = 0
    return {"input_ids": ids(), "attention_mask": mask}


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_compiled_model_equals_the_model(fields, backend):
    """Compare logits, and in training mode the loss and every gradient."""
    model = build(**{"name": "fp_mamba1", **fields}).eval()
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        expected = model(**padded()).logits
        torch.testing.assert_close(fast(**padded()).logits, expected, rtol=1e-5, atol=1e-5)
    model.train()
    found = []
    for each in (model, fast):
        model.zero_grad()
        loss = each(**padded(), labels=ids()).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append({"loss": loss.detach(), **grads})
    for (key, a), b in zip(found[0].items(), found[1].values()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=key)


def test_compiled_model_generates():
    model = build("fp_mamba1").eval()
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": 2}
    plain = model.generate(**padded(), **how)
    model.compile(backend="eager")
    assert torch.equal(model.generate(**padded(), **how), plain)


def test_compiled_model_refuses_nonfinite_output():
    model = build("fp_mamba1").eval()
    fast = torch.compile(model, backend="eager")
    with torch.no_grad():
        fast(ids())
        model.backbone.layers[1].block.out_proj.weight[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="layer 1: its output is NaN or infinite"):
            fast(ids())


def test_torch_export_is_refused():
    model = build("fp_mamba1").eval()
    with pytest.raises(NotImplementedError, match=r"torch\.export does not support a solve"):
        torch.export.export(model, (), {"input_ids": ids(), "use_cache": False}, strict=False)
