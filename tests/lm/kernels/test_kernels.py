"""Selection of a backend, its description, fallbacks, and a model with interpreted Triton."""

import functools
import sys
import threading
import time
import types
import warnings
from functools import partial

import pytest
import torch

from lm import kernels
from lm.kernels import BackendError, Unsupported, describe_backends, find
from lm.model import scan
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import assert_close, quicken_interpreter
from tests.oracles import scan_inputs

FP32, FP64 = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
CACHED = ("_load_checked", "_find_working", "_find_modules", "_warn_of_fallback")


@pytest.fixture(autouse=True)
def clear_caches(monkeypatch):
    """Clear the caches before and after a test."""
    monkeypatch.delenv("FPRNN_KERNELS", raising=False)
    for name in CACHED:
        getattr(kernels, name).cache_clear()
    yield
    for name in CACHED:
        getattr(kernels, name).cache_clear()


@pytest.fixture
def install_modules(monkeypatch):
    """Return a function (backend={operation: module}, …) that replaces the modules of backends."""

    def install(**modules):
        for backend, operations in modules.items():
            names = {}
            for operation, fake in operations.items():
                names[operation] = f"fake_{backend}_{operation}"
                monkeypatch.setitem(sys.modules, f"lm.kernels.{names[operation]}", fake)
            monkeypatch.setitem(kernels.MODULES, backend, names)

    return install


def make_module(reason="", **functions):
    """Return a module of a backend; `reason`: why it cannot run, or ""."""
    return types.SimpleNamespace(usable=lambda: (not reason, reason), **functions)


def skip_unless_interpreted():
    """Skip a test unless Triton's kernels run on CPU tensors."""
    build = pytest.importorskip("lm.kernels.triton.build", exc_type=ImportError)
    if not build.INTERPRETED:
        pytest.skip("Triton does not interpret")


# FPRNN_KERNELS


def test_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", "rocm")
    sentence = (
        r"^FPRNN_KERNELS is `rocm`: it must be auto, plain or one of cpu, triton, cuda, mamba_ssm$"
    )
    for call in (kernels.requested_backend, describe_backends, lambda: find("roots", FP32)):
        with pytest.raises(BackendError, match=sentence):
            call()
    with pytest.raises(BackendError, match="`rocm`"):
        scan.selective_scan(**scan_inputs(1, 2, 3, 2))


@pytest.mark.parametrize("name", ["", "auto"])
def test_auto_on_a_cpu_never_interprets_triton(name, monkeypatch, install_modules):
    fake = make_module()
    install_modules(cpu={"selective_scan": fake, "roots": fake})
    monkeypatch.setenv("FPRNN_KERNELS", name)
    assert find("selective_scan", FP32) is find("selective_scan", FP64) is fake
    assert find("ssd_scan", FP32) is None and find("short_conv", FP32) is None
    assert find("roots", FP32.to("meta")) is None


def test_plain_selects_no_backend(monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    assert {find(operation, FP32) for operation in kernels.OPERATIONS} == {None}
    assert (
        describe_backends("cpu")
        == describe_backends("cuda")
        == "plain PyTorch (FPRNN_KERNELS is plain)"
    )


def test_named_backend_is_preferred_and_others_fill_gaps(monkeypatch, install_modules):
    scan_of_cpu, roots_of_cpu, scan_of_triton = make_module(), make_module(), make_module()
    install_modules(
        cpu={"selective_scan": scan_of_cpu, "roots": roots_of_cpu},
        triton={"selective_scan": scan_of_triton},
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    assert find("selective_scan", FP32) is scan_of_triton
    assert find("selective_scan", FP64) is scan_of_cpu
    assert find("roots", FP32) is roots_of_cpu
    monkeypatch.setenv("FPRNN_KERNELS", "cpu")
    assert find("selective_scan", FP32) is scan_of_cpu


@pytest.mark.parametrize(
    "name, mamba, mamba2",
    [
        ("auto", ["mamba_ssm"], ["mamba_ssm"]),
        ("triton", [], ["mamba_ssm"]),
        ("mamba_ssm", ["mamba_ssm"], ["mamba_ssm"]),
        ("plain", [], []),
    ],
)
def test_named_backend_with_the_scan_computes_the_layer(name, mamba, mamba2, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    backends = [kernels._list_backends(fused, "cuda", name) for fused in kernels.FUSED]
    assert backends == [mamba, mamba2]


@pytest.mark.parametrize("name", kernels.MODULES)
def test_named_backend_that_cannot_run_is_an_error(name, monkeypatch, install_modules):
    fake = make_module("there is no such thing")
    install_modules(**{name: dict.fromkeys(kernels.MODULES[name], fake)})
    monkeypatch.setenv("FPRNN_KERNELS", name)
    operation = next(iter(kernels.MODULES[name]))
    with pytest.raises(BackendError, match=f"`{name}`, .*{operation} here: there is no such"):
        find(operation, FP32)  # on whatever device
    with pytest.raises(BackendError, match=f"cannot be used: {name}: there is no such thing"):
        describe_backends("cpu")


def test_without_a_gpu_triton_is_an_error(monkeypatch):
    build = pytest.importorskip("lm.kernels.triton.build", exc_type=ImportError)
    monkeypatch.setattr(build, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    build._find_fault.cache_clear()
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    try:
        for operation in kernels.MODULES["triton"]:
            with pytest.raises(BackendError, match=f"{operation} here: there is no CUDA device"):
                find(operation, FP32)
    finally:
        build._find_fault.cache_clear()


# Descriptions


def test_description_lists_working_and_missing_backends(monkeypatch, install_modules):
    works = make_module()
    install_modules(
        cpu={"selective_scan": works, "roots": make_module("there is no g++ on PATH")},
        triton=dict.fromkeys(kernels.MODULES["triton"], works),
        mamba_ssm={"short_conv": make_module("built without"), "ssd_scan": works},
    )
    assert describe_backends("cpu") == "selective_scan cpu (cpu for roots: there is no g++ on PATH)"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert describe_backends("cuda") == (
        "selective_scan triton, ssd_scan mamba_ssm, cell triton, roots triton (mamba_ssm for"
        " short_conv: built without)"
    )
    monkeypatch.setenv("FPRNN_KERNELS", "mamba_ssm")  # it can compute other operations
    assert describe_backends("cuda").startswith("selective_scan triton, ssd_scan mamba_ssm, ")


def test_reason_for_all_operations_is_given_once(install_modules, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    missing = make_module("there is no CUDA device")
    install_modules(
        triton=dict.fromkeys(kernels.MODULES["triton"], missing),
        mamba_ssm=dict.fromkeys(kernels.MODULES["mamba_ssm"], make_module("another")),
    )
    expected = "plain PyTorch (triton: there is no CUDA device; mamba_ssm: another)"
    assert describe_backends("cuda") == expected


def test_missing_and_broken_packages_have_a_reason(monkeypatch):
    load = kernels._load_checked.__wrapped__
    monkeypatch.delitem(sys.modules, "lm.kernels.triton.scan", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert load("triton", "selective_scan") == (None, "triton is not installed")

    def broken(name):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(kernels.importlib, "import_module", broken)
    reason = "it cannot be imported: ImportError: undefined symbol: _ZN3c10"
    assert load("triton", "selective_scan") == (None, reason)


# Parallel checks


def test_clean_threads_run_in_parallel_without_modes():
    meeting = threading.Barrier(3)

    def compute(number):
        meeting.wait(20)
        return number, torch.empty(0).device.type, torch.is_inference_mode_enabled()

    with torch.inference_mode(), torch.device("meta"):
        results = kernels.run_in_clean_threads(*(partial(compute, number) for number in range(3)))
    assert results == [(number, "cpu", False) for number in range(3)]


def test_error_of_a_thread_is_raised_after_all_ended():
    ended = []

    def fail(message):
        raise ValueError(message)

    def wait():
        time.sleep(0.1)
        ended.append(True)

    with pytest.raises(ValueError, match="first"):
        kernels.run_in_clean_threads(wait, partial(fail, "first"), partial(fail, "second"))
    assert ended == [True]


@pytest.mark.parametrize("call", [kernels.choose_backends, describe_backends])
def test_gpu_kernels_are_checked_in_parallel(call, install_modules, monkeypatch):
    """A failing module and a missing module have their own reasons.

    Two operations of a module share its check.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    checked, meeting = [], threading.Barrier(4)

    def make_checked_module(name, reason=""):
        @functools.cache  # as the self-checks are
        def usable():
            if checked:
                meeting.wait(20)
            checked.append((name, threading.current_thread() is threading.main_thread()))
            return not reason, reason

        return types.SimpleNamespace(usable=usable)

    install_modules(
        triton={
            operation: make_checked_module(operation, "it is off" if operation == "cell" else "")
            for operation in kernels.MODULES["triton"]
        },
        mamba_ssm={name: make_checked_module(name) for name in ("ssd_scan", "short_conv")},
    )
    monkeypatch.setitem(sys.modules, "lm.kernels.fake_mamba_ssm_gone", None)
    monkeypatch.setitem(kernels.MODULES["mamba_ssm"], "mamba_scan", "fake_mamba_ssm_gone")
    shared = kernels.MODULES["mamba_ssm"]["ssd_scan"]
    monkeypatch.setitem(kernels.MODULES["mamba_ssm"], "mamba2_scan", shared)
    call("cuda")
    assert checked[0] == ("selective_scan", True)
    assert len(checked) == len(set(checked)) == 5 and not any(is_main for _, is_main in checked[1:])
    assert kernels.choose_backends("cuda") == {
        "selective_scan": ("triton",),
        "ssd_scan": ("mamba_ssm",),
        "short_conv": ("mamba_ssm",),
        "cell": (),
        "roots": ("triton",),
        "mamba_scan": (),
        "mamba2_scan": ("mamba_ssm",),
    }
    assert set(kernels.choose_backends("cuda", ("roots", "cell"))) == {"roots", "cell"}
    assert (
        describe_backends("cuda", ("roots", "short_conv")) == "roots triton, short_conv mamba_ssm"
    )
    assert describe_backends("cuda").endswith(
        " (mamba_ssm for mamba_scan: lm.kernels.fake_mamba_ssm_gone is not installed; triton for"
        " cell: it is off)"
    )


@pytest.mark.parametrize("name, device", [("auto", "cpu"), ("cpu", "cuda")])
def test_cpu_kernels_are_loaded_in_sequence(name, device, install_modules, monkeypatch):
    """The CPU kernels share a library, which is compiled at first use."""
    monkeypatch.setenv("FPRNN_KERNELS", name)
    threads = []

    def usable():
        threads.append(threading.current_thread())
        return True, ""

    operations = dict.fromkeys(kernels.MODULES["cpu"], types.SimpleNamespace(usable=usable))
    install_modules(cpu=operations, triton={}, mamba_ssm={})
    kernels.choose_backends(device)
    assert threads == [threading.main_thread()] * len(operations)


# Fallbacks


def refusing(*args):
    raise Unsupported(f"n = {args[2].shape[1]} is too many")


def test_unsupported_arguments_fall_back_with_one_warning(install_modules):
    install_modules(cpu={"selective_scan": make_module(selective_scan=refusing)})
    tensors = scan_inputs(1, 4, 3, 2, torch.float32)
    with pytest.warns(RuntimeWarning) as caught:
        y, _ = scan.selective_scan(**tensors)
        scan.selective_scan(**tensors)
        scan.selective_scan(**scan_inputs(1, 4, 3, 5, torch.float32))
    assert torch.equal(y, scan.selective_scan_plain(**tensors)[0])
    assert [str(w.message) for w in caught] == [
        f"selective_scan is computed in plain PyTorch, which is slower: n = {n} is too many"
        for n in (2, 5)
    ]


def test_second_backend_takes_over_without_a_warning(install_modules, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    install_modules(
        triton={"selective_scan": make_module(selective_scan=refusing)},
        cpu={"selective_scan": make_module(selective_scan=lambda *args: "result of cpu")},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scan.selective_scan(**scan_inputs(1, 4, 3, 2, torch.float32)) == "result of cpu"


def test_other_errors_are_not_swallowed(install_modules):
    install_modules(cpu={"selective_scan": make_module(selective_scan=lambda *args: 1 / 0)})
    with pytest.raises(ZeroDivisionError):
        scan.selective_scan(**scan_inputs(1, 4, 3, 2))


def test_plain_versions_are_used_without_the_package(monkeypatch):
    monkeypatch.setattr(scan, "_kernels", lambda: None)
    assert scan.find_backend("roots", FP32) is None
    assert scan.try_kernel("roots", "find_roots", FP32) is None
    tensors = scan_inputs(1, 4, 3, 2)
    results, plain = scan.selective_scan(**tensors), scan.selective_scan_plain(**tensors)
    assert torch.equal(results[0], plain[0])


def test_fp64_under_triton_uses_another_backend(monkeypatch):
    skip_unless_interpreted()
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    tensors = scan_inputs(2, 5, 4, 3)
    y, h = scan.selective_scan(**tensors)
    plain = scan.selective_scan_plain(**tensors)
    assert y.dtype == h.dtype == torch.float64
    torch.testing.assert_close((y, h), plain)


# A whole model


def make_model():
    """Return a model whose iterations contract and whose biases are not zero."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=11, d_model=8, n_layer=1, d_state=4, eos_token_id=0, mixer_rank=2)
    rule = dict(tol=1e-2, max_iters=3, eval_max_iters=3, reset_at_eos=True)
    iterated = dict(token="iterate", schedule="parallel")
    model = FPRNNForCausalLM(FPRNNConfig(**sizes, **rule, **iterated))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
            if name.endswith("alpha_proj.bias"):
                p.sub_(3.0)
    return model


def evaluate_model(model):
    """Return logits, statistics and gradients of a segment after another one, by name."""
    ids = torch.randint(1, 11, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, 3] = ids[1, 5] = ids[1, 6] = 0  # documents end here
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    with torch.no_grad():
        state = model(ids[:, :4], return_state=True).state
    ids, mask = ids[:, 4:], mask[:, 4:]
    out = model(ids, attention_mask=mask, labels=ids, state=state, count_iterations=True)
    out.loss.backward()
    results = {f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}
    results |= {"logits": out.logits.detach(), "loss": out.loss.detach()}
    results |= {f"state {i}": t for i, t in enumerate(state.layers[0][:3])}
    stats = out.fixed_point
    exact = {name: getattr(stats, name) for name in ("num_iters", "converged", "token_iters")}
    return {**results, "residual": stats.residual}, exact


def test_model_with_triton_equals_the_plain_model(monkeypatch):
    """The paper's iteration uses Triton's scan; the exact token has tests of its own."""
    skip_unless_interpreted()
    quicken_interpreter()
    runs, used_functions = {}, []
    compute = kernels.compute

    def record_call(operation, function, *args):
        used_functions.append(function)
        return compute(operation, function, *args)

    monkeypatch.setattr(kernels, "compute", record_call)
    for backend in ("plain", "triton"):
        monkeypatch.setenv("FPRNN_KERNELS", backend)
        used_functions.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.filterwarnings("ignore", ".*encountered", RuntimeWarning)  # interpreted
            runs[backend] = evaluate_model(make_model())
    (ours, ours_exact), (plain, plain_exact) = runs["triton"], runs["plain"]
    assert_close(ours, plain, 2e-4)
    for key in plain_exact:
        assert torch.equal(ours_exact[key], plain_exact[key]), key
    assert set(used_functions) == {"selective_scan"}
