"""The selective scan compiled for this CPU: built by g++ at first use, called through ctypes.

Shape suffixes: b batch, l length, d channels, n states; r rows and w steps of a window.

The mathematics is that of lm.model.scan.selective_scan, its oracle. States live in memory as
(b,n,d), so that neighbouring channels fill a vector: a state that comes from here, (b,d,n) by its
shape, goes back in without a copy; so does A where it is the transpose of an (n,d) tensor.
"""

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

SOURCE = Path(__file__).with_name("cpu_scan.cpp")
# Not -ffast-math; cpu_scan.cpp says why.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
DTYPES = (torch.float32, torch.float64)
SIZES = ("rows", "length", "channels", "states", "full_rows", "full_length", "every", "threads")
POINTERS = (
    "row", "start", "count", "x", "dt", "A", "B", "C", "D", "h0", "keep", "y", "final",
    "checkpoints", "grad_y", "grad_final", "dx", "ddt", "dA", "dB", "dC", "dD", "dh0",
)  # fmt: skip


class _Problem(ctypes.Structure):
    """`struct Problem` of cpu_scan.cpp, field by field."""

    _fields_ = [(name, ctypes.c_int64) for name in SIZES]
    _fields_ += [(name, ctypes.c_void_p) for name in POINTERS]


def usable() -> tuple[bool, str]:
    """Whether the kernels run here, and if not, why not, in a sentence. The first call builds them
    (seconds; then they come from the user's cache directory) and checks them against a loop."""
    if os.environ.get("FPRNN_NO_KERNELS", "0") not in ("", "0"):
        return False, "FPRNN_NO_KERNELS is set"
    library, reason = _probe()
    return library is not None, reason


@functools.cache
def _probe():
    """The library and "", or None and what was wrong."""
    try:
        library = ctypes.CDLL(str(_build()))
        for name in ("scan_float", "scan_double", "backward_float", "backward_double"):
            getattr(library, name).argtypes = [ctypes.POINTER(_Problem)]
        error = _self_check(library)
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as wrong:
        return None, f"the CPU kernels cannot be built: {wrong}"
    if not error < 1e-4:
        return None, f"the CPU kernels compute something else than a loop: off by {error:.1e}"
    return library, ""


def _build() -> Path:
    """The shared library for this source, compiler and CPU, compiled if it is not in the cache."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("there is no g++ on PATH")
    asked = [compiler, "--version"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    key = hashlib.sha256()
    for part in (SOURCE.read_text(encoding="utf-8"), *FLAGS, version, _cpu()):
        key.update(part.encode() + b"\0")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "fprnn" / "kernels"
    library = folder / f"cpu_scan-{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Other processes may build the same: each in a folder of its own, then moved in one step.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        made.replace(library)
    return library


def _cpu() -> str:
    """What -march=native depends on. A home directory may be shared between unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _self_check(library) -> float:
    """The largest difference between the kernel and a loop over time, gradients included, on a
    small problem; NaN if there is one."""
    errors = []
    # In whatever mode the first caller is.
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        for dtype in DTYPES:
            x, dt = torch.linspace(0, 1, 2 * 5 * 19, dtype=dtype).reshape(2, 1, 5, 19)
            A = -torch.linspace(0.1, 9, 19 * 3, dtype=dtype).reshape(19, 3)
            B, C = torch.linspace(-1, 1, 2 * 5 * 3, dtype=dtype).reshape(2, 1, 5, 3)
            x, dt, A, B, C = inputs = [t.clone().requires_grad_() for t in (x, dt, A, B, C)]
            ours = _SelectiveScan.apply(library, *inputs, None, None, None)
            h, ys = x.new_zeros(1, 19, 3), []
            for t in range(5):
                u = (dt[:, t] * x[:, t]).unsqueeze(-1)
                h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h + u * B[:, t].unsqueeze(-2)
                ys.append((h * C[:, t].unsqueeze(-2)).sum(-1))
            theirs = torch.stack(ys, 1), h
            grads = [torch.autograd.grad(y.sum() + h.sum(), inputs) for y, h in (ours, theirs)]
            pairs = [*zip(ours, theirs), *zip(*grads)]
            errors += [(a - b).detach().abs().max().double() for a, b in pairs]
        return torch.stack(errors).max().item()


def _library():
    works, reason = usable()
    if not works:
        raise RuntimeError(f"the CPU kernels cannot be used: {reason}")
    return _probe()[0]


def _run(library, what, sizes, tensors):
    """Call a function of the library on sizes and tensors named as in `_Problem`.

    Raises:
        IndexError: rows, starts or counts reach outside.
    """
    pointers = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
    problem = _Problem(threads=torch.get_num_threads(), **sizes, **pointers)
    suffix = "double" if tensors["x"].dtype == torch.float64 else "float"
    wrong = getattr(library, f"{what}_{suffix}")(ctypes.byref(problem))
    if wrong:
        name = ("rows", "starts", "counts")[wrong - 1]
        limit = (f"0 … {sizes['full_rows'] - 1}", "0 and above", f"0 … {sizes['length']}")
        raise IndexError(f"{name} must lie in {limit[wrong - 1]}: {tensors[name[:-1]].tolist()}")


def _prepare(x, dt, A, B, C=None, h0=None, keep=None, D=None, rows=None, starts=None, counts=None):
    """Check the arguments; the sizes and the contiguous tensors that `_run` takes.

    Raises:
        TypeError: dtypes differ or are not float32 or float64. ValueError: shapes do not fit.
    """
    (b, length, d), n = x.shape, A.shape[-1]
    full = (b, length) if rows is None else tuple(dt.shape[:2])
    floats = {
        "x": (x, (b, length, d)), "dt": (dt, (*full, d)), "A": (A, (d, n)),
        "B": (B, (b, length, n)), "C": (C, (b, length, n)), "h0": (h0, (b, d, n)), "D": (D, (d,)),
    }  # fmt: skip
    others = {"keep": (keep, full)} | {
        name: (t, (b,)) for name, t in (("rows", rows), ("starts", starts), ("counts", counts))
    }
    for name, (t, shape) in (floats | others).items():
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} is {tuple(t.shape)} where {shape} is expected")
        wrong = name in floats and (t.dtype != x.dtype or t.dtype not in DTYPES)
        if wrong or not t.is_cpu:
            raise TypeError(
                f"{name} is {t.dtype} on {t.device} and x {x.dtype}: all must be float32, or all"
                " float64, on the CPU"
            )
    sizes = dict(rows=b, length=length, channels=d, states=n, every=_every(length))
    sizes |= dict(full_rows=full[0], full_length=full[1])
    tensors = dict(x=x, dt=dt, A=A.t(), B=B, C=C, D=D)
    tensors["h0"] = None if h0 is None else h0.transpose(1, 2)
    tensors["keep"] = None if keep is None else keep.to(x.dtype)
    for name, t in (("row", rows), ("start", starts), ("count", counts)):
        tensors[name] = None if t is None else t.to(torch.int64)
    return sizes, {k: None if t is None else t.contiguous() for k, t in tensors.items()}


def _every(length):
    """Steps between two checkpoints: the power of two at or above √length."""
    return 1 << math.ceil(math.log2(max(1.0, length**0.5)))


def _state(sizes, like):
    return like.new_empty(sizes["rows"], sizes["states"], sizes["channels"])


def _forward(library, sizes, tensors, with_checkpoints=False):
    """y (b,l,d), the final state (b,n,d), and the states between which a backward starts again."""
    x, chunks = tensors["x"], -(-sizes["length"] // sizes["every"])
    final, checkpoints = _state(sizes, x), None
    if with_checkpoints:
        checkpoints = x.new_empty(sizes["rows"], chunks, sizes["states"], sizes["channels"])
    out = dict(y=torch.empty_like(x), final=final, checkpoints=checkpoints)
    _run(library, "scan", sizes, tensors | out)
    return out.values()


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, library, x, dt, A, B, C, h0, keep, D):
        sizes, tensors = _prepare(x, dt, A, B, C, h0, keep, D)
        y, final, checkpoints = _forward(library, sizes, tensors, with_checkpoints=True)
        ctx.library, ctx.sizes, ctx.has_h0 = library, sizes, tensors.pop("h0") is not None
        ctx.names = (*tensors, "checkpoints")
        ctx.save_for_backward(*tensors.values(), checkpoints)
        return y, final.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_final):
        tensors = dict(zip(ctx.names, ctx.saved_tensors))
        x, D = tensors["x"], tensors["D"]
        tensors["grad_y"] = grad_y.contiguous()
        tensors["grad_final"] = grad_final.transpose(1, 2).contiguous()
        grads = {f"d{k}": torch.empty_like(tensors[k]) for k in ("x", "dt", "A", "B", "C")}
        grads["dD"] = None if D is None else torch.empty_like(D)
        grads["dh0"] = _state(ctx.sizes, x) if ctx.has_h0 else None
        _run(ctx.library, "backward", ctx.sizes, tensors | grads)
        dx, ddt, dA, dB, dC, dD, dh0 = grads.values()
        dh0 = None if dh0 is None else dh0.transpose(1, 2)
        return None, dx, ddt, dA.t(), dB, dC, dh0, None, dD


def selective_scan(x, dt, A, B, C, h0=None, keep=None, D=None):
    """Mamba-1's selective scan, differentiable once; lm.model.scan.selective_scan, compiled.

        h_t = keep_t exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t + D ⊙ x_t

    The result does not depend on the number of threads, gradients included.

    Args:
        x, dt: (b,l,d). A: (d,n). B, C: (b,l,n). h0: (b,d,n), zero if None. All fp32 or all fp64.
        keep: (b,l) of 1, and 0 at tokens that start from an empty state; not differentiated.
        D: (d,), or None to leave its term out.
    Returns:
        y (b,l,d) and the final state (b,d,n).
    Raises:
        RuntimeError: the kernels are not `usable`. TypeError, ValueError: dtypes or shapes.
    """
    library, inputs = _library(), (x, dt, A, B, C, h0, D)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _SelectiveScan.apply(library, x, dt, A, B, C, h0, keep, D)
    y, final, _ = _forward(library, *_prepare(x, dt, A, B, C, h0, keep, D))
    return y, final.transpose(1, 2)


def window_scan(x, dt, A, B, C, h0, rows, starts, keep=None, D=None):
    """The scan over one window of every row that a solve still works on; no gradient.

    Args:
        x: (r,w,d). B, C: (r,w,n). h0: (r,d,n), the states before the windows, zero if None.
        dt: (b,l,d) and keep: (b,l), those of the whole solve. A, D: as in `selective_scan`.
        rows, starts: (r,), window i is the steps starts[i] … starts[i] + w − 1 of row rows[i].
    Returns:
        y (r,w,d), zero beyond l.
    Raises:
        RuntimeError, TypeError, ValueError: as `selective_scan`. IndexError: no such row or step.
    """
    sizes, tensors = _prepare(x, dt, A, B, C, h0, keep, D, rows, starts)
    y = torch.empty_like(tensors["x"])
    _run(_library(), "scan", sizes, tensors | {"y": y})
    return y


def window_advance(x, dt, A, B, h0, rows, starts, counts, keep=None):
    """The states after the first counts[i] ≤ w steps of the windows; no gradient.

    Args and errors: as in `window_scan`; counts: (r,). Steps beyond l leave the state as it is.
    Returns:
        (r,d,n)
    """
    sizes, tensors = _prepare(x, dt, A, B, None, h0, keep, None, rows, starts, counts)
    final = _state(sizes, x)
    _run(_library(), "scan", sizes, tensors | {"final": final})
    return final.transpose(1, 2)
