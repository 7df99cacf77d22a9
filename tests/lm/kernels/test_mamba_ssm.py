"""The kernels of mamba-ssm and causal-conv1d, with plain stand-ins for the packages."""

import importlib
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from lm import kernels
from lm.kernels import Unsupported
from lm.kernels.triton import build as triton_build
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.scan import causal_conv, ssd_scan, ssd_scan_plain
from lm.model.state import Sequences
from tests.kernels import assert_close
from tests.lm.kernels.test_scans import evaluate
from tests.oracles import sequential_scan

PACKAGE = "mamba_ssm"
SCAN_MODULE, SSD_MODULE = ".ops.selective_scan_interface", ".ops.triton.ssd_combined"
CONV = "causal_conv1d"


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **options
):
    """Stand-in: channels before time; the last state has no gradient, as in mamba-ssm."""
    (b, d, length), n = u.shape, A.shape[1]
    assert options == {"return_last_state": True} and delta.shape == u.shape and A.shape == (d, n)
    assert B.shape == C.shape == (b, n, length) and B.dtype == C.dtype == delta.dtype == u.dtype
    assert z is None or (z.shape == u.shape and z.dtype == u.dtype)
    assert all(t is None or t.dtype == torch.float32 for t in (A, D, delta_bias))
    dtype, delta = u.dtype, delta.float()
    u, B, C = (t.float() for t in (u, B, C))
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    y, h = sequential_scan(*(t.transpose(1, 2) for t in (u, delta)), A, *(t.mT for t in (B, C)))
    y = y.transpose(1, 2)
    if D is not None:
        y = y + D[:, None] * u
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(dtype), 0 * h + h.detach()


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    dt_softplus=False,
    return_final_states=False,
):
    """Stand-in: only the document with index 0 continues from the initial state."""
    assert return_final_states and chunk_size >= 16
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2])
    assert z is None or z.shape == x.shape
    assert D is None or D.shape == x.shape[2:3]
    assert dt_bias is None or dt_bias.shape == x.shape[2:3]
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    keep = None
    if seq_idx is not None:
        before = torch.cat([torch.zeros_like(seq_idx[:, :1]), seq_idx[:, :-1]], 1)
        keep = (seq_idx == before).to(x.dtype)
    y, S = ssd_scan_plain(x, dt, A, B, C, initial_states, keep)
    if D is not None:
        y = y + D[:, None] * x
    if z is not None:
        y = y * F.silu(z)
    return y.to(x.dtype), S


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    """Stand-in: channels before time; documents or a state need channels last in memory."""
    d, k = x.shape[1], weight.shape[-1]
    assert weight.shape == (d, k) and activation == "silu"
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == x[:, 0].shape)
    assert seq_idx is None or initial_states is None
    assert x.stride(1) == 1 and (initial_states is None or initial_states.stride(1) == 1)
    segments = None if seq_idx is None else seq_idx.long()
    before = None if initial_states is None else initial_states.transpose(1, 2)
    y = causal_conv(x.transpose(1, 2), weight.unsqueeze(1), bias, segments, before)
    return torch.nn.functional.silu(y).transpose(1, 2)


def clear_caches():
    """Forget which kernels run here."""
    for name in ("_load_checked", "_find_working", "_find_modules", "_warn_of_fallback"):
        getattr(kernels, name).cache_clear()
    triton_build._find_fault.cache_clear()


@pytest.fixture
def use_stand_in(stand_in, monkeypatch):
    """Let the dispatcher use the stand-in on a CPU.

    Yields a function (name) that sets FPRNN_KERNELS, and a list of the names of the kernels that
    computed something since.
    """
    monkeypatch.setattr(triton_build, "INTERPRETED", True)
    monkeypatch.setattr(kernels, "_get_device_type", lambda name: "cpu")
    compute, called = kernels.compute, []

    def record_call(operation, function, *args):
        result = compute(operation, function, *args)
        if result is not None:
            called.append(function)
        return result

    def choose(name):
        monkeypatch.setenv("FPRNN_KERNELS", name)
        clear_caches()
        called.clear()

    monkeypatch.setattr(kernels, "compute", record_call)
    yield choose, called
    clear_caches()


@pytest.fixture
def stand_in(monkeypatch):
    """Install the stand-ins and forget our adapters, so that tests import them with the stand-ins.

    Returns {name after `mamba_ssm`: module}.
    """
    names = ("", ".ops", ".ops.triton", SCAN_MODULE, SSD_MODULE)
    modules = {name: types.ModuleType(PACKAGE + name) for name in names}
    modules[SCAN_MODULE].selective_scan_fn = selective_scan_fn
    modules[SSD_MODULE].mamba_chunk_scan_combined = mamba_chunk_scan_combined
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, PACKAGE + name, module)
    modules[CONV] = types.ModuleType(CONV)
    modules[CONV].causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, CONV, modules[CONV])
    adapters = [f"lm.kernels.mamba_ssm.{name}" for name in ("scan", "ssd", "conv")]
    for name in adapters:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield modules
    for name in adapters:
        sys.modules.pop(name, None)


def import_adapter(name):
    return importlib.import_module(f"lm.kernels.mamba_ssm.{name}")


def test_scan_refuses_unsupported_arguments(stand_in):
    x, weight, ones = torch.ones(1, 2, 3), torch.ones(3, 3), torch.ones(3)
    scan = import_adapter("scan").mamba_scan

    def run(x, n=1):
        B = x[..., :1].expand(1, 2, n)
        return scan(x, x, weight, ones, -torch.ones(3, n), B, B, ones, x)

    _, h = run(x.requires_grad_())
    with pytest.raises(RuntimeError, match="no gradient of its final state"):
        h.sum().backward()
    with pytest.raises(Unsupported, match=r"torch\.float64"):
        run(x.double())
    with pytest.raises(Unsupported, match="n = 257"):
        run(x, 257)


@pytest.mark.parametrize("with_keep", [False, True], ids=["plain", "resets"])
@pytest.mark.parametrize("with_h0", [False, True], ids=["zero", "h0"])
def test_chunked_scan_equals_the_plain_scan(stand_in, with_h0, with_keep):
    r = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 9, 4, 3), B=(2, 9, 2, 5), C=(2, 9, 2, 5), dt=(2, 9, 4), h0=(2, 4, 3, 5))
    tensors = {k: torch.randn(*shape, generator=r) for k, shape in shapes.items()}
    tensors |= dict(dt=tensors["dt"].abs(), A=-torch.rand(4, generator=r))
    if not with_h0:
        del tensors["h0"]
    keep = torch.ones(2, 9) if with_keep else None
    if with_keep:
        keep[0, 0] = keep[:, 4] = keep[:, 5] = 0  # row 0 forgets its h0
    scan = import_adapter("ssd").ssd_scan
    assert_close(evaluate(scan, tensors, keep), evaluate(ssd_scan, tensors, keep), 1e-5)
    with pytest.raises(Unsupported, match=r"torch\.float64"):
        scan(**{k: v.double() for k, v in tensors.items()})


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("case", ["nothing", "documents", "before", "bias"])
def test_short_convolution_equals_the_plain_one(stand_in, case, taps):
    r = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 9, 8), weight=(8, 1, taps))
    shapes |= dict(bias=(8,)) if case == "bias" else {}
    shapes |= dict(before=(2, taps - 1, 8)) if case == "before" else {}
    tensors = {name: torch.randn(*shape, generator=r) for name, shape in shapes.items()}
    options = {} if case == "bias" else {"bias": None}
    if case == "documents":
        options["segments"] = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3]).expand(2, 9)

    def compute_with_gradients(conv):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        y = conv(**leaves, **options)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    conv = import_adapter("conv").short_conv
    plain = compute_with_gradients(lambda **args: torch.nn.functional.silu(causal_conv(**args)))
    assert_close(compute_with_gradients(conv), plain, 1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.ones(1, 3, 8, dtype=torch.float64)), r"torch\.float64"),
        (dict(x=torch.ones(1, 3, 7), weight=torch.ones(7, 1, 4)), "that 8 divides"),
        (dict(weight=torch.ones(8, 1, 5)), "k = 5"),
        (dict(x=torch.ones(1, 0, 8)), r"\(1, 0, 8\)"),
        (dict(segments=torch.zeros(1, 3).long(), before=torch.ones(1, 3, 8)), "not both"),
    ],
)
def test_convolution_refuses_unsupported_arguments(stand_in, change, message):
    arguments = dict(x=torch.ones(1, 3, 8), weight=torch.ones(8, 1, 4)) | change
    with pytest.raises(Unsupported, match=message):
        import_adapter("conv").short_conv(**arguments)


def test_out_of_resources_is_unsupported(stand_in):
    def out_of_resources(*args, **options):
        raise triton_build.OutOfResources(300, 200, "shared memory")

    stand_in[SSD_MODULE].mamba_chunk_scan_combined = out_of_resources
    x = torch.ones(1, 2, 1, 1)
    with pytest.raises(Unsupported, match="does not fit this GPU"):
        import_adapter("ssd").ssd_scan(x, x[..., 0], -torch.ones(1), x, x)


@pytest.mark.parametrize("name", ["scan", "ssd"])
def test_self_check_runs_the_function(name, stand_in, monkeypatch):
    monkeypatch.setattr(triton_build, "INTERPRETED", True)  # on the CPU
    adapter = import_adapter(name)
    functions = {"scan": selective_scan_fn, "ssd": mamba_chunk_scan_combined}
    function = functions[name]
    assert adapter.usable() == (True, "")
    find_fault = triton_build._find_fault.__wrapped__  # not cached

    def missing(*args, **options):
        raise NotImplementedError("built without its kernels")

    monkeypatch.setattr(adapter, function.__name__, missing)
    reason = "mamba-ssm's kernels fail: NotImplementedError: built without its kernels"
    assert find_fault(adapter._self_check, "mamba-ssm's kernels") == reason

    def inexact(x, *args, **options):
        y, h = function(x, *args, **options)
        return y * 1.001, h

    def negate(argument):
        """Return the function with another sign of a keyword argument."""
        return lambda *args, **options: function(
            *args, **{k: -v if k == argument else v for k, v in options.items()}
        )

    bias = {"scan": "delta_bias", "ssd": "dt_bias"}[name]
    for wrong in (inexact, negate("D"), negate("z"), negate(bias)):
        monkeypatch.setattr(adapter, function.__name__, wrong)
        assert "differ from plain PyTorch" in find_fault(adapter._self_check, "kernels")


def test_tf32_is_allowed_if_pytorch_allows_it(stand_in, monkeypatch):
    monkeypatch.setattr(triton_build, "INTERPRETED", True)
    adapter = import_adapter("ssd")

    def rounded(x, *args, **options):
        y, S = mamba_chunk_scan_combined(x, *args, **options)
        return y * 1.001, S

    monkeypatch.setattr(adapter, "mamba_chunk_scan_combined", rounded)
    find_fault = triton_build._find_fault.__wrapped__  # not cached
    assert find_fault(adapter._self_check, "kernels") != ""
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert find_fault(adapter._self_check, "kernels") == ""
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


SIZES = dict(d_model=16, n_layer=1, d_state=4, headdim=8, ngroups=2, vocab_size=7)
# Layer → the kernel of mamba-ssm that computes all of it, and the kernel of its scan only.
LAYERS = {"mamba": ("mamba_scan", "selective_scan"), "mamba2": ("mamba2_scan", "ssd_scan")}


def make_layer(kind):
    """Return a layer, none of whose parameters is all zeros or ones, and its input (2,9,16)."""
    torch.manual_seed(0)
    block = FPRNNForCausalLM(FPRNNConfig(layers=kind, **SIZES)).backbone.layers[0].block
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return block, torch.randn(2, 9, SIZES["d_model"])


def compute_with_gradients(block, u, seqs):
    u = u.clone().requires_grad_()
    block.zero_grad()
    out, _, *state = block(u, seqs)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    result = {"out": out.detach(), "grad u": u.grad}
    result |= {"h": state[0].h, "conv": state[0].conv} if state else {}
    return result | {f"grad {name}": p.grad.clone() for name, p in block.named_parameters()}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("case", ["nothing", "return_state", "documents", "padding", "before"])
def test_layer_with_mamba_ssm_equals_the_plain_layer(use_stand_in, kind, case):
    choose, called = use_stand_in
    block, u = make_layer(kind)
    seqs = Sequences(return_state=case == "return_state")
    if case == "documents":
        seqs = Sequences(starts=(torch.arange(9) % 4 == 3).expand(2, 9))
    elif case == "padding":
        seqs = Sequences(mask=torch.arange(9).expand(2, 9) < torch.tensor([[9], [6]]))
    elif case == "before":
        with torch.no_grad():
            seqs = Sequences(state=block(u.flip(1), Sequences(return_state=True))[2])
    results = {}
    for name in ("plain", "mamba_ssm"):
        choose(name)
        results[name] = compute_with_gradients(block, u, seqs)
    fused, unfused = LAYERS[kind]
    fused_cases = ["nothing", "return_state"]
    if kind == "mamba2":  # mamba-ssm's scan of Mamba-1 has neither resets nor an initial state
        fused_cases += ["documents", "before"]
    scan = fused if case in fused_cases else unfused
    assert [name for name in called if name != "short_conv"] == [scan]
    assert_close(results["mamba_ssm"], results["plain"], 1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_under_autocast_passes_the_narrow_dtype(use_stand_in, kind):
    choose, called = use_stand_in
    block, u = make_layer(kind)
    results = {}
    for name in ("plain", "mamba_ssm"):
        choose(name)
        with torch.autocast("cpu", torch.bfloat16):
            results[name] = compute_with_gradients(block, u, Sequences())
    assert LAYERS[kind][0] in called
    assert_close(results["mamba_ssm"], results["plain"], 0.05)


def test_hooked_dt_projection_is_called(use_stand_in):
    """mamba_scan computes dt_proj itself, so a layer whose dt_proj has a hook must not use it."""
    choose, called = use_stand_in
    block, u = make_layer("mamba")
    calls = []
    block.dt_proj.register_forward_hook(lambda *args: calls.append(args))
    choose("mamba_ssm")
    block(u)
    assert calls and "mamba_scan" not in called


def test_dispatcher_reports_why_mamba_ssm_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    load = kernels._load_checked.__wrapped__
    for operation in ("ssd_scan", "mamba_scan", "mamba2_scan"):
        name = f"lm.kernels.{kernels.MODULES['mamba_ssm'][operation]}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        module, reason = load("mamba_ssm", operation)
        assert module is None and re.fullmatch(r"mamba_ssm[.\w]* is not installed", reason)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_bf16_layer_on_a_gpu_equals_the_plain_layer(kind, monkeypatch):
    """At d_inner 1,536, with the real packages: outputs, and gradients by name."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    operation = {"mamba": "mamba_scan", "mamba2": "mamba2_scan"}[kind]
    if not kernels.choose_backends("cuda", (operation,))[operation]:
        pytest.skip(kernels.describe_backends("cuda", (operation,)))
    torch.manual_seed(0)
    config = FPRNNConfig(d_model=768, n_layer=1, vocab_size=64, layers=kind, reset_at_eos=False)
    block = FPRNNForCausalLM(config).cuda().train().backbone.layers[0].block
    u = torch.randn(4, 256, 768, device="cuda")
    results = {}
    for name in ("mamba_ssm", "plain"):
        monkeypatch.setenv("FPRNN_KERNELS", name)
        block.zero_grad()
        inputs = u.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = block(inputs)[0]
        y.float().square().mean().backward()
        grads = {name: p.grad.clone() for name, p in block.named_parameters()}
        results[name] = {"y": y.detach().float(), "u": inputs.grad, **grads}
    for name, expected in results["plain"].items():
        difference = (results["mamba_ssm"][name].float() - expected.float()).norm()
        assert difference <= 0.05 * expected.float().norm(), name
