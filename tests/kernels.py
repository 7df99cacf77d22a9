"""What the tests of kernels share: comparison by name, poisoned memory, and compiling for GPUs that
are not there (`compile_for_gpus`)."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile

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


def resources_of_cells(sizes, targets=TARGETS):
    """What the kernels of the exact token take on a GPU, compiled in a process of its own.

    Args: sizes: dicts of d, n, r and kind. targets: compute capabilities.
    Returns: [{"kernel", "sizes", "target", "registers", "warps", "stack", "shared"}], the stack
    being the bytes of a thread that its registers do not hold.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    given = json.dumps([sizes, targets])
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _launches(d, n, r, kind):
    """One of each kernel of the exact token, in bf16."""
    from lm.kernels.triton import cell

    norm, heads = ("layer", 1) if kind == "mamba1" else ("rms", d // 64)
    options = cell.Options(r, 2.0, "silu", True, 1e-6, None, True, 1, norm, 1e-5, 0.0, n)
    layout, columns = cell.Layout(0, r * d, r * d + r, r * d + r + n), r * d + r + 2 * n
    given = ("keep", "gate", "D", "norm_weight") + (("norm_bias",) if norm == "layer" else ())
    plan = cell.Plan(
        layout, options, kind, 16, d, n, heads, columns, columns, columns, 1, torch.float32,
        torch.bfloat16, torch.device("cuda"), given, True, "tf32",
    )  # fmt: skip
    return cell.forward_launches(plan) + cell.backward_launches(plan)


def _resources(sizes, targets):
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = []
    tool = triton.knobs.nvidia.cuobjdump.path
    for case, arch in ((case, arch) for case in sizes for arch in targets):
        for kernel, _, args in _launches(**case):
            options = {"num_warps": args["num_warps"]} if "num_warps" in args else {}
            numbers = {p.name: args.get(p.name) for p in kernel.params}
            constants = {p.name: numbers[p.name] for p in kernel.params if p.is_constexpr}
            types = {name: "fp32" if type(v) is float else "i32" for name, v in numbers.items()}
            types |= {"table": "*i64", **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(kernel, types, constants)
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                command = [tool, "--dump-resource-usage", file.name]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            registers, stack = (int(re.search(rf"{w}:(\d+)", said)[1]) for w in ("REG", "STACK"))
            found.append(
                {"kernel": kernel.__name__, "sizes": case, "target": arch, "stack": stack,
                 "registers": registers, "warps": made.metadata.num_warps,
                 "shared": made.metadata.shared}
            )  # fmt: skip
    return found


if __name__ == "__main__":
    given = json.load(sys.stdin)
    made = _compile(sys.argv[1], given) if len(sys.argv) > 1 else _resources(*given)
    print(json.dumps(made))
