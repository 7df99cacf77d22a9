"""Helpers for tests of kernels: comparison, poisoned memory, compilation without a GPU."""

import ast
import contextlib
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

from lm.kernels import checks

TARGETS = (80, 90)  # compute capability × 10: A100, H100
TRITON_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}
TRITON_NUMBER_TYPES = {int: "i32", float: "fp32"}
# Bytes per thread that may spill, by Triton's version and kernel; 0 for others. The matrices of
# _roots_kernel for eight reflections do not fit into registers before Triton 3.9, and the states of
# FP-Mamba-2 with 64 states do not fit on sm_90 under Triton 3.7.
MAX_SPILLS = {(3, 6): {"_roots_kernel": 48}, (3, 7): {"_roots_kernel": 40, "states_kernel": 8}}


def quicken_interpreter():
    """Make Triton's interpreter patch triton.language once per kernel.

    By default it does so for every call of a device function, which takes most of its time.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patched_ids = interpreter._patch_lang, set()

    def device_call(self, *args, **kwargs):
        scope = self.fn.__globals__
        if scope.get("tl") is not interpreter.tl and id(scope) not in patched_ids:
            patched_ids.add(id(scope))  # unlike the patch of `tl`, it is never undone
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = device_call


def skip_if_missing(*modules):
    """Skip the test if a kernel cannot run here (no compiler, no GPU).

    The test of a kernel that fails or is wrong is not skipped: it must find the mistake.
    """
    for module in modules:
        is_usable, reason = module.usable()
        is_broken = checks.DIFFER in reason or checks.FAIL in reason
        if not is_usable and not is_broken:
            pytest.skip(reason)


@contextlib.contextmanager
def poisoned_memory():
    """Fill the memory that torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_close(ours, theirs, tol):
    """Compare two {name: tensor}, relative to the largest entry of each tensor."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].shape == theirs[name].shape, name
        scale = theirs[name].double().abs().max().clamp_min(1e-3)
        error = ((ours[name].double() - theirs[name].double()).abs().max() / scale).item()
        assert error < tol, f"{name}: relative error {error:.1e}"


def describe_launch(kernel, *args, **named):
    """Describe a launch for `compile_kernels`: kernel, arguments and options.

    A tensor is represented by its type and whether its address is a multiple of 16 bytes.
    """
    arguments = dict(zip(inspect.getfullargspec(kernel.fn).args, args)) | named
    options = {"num_warps": arguments.pop("num_warps")} if "num_warps" in arguments else {}
    for name, value in arguments.items():
        if torch.is_tensor(value):
            arguments[name] = {
                "tensor": TRITON_TYPES[value.dtype],
                "aligned": value.data_ptr() % 16 == 0,
            }
        elif type(value).__name__ == "dtype":  # Triton's, a constant
            arguments[name] = {"dtype": str(value)}
    name, module = kernel.fn.__name__, kernel.fn.__module__
    return {"module": module, "kernel": name, "arguments": arguments, "options": options}


def slice_unaligned(t):
    """Return a copy of t as columns of a wider tensor, at unaligned addresses (a projection)."""
    return torch.nn.functional.pad(t, (3, 6))[..., 3:-6]


@contextlib.contextmanager
def record_launches(module):
    """Collect the launches of a module by `describe_launch`, each once, instead of running them."""
    cases = []

    def record(kernel, programs, *args, **named):
        case = describe_launch(kernel, *args, **named)
        if case not in cases:
            cases.append(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", record)
        yield cases


def find_kernels(*modules):
    """Return the names of the jitted functions in modules that other kernels do not call."""
    nodes = [node for m in modules for node in ast.parse(inspect.getsource(m)).body]
    functions = [f for f in nodes if isinstance(f, ast.FunctionDef) and f.decorator_list]
    jitted = [f for f in functions if ast.unparse(f.decorator_list[0]).startswith("triton.jit")]
    calls = [n for f in jitted for n in ast.walk(f) if isinstance(n, ast.Call)]
    return {f.name for f in jitted} - {ast.unparse(call.func) for call in calls}


def compile_kernels(cases, targets=TARGETS):
    """Compile kernels as a launch does, in a new process without the interpreter or a GPU.

    Args:
        cases: Results of `describe_launch`.
        targets: Compute capabilities × 10.

    Returns:
        For every case and target a dict. Its "case" and "target" are the arguments; "registers" and
        "stack" (bytes that do not fit into registers) are per thread, "warps" and "shared" (bytes
        of shared memory) per program; "copies" counts asynchronous copies into shared memory.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels"]
    stdin = json.dumps([cases, targets])
    process = subprocess.run(command, input=stdin, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def assert_nothing_spills(cases, targets=TARGETS):
    """Check that kernels compile, spill at most MAX_SPILLS, and fit a multiprocessor.

    Returns:
        The results of `compile_kernels`.
    """
    import triton

    limits = MAX_SPILLS.get(tuple(map(int, triton.__version__.split(".")[:2])), {})
    results = compile_kernels(cases, targets)
    assert len(results) == len(cases) * len(targets) > 0
    assert not [r for r in results if r["stack"] > limits.get(r["case"]["kernel"], 0)]
    # A warp has 32 threads, and a multiprocessor has 65,536 registers.
    assert all(r["registers"] * 32 * r["warps"] <= 65536 for r in results)
    max_shared = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may share
    assert all(r["shared"] <= max_shared[r["target"]] for r in results)
    return results


def _make_source(case):
    """Return the source that Triton compiles for a launch.

    Arguments that are None or 1 are constants. Addresses and numbers that are multiples of 16 are
    marked as such.
    """
    import triton.language as tl
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case["module"]), case["kernel"])
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, case["arguments"][parameter.name]
        is_tensor = isinstance(value, dict) and "tensor" in value
        is_number = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_number and value == 1):
            signature[name] = "constexpr"
            constants[name] = tl.dtype(value["dtype"]) if isinstance(value, dict) else value
            continue
        signature[name] = value["tensor"] if is_tensor else TRITON_NUMBER_TYPES[type(value)]
        if value["aligned"] if is_tensor else is_number and value % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _compile_and_measure(cases, targets):
    import triton
    from triton.backends.compiler import GPUTarget

    results = []
    tool = triton.knobs.nvidia.cuobjdump.path
    for case, target in itertools.product(cases, targets):
        gpu = GPUTarget("cuda", target, 32)
        try:
            compiled = triton.compile(_make_source(case), target=gpu, options=case["options"])
        except Exception as error:  # the compiler raises many types
            raise RuntimeError(f"sm_{target} does not compile {case}") from error
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{w}:(\d+)", output)[1]) for w in ("REG", "STACK"))
        results.append(
            {
                "case": case,
                "target": target,
                "registers": registers,
                "stack": stack,
                "warps": compiled.metadata.num_warps,
                "shared": compiled.metadata.shared,
                "copies": compiled.asm["ptx"].count("cp.async.c"),
            }
        )
    return results


if __name__ == "__main__":
    print(json.dumps(_compile_and_measure(*json.load(sys.stdin))))
