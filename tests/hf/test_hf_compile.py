"""torch.compile and torch.export: what they give is what the model gives, in one graph."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from tests.hf.models import BLOCKS, build, ids
from tests.marks import slow
from tests.running import ENV, ROOT

every_block = pytest.mark.parametrize("name", BLOCKS)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    counters.clear()


def compiled(model, backend="aot_eager", whole=True):
    return torch.compile(model, backend=backend, fullgraph=whole)


def padded():
    mask = torch.ones_like(ids())
    mask[0, :3] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def check_same(model, fast, **batch):
    """Logits, and in training mode the loss and every gradient."""
    with torch.no_grad():
        torch.testing.assert_close(
            fast(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5
        )
    model.train()
    found = []
    for each in (model, fast):
        model.zero_grad()
        torch.manual_seed(0)
        loss = each(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append({"loss": loss.detach(), **grads})
    for (key, a), b in zip(found[0].items(), found[1].values()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=key)
    model.eval()


SETTINGS = [
    {"layers": "mamba fp_mamba1"},
    slow({"layers": "mamba2 fp_mamba1"}),
    slow({"layers": "attention fp_mamba1"}),
    slow({"layers": "gated_deltanet fp_mamba1"}),
    slow({"state_noise": 0.1, "mixer_proj_rank": 4}),
    slow({"mixer": "dplr", "mixer_rank": 2, "contractive": 0.5, "use_short_conv": True}),
]
# A compilation takes seconds: of the blocks all but the first are slow.
WAYS = [
    ("fp_mamba1", "aot_eager", False),
    slow("fp_mamba2", "aot_eager", False),
    slow("fp_rnn", "aot_eager", False),
    *(slow(name, "inductor", False) for name in BLOCKS),
    slow("fp_mamba1", "aot_eager", True),
]
UNSUPPORTED = [
    {"schedule": "window:4"},
    slow({"mixer": "kronecker"}),
    slow({"token": "iterate"}),
    slow({"dt_h_dep": True}),
]


@pytest.mark.parametrize("name, backend, checkpointed", WAYS)
def test_forward_and_training_are_one_graph(name, backend, checkpointed):
    model = build(name).eval()
    if checkpointed:
        model.gradient_checkpointing_enable()
    check_same(model, compiled(model, backend), **padded())
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_layers_and_settings_in_one_graph(fields):
    model = build("fp_mamba1", **fields).eval()
    check_same(model, compiled(model, "eager"), input_ids=ids(2, 6))


@pytest.mark.parametrize("fields", UNSUPPORTED, ids=str)
def test_what_has_no_operator_is_solved_between_graphs(fields):
    model = build("fp_mamba1", **fields).eval()
    check_same(model, compiled(model, "eager", whole=False), **padded())
    assert counters["graph_break"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[^\n]*disable"):
        compiled(model, "eager")(ids())


@pytest.mark.slow
@every_block
def test_any_length_and_batch_are_three_graphs(name):
    model = build(name).eval()
    fast = compiled(model, "eager")
    with torch.no_grad():
        for rows, length in ((2, 9), (3, 12), (4, 17), (5, 31), (3, 40)):
            x = ids(rows, length)
            assert torch.equal(fast(x).logits, model(x).logits)
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name, beams", [("fp_mamba1", 1), *((b, 2) for b in BLOCKS)])
def test_generation(name, beams):
    model = build(name).eval()
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": beams}
    plain = model.generate(**padded(), **how)
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(model.generate(**padded(), **how), plain)
    assert counters["stats"]["unique_graphs"] <= 3


def test_what_is_not_finite_is_not_returned():
    model = build("fp_mamba1").eval()
    fast = compiled(model)
    with torch.no_grad():
        fast(ids())
        model.backbone.layers[1].block.out_proj.weight[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="layer 1: its output is NaN or infinite"):
            fast(ids())


@pytest.mark.slow
def test_an_operator_without_a_kernel_is_the_same(monkeypatch):
    model = build("fp_mamba1").double().eval()
    check_same(model, compiled(model), **padded())
    with torch.no_grad():
        plain = model(ids()).logits
        monkeypatch.setenv("FPRNN_KERNELS", "plain")
        torch.testing.assert_close(compiled(model)(ids()).logits, plain, rtol=1e-9, atol=1e-9)


def test_eager_computation_calls_no_operator(monkeypatch):
    """It costs time (docs/kernels.md)."""

    def refused(*args):
        raise AssertionError("an operator was called")

    monkeypatch.setattr("lm.model.blocks._operator", refused)
    monkeypatch.setattr("lm.model.scan._scan_operator", refused)
    build("fp_mamba1", layers="mamba fp_mamba1")(ids(), labels=ids()).loss.backward()


def exported(model, **fixed):
    """The ExportedProgram of a model for any batch and length."""
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=3)}
    shapes = {"input_ids": sizes, **dict.fromkeys(fixed)}
    with torch.no_grad():
        return torch.export.export(model, (), {"input_ids": ids(), **fixed}, dynamic_shapes=shapes)


@pytest.mark.parametrize("name", ["fp_mamba1", slow("fp_mamba2"), slow("fp_rnn")])
def test_export_for_any_batch_and_length(name):
    model = build(name).eval()
    fixed = {"use_cache": False, "return_state": True}
    program = exported(model, **fixed).module()
    for x in (ids(), ids(3, 14)):
        with torch.no_grad():
            there, here = program(input_ids=x, **fixed), model(x, **fixed)
        assert torch.equal(there.logits, here.logits)
        assert torch.equal(there.fixed_point.failed, here.fixed_point.failed)
        for a, b in zip(there.state.layers, here.state.layers):
            assert torch.equal(a.y, b.y) and torch.equal(a.h, b.h)


def test_what_cannot_be_exported_says_so():
    for fields in ({"mixer": "kronecker"}, {"schedule": "window:4"}, {"token": "iterate"}):
        with pytest.raises(NotImplementedError, match="a mixer of reflections"):
            exported(build("fp_mamba1", **fields).eval(), use_cache=False)


OF_AN_EXPORT = """
import sys
sys.path.insert(0, {hidden!r})
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True).eval()
assert not any(name == "lm" or name.startswith("lm.") for name in sys.modules) or {installed}
x = torch.arange(18).view(2, 9)
with torch.no_grad():
    plain = model(x).logits
    fast = torch.compile(model, backend="eager", fullgraph=True)(x).logits
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    program = torch.export.export(model, (x,), {{"use_cache": False}}).module()
    torch.testing.assert_close(program(x, use_cache=False).logits, plain, rtol=1e-5, atol=1e-5)
if {installed}:
    import lm.model.blocks
model = model.train()
torch.compile(model, backend="aot_eager", fullgraph=True)(x, labels=x).loss.backward()
print("as before")
"""


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True])
def test_an_export_by_itself_and_beside_the_package(installed, small_export, tmp_path):
    """The operators of the two have names of their own."""
    env = {**ENV, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    if not installed:  # a stranger of that name hides the package
        (tmp_path / "lm").mkdir()
        (tmp_path / "lm" / "__init__.py").touch()
    code = OF_AN_EXPORT.format(
        hidden=str(ROOT if installed else tmp_path), folder=str(small_export), installed=installed
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == "as before", done.stderr[-3000:]
