"""Under torch.compile a model gives the same; torch.export is refused."""

import pytest
import torch

from lm.model.solver import NonFiniteError
from tests.hf.models import BLOCKS, build, make_ids
from tests.marks import slow

SETTINGS = [
    *({"name": name} for name in BLOCKS),
    {"layers": "mamba attention fp_mamba1", "n_layer": 3},
    {"schedule": "window:4"},
]
FULL_RANK = {"schedule": "window:4", "mixer": "kronecker"}


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()


def make_padded_batch():
    mask = torch.ones_like(make_ids())
    mask[0, :3] = 0
    return {"input_ids": make_ids(), "attention_mask": mask}


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
@pytest.mark.parametrize("fields", [*SETTINGS, slow(FULL_RANK)], ids=str)
def test_compiled_model_equals_the_model(fields, backend):
    """Compare logits, and in training mode the loss and every gradient."""
    model = build(**{"name": "fp_mamba1", **fields}).eval()
    compiled = torch.compile(model, backend=backend)
    batch = make_padded_batch()
    with torch.no_grad():
        expected = model(**batch).logits
        torch.testing.assert_close(compiled(**batch).logits, expected, rtol=1e-5, atol=1e-5)
    model.train()
    results = []
    for either_model in (model, compiled):
        model.zero_grad()
        loss = either_model(**batch, labels=make_ids()).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append({"loss": loss.detach(), **grads})
    for (key, a), b in zip(results[0].items(), results[1].values()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=key)


def test_compiled_model_generates():
    model = build("fp_mamba1").eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": 2}
    plain = model.generate(**make_padded_batch(), **options)
    model.compile(backend="eager")
    assert torch.equal(model.generate(**make_padded_batch(), **options), plain)


def test_compiled_model_refuses_nonfinite_output():
    model = build("fp_mamba1").eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(make_ids())
        model.backbone.layers[1].block.out_proj.weight[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="layer 1: its output is NaN or infinite"):
            compiled(make_ids())


def test_torch_export_is_refused():
    model = build("fp_mamba1").eval()
    with pytest.raises(NotImplementedError, match=r"torch\.export does not support a solve"):
        torch.export.export(model, (), {"input_ids": make_ids(), "use_cache": False}, strict=False)
