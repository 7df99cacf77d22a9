"""What the tests of kernels share: comparison by name, poisoned memory, and compiling what is
launched for GPUs that are not there (`resources`)."""

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

TARGETS = (80, 90)  # A100, H100
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}
NUMBERS = {int: "i32", float: "fp32"}
# Bytes of a thread that may spill, by Triton's version and kernel; others: 0. The matrices of
# _roots_kernel for eight reflections do not fit before Triton 3.9, nor do the states of FP-Mamba-2
# at 64 states on sm_90 under Triton 3.7.
SPILLS = {
    (3, 6): {"_roots_kernel": 48},
    (3, 7): {"_roots_kernel": 40, "states_kernel": 8},
}


def quicken_interpreter():
    """Triton's interpreter makes its own of triton.language for every call of a device function,
    which is most of its time: let it do so once a kernel, and once for the library's own."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    call, patch, patched = interpreter.InterpretedFunction, interpreter._patch_lang, set()

    def device_call(self, *args, **kwargs):
        scope = self.fn.__globals__
        if scope.get("tl") is not interpreter.tl and id(scope) not in patched:
            patched.add(id(scope))  # it is never undone; that of `tl` is when the kernel ends
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    call.__call__ = device_call


def skip_where_missing(*modules):
    """Skip the test where a kernel cannot be had: no compiler, no GPU. One that is there and fails,
    or computes something else, is what the test is to find."""
    for module in modules:
        works, why = module.usable()
        wrong = "something else" in why or " fail: " in why
        if not works and not wrong:
            pytest.skip(why)


@contextlib.contextmanager
def poisoned_memory():
    """What torch.empty returns is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_close(ours, theirs, tol):
    """Two {name: tensor} alike: relative to the largest entry of each."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].shape == theirs[name].shape, name
        scale = theirs[name].double().abs().max().clamp_min(1e-3)
        error = ((ours[name].double() - theirs[name].double()).abs().max() / scale).item()
        assert error < tol, f"{name}: relative error {error:.1e}"


def launch_case(kernel, *args, **named):
    """A launch as `resources` takes it: which kernel, with what arguments and options. Of a tensor
    that is its type, and whether its address is one of 16 bytes."""
    given = dict(zip(inspect.getfullargspec(kernel.fn).args, args)) | named
    options = {"num_warps": given.pop("num_warps")} if "num_warps" in given else {}
    for name, value in given.items():
        if torch.is_tensor(value):
            given[name] = {"tensor": TYPES[value.dtype], "aligned": value.data_ptr() % 16 == 0}
        elif type(value).__name__ == "dtype":  # Triton's, a constant
            given[name] = {"dtype": str(value)}
    name, module = kernel.fn.__name__, kernel.fn.__module__
    return {"module": module, "kernel": name, "arguments": given, "options": options}


def sliced(t):
    """t as columns of a wider tensor, as parts of a projection are: in odd places."""
    return torch.nn.functional.pad(t, (3, 6))[..., 3:-6]


@contextlib.contextmanager
def recorded_launches(module):
    """What `module` launches is a case of this list, once each, and not run."""
    cases = []

    def record(kernel, programs, *args, **named):
        case = launch_case(kernel, *args, **named)
        if case not in cases:
            cases.append(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", record)
        yield cases


def kernels_of(*modules):
    """The names of the jitted functions of modules that no other calls: those are launched."""
    nodes = [node for m in modules for node in ast.parse(inspect.getsource(m)).body]
    functions = [f for f in nodes if isinstance(f, ast.FunctionDef) and f.decorator_list]
    jitted = [f for f in functions if ast.unparse(f.decorator_list[0]).startswith("triton.jit")]
    calls = [n for f in jitted for n in ast.walk(f) if isinstance(n, ast.Call)]
    return {f.name for f in jitted} - {ast.unparse(call.func) for call in calls}


def resources(cases, targets=TARGETS):
    """What kernels take on a GPU, compiled as a launch compiles them, which needs no GPU, in a
    process that does not interpret them.

    Args: cases: of `launch_case`. targets: compute capabilities.
    Returns: for every case and target {"case", "target", "registers", "warps", "stack", "shared",
    "copies"}, the stack being the bytes of a thread that its registers do not hold, copies those
    into shared memory that are under way while it computes.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels"]
    given = json.dumps([cases, targets])
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_nothing_spills(cases, targets=TARGETS):
    """All compile, keep what they hold in registers but for SPILLS, and fit a multiprocessor."""
    import triton

    limits = SPILLS.get(tuple(map(int, triton.__version__.split(".")[:2])), {})
    found = resources(cases, targets)
    assert len(found) == len(cases) * len(targets) > 0
    assert not [one for one in found if one["stack"] > limits.get(one["case"]["kernel"], 0)]
    assert all(one["registers"] * 32 * one["warps"] <= 65536 for one in found)
    most = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may share
    assert all(one["shared"] <= most[one["target"]] for one in found)


def _source(case):
    """What Triton compiles for a launch: arguments that are None or 1 are constants, and it relies
    on addresses and numbers being multiples of 16 where they are."""
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
        signature[name] = value["tensor"] if is_tensor else NUMBERS[type(value)]
        if value["aligned"] if is_tensor else is_number and value % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _resources(cases, targets):
    import triton
    from triton.backends.compiler import GPUTarget

    found = []
    tool = triton.knobs.nvidia.cuobjdump.path
    for case, target in itertools.product(cases, targets):
        gpu = GPUTarget("cuda", target, 32)
        try:
            made = triton.compile(_source(case), target=gpu, options=case["options"])
        except Exception as wrong:  # whatever the compiler raises
            raise RuntimeError(f"sm_{target} does not compile {case}") from wrong
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{w}:(\d+)", said)[1]) for w in ("REG", "STACK"))
        found.append(
            {
                "case": case,
                "target": target,
                "registers": registers,
                "stack": stack,
                "warps": made.metadata.num_warps,
                "shared": made.metadata.shared,
                "copies": made.asm["ptx"].count("cp.async.c"),
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(_resources(*json.load(sys.stdin))))
