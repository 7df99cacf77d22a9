"""What the tests of kernels share: comparison by name, poisoned memory, and compiling for GPUs that
are not there (`compile_for_gpus`)."""

import contextlib
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

TARGETS = (80, 90)  # A100, H100


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


def compile_for_gpus(module, cases):
    """Compile Triton kernels for sm_80 and sm_90, which needs no GPU, in a process that does not
    interpret them.

    Args:
        module: where they are. cases: dicts with `kernel`, its name; `signature`, argument → Triton
        type ("*fp32", "i32", "constexpr", …); `constexprs`, argument → value; and `options`.
    Returns:
        {"kernel, case, target": what was wrong}, empty when all compile.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels", module]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _compile(module, cases):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wrong = {}
    for i, case in enumerate(cases):
        kernel = getattr(importlib.import_module(module), case["kernel"])
        while not isinstance(kernel, triton.runtime.jit.JITFunction):  # autotuned, with heuristics
            kernel = kernel.fn
        for arch in TARGETS:
            source = ASTSource(kernel, case["signature"], case["constexprs"])
            try:
                target = GPUTarget("cuda", arch, 32)
                made = triton.compile(source, target=target, options=case.get("options", {}))
                assert made.asm["cubin"]
            except Exception as error:  # whatever the compiler raises is the finding
                wrong[f"{case['kernel']}, case {i}, sm_{arch}"] = repr(error)[-2000:]
    return wrong


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.load(sys.stdin))))
