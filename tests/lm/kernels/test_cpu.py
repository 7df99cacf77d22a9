"""The CPU kernel `selective_scan` against the plain scan and a loop; its compilation."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm.kernels.checks import find_fault
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu import roots as cpu_roots
from lm.kernels.cpu import scan as cpu
from lm.kernels.cpu.build import space_tokens_evenly
from tests.kernels import assert_close, poisoned_memory, skip_if_missing
from tests.lm.kernels.test_scans import evaluate
from tests.oracles import scan_inputs, sequential_scan


@pytest.fixture(autouse=True)
def poison_memory():
    skip_if_missing(cpu)
    with poisoned_memory():
        yield


def test_fresh_memory_is_poisoned():
    assert torch.ones(1).new_empty(3, 4).isnan().all()
    assert torch.ones(1).new_empty_strided((3, 4), (1, 3)).isnan().all()


def make_keep(b, length):
    return (torch.rand(b, length, generator=torch.Generator().manual_seed(1)) > 0.3).double()


# All lengths, widths d and numbers of states n occur, but not every combination.
@pytest.mark.parametrize(
    "length, d, n",
    [
        *((1, 1, 64), (1, 100, 8), (2, 5, 16), (2, 64, 1), (7, 100, 64), (7, 1, 8), (7, 64, 16)),
        *((64, 5, 64), (64, 1, 1), (64, 64, 8), (257, 5, 64), (257, 1, 16), (257, 100, 1)),
    ],
)
def test_scan_and_gradients_equal_a_loop(length, d, n):
    keep, tensors = make_keep(2, length), scan_inputs(2, length, d, n)
    expected = evaluate(sequential_scan, tensors, keep)
    assert_close(evaluate(cpu.selective_scan, tensors, keep), expected, 1e-12)
    single = {k: v.float() for k, v in tensors.items()}
    assert_close(evaluate(cpu.selective_scan, single, keep), expected, 2e-5)


def test_any_strides():
    def spread(v):
        return torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0]

    def scan(keep, **tensors):
        y, h = cpu.selective_scan(keep=spread(keep), **{k: spread(v) for k, v in tensors.items()})
        return spread(y), spread(h)  # the gradients are spread as well

    t, keep = scan_inputs(2, 12, 20, 16), make_keep(2, 12)
    assert not any(spread(v).is_contiguous() for v in (*t.values(), keep))
    assert_close(evaluate(scan, t, keep), evaluate(cpu.selective_scan, t, keep), 1e-15)


@pytest.mark.parametrize(
    "dtype, low, eps", [(torch.float32, -87, 1.3e-7), (torch.float64, -708, 4e-16)]
)
def test_exponential_is_accurate(dtype, low, eps):
    """A step from h0 = 1 without input leaves exp(A)."""

    def exp(p):
        p, one = p.to(dtype), torch.ones(1, 1, 1, dtype=dtype)
        d = p.numel()
        dt = one.expand(1, 1, d)
        _, h = cpu.selective_scan(0 * dt, dt, p[:, None], one, one, dt.transpose(1, 2))
        return h.flatten()

    p = torch.cat([torch.linspace(low, 80, 100_003), torch.linspace(-2, 2, 100_003)]).to(dtype)
    assert (exp(p).double() / torch.exp(p.double()) - 1).abs().max() < eps
    below = torch.tensor([low - 3.0, low - 30.0, -1e5, -1e30, -torch.inf])
    assert (exp(below) == 0).all()
    assert exp(torch.zeros(3)).tolist() == [1, 1, 1]
    special = exp(torch.tensor([torch.nan, -torch.nan, 800.0, 1e30, torch.inf]))
    assert special[:2].isnan().all() and special[2:].isinf().all()


def test_slices_of_B_and_C_are_read_without_copies():
    t = scan_inputs(3, 20, 37, 8, torch.float32)
    BC = torch.cat([t["B"], t["C"], t["B"] + torch.nan], -1)
    slices = dict(zip("BC", BC.split(8, -1)))
    assert all(space_tokens_evenly(v)[0] is v for v in slices.values())
    computed, expected = (evaluate(cpu.selective_scan, {**t, **s}, None) for s in (slices, {}))
    for name in expected:
        assert torch.equal(computed[name], expected[name]), name


def test_thread_count_changes_nothing():
    t = scan_inputs(5, 64, 100, 16, torch.float32)
    runs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(evaluate(cpu.selective_scan, t, make_keep(5, 64)))
    finally:
        torch.set_num_threads(1)
    for other in runs[1:]:
        for name in other:
            assert torch.equal(runs[0][name], other[name]), name


@pytest.mark.slow
def test_clang_builds_without_openmp(monkeypatch, tmp_path):
    """The compiler is named clang and refuses -fopenmp, like Apple's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    clang = folder / "clang++"
    clang.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "Apple clang version 15.0.0"; exit 0; }\n'
        'for word; do [ "$word" != -fopenmp ] || { echo "unsupported option" >&2; exit 1; }; done\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    clang.chmod(0o755)
    monkeypatch.setattr(cpu_build.shutil, "which", {"clang++": str(clang)}.get)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    functions = cpu_build.load_functions.__wrapped__
    for module in (cpu, cpu_build, cpu_roots):
        monkeypatch.setattr(module, "load_functions", functions)
    assert cpu_build._find_fault.__wrapped__(cpu._self_check) == ""


def test_reasons_why_kernels_cannot_run(monkeypatch, tmp_path):
    """Without their caches, the functions report what a new process would report."""
    library, functions = cpu_build.build(), cpu_build.load_functions.__wrapped__
    saved = []
    find_fault = functools.partial(cpu_build._find_fault.__wrapped__, cpu._self_check)
    for module in (cpu, cpu_build, cpu_roots):
        monkeypatch.setattr(module, "load_functions", functions)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as m:
        m.setenv("PATH", "")
        assert find_fault().endswith("cannot be built: there is neither g++ nor clang++ on PATH")
    with monkeypatch.context() as m:
        m.setattr(cpu_build, "FLAGS", ("--no-such-flag",))
        assert "no-such-flag" in find_fault()
    with monkeypatch.context() as m:
        (tmp_path / "file").touch()
        m.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "cannot be built" in find_fault() and str(tmp_path) in find_fault()
    with monkeypatch.context() as m:
        m.setattr(cpu_build, "build", lambda: library)
        watched = torch.autograd.graph.saved_tensors_hooks(saved.append, saved.append)
        with watched, torch.device("meta"):  # the hooks of a checkpoint
            assert find_fault() == "" and not saved
        with torch.inference_mode(), torch.device("meta"):
            assert find_fault() == ""
            assert cpu_build._find_fault.__wrapped__(cpu_roots._self_check) == ""
        assert cpu_build.usable(lambda dtype: float("nan")) == (
            False,
            "the CPU kernels differ from plain PyTorch by nan times the allowed difference",
        )


def test_change_of_any_source_compiles_again(quick_compiler, monkeypatch, tmp_path):
    for name in (*cpu_build.SOURCES, *cpu_build.HEADERS):
        shutil.copy(cpu_build.HERE / name, tmp_path)
    monkeypatch.setattr(cpu_build, "HERE", tmp_path)
    built = {cpu_build.build()}
    assert cpu_build.build() in built
    for name in (*cpu_build.SOURCES, *cpu_build.HEADERS):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "//")
        built.add(cpu_build.build())
    files = len(cpu_build.SOURCES) + len(cpu_build.HEADERS)
    assert len(built) == 1 + files and all(path.exists() for path in built)


@pytest.fixture
def quick_compiler(monkeypatch, tmp_path):
    """An empty kernel cache, and a g++ on PATH whose library holds `compiled` and is not loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; [ $# -gt 0 ] || exit 0; done\n'
        'echo compiled > "$2"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "cache" / "fprnn" / "kernels"


@pytest.mark.parametrize("damage", [b"", b"\0" * 9, b"compiler\n"])
def test_damaged_library_is_compiled_again(quick_compiler, capsys, damage):
    library = cpu_build.build()
    assert capsys.readouterr().err.startswith("note: compiling the CPU kernels into ")
    assert cpu_build.build() == library and not any(capsys.readouterr())
    library.write_bytes(damage)
    assert cpu_build.build() == library and library.read_bytes() == b"compiled\n"
    out, err = capsys.readouterr()
    assert not out and f"{library} are damaged" in err and "compiling" in err


def test_only_one_rank_announces_the_compilation(quick_compiler, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    cpu_build.build()
    assert not any(capsys.readouterr())


def test_cache_writable_by_others_is_refused(quick_compiler):
    library = cpu_build.build()
    for mode in (0o777, 0o1777, 0o770):
        quick_compiler.chmod(mode)
        with pytest.raises(OSError, match=rf"other users can write into {quick_compiler}.*chmod"):
            cpu_build.build()
    quick_compiler.chmod(0o755)
    assert cpu_build.build() == library


def test_cache_of_another_user_is_refused(quick_compiler, monkeypatch):
    cpu_build.build()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(OSError, match="other users can write"):
        cpu_build.build()


ROOT = Path(__file__).parents[3]
CHECK_SCAN = [sys.executable, "-c", "from lm.kernels.cpu import scan; print(scan.usable())"]


@pytest.mark.slow  # a compilation
@pytest.mark.parametrize("damage", ["truncated", "zeroed", "flipped"])
def test_process_survives_a_damaged_library(tmp_path, damage):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "fprnn").mkdir()
    shutil.copytree(cpu_build.build().parent, tmp_path / "fprnn" / "kernels", dirs_exist_ok=True)
    library = tmp_path / "fprnn" / "kernels" / cpu_build.build().name
    content = bytearray(library.read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    elif damage == "zeroed":
        content[4096:] = bytes(len(content) - 4096)
    else:
        half = len(content) // 2
        content[:half] = bytes(255 - byte for byte in content[:half])
    library.write_bytes(content)
    process = subprocess.run(CHECK_SCAN, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.stdout.strip() == "(True, '')" and "are damaged" in process.stderr


@pytest.mark.slow  # two compilations
def test_two_processes_can_compile_at_once(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(CHECK_SCAN, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [p.communicate(timeout=300)[0].strip() for p in processes]
    assert outputs == ["(True, '')"] * 2
    assert [p.suffix for p in (tmp_path / "fprnn/kernels").iterdir()] == [".so"]


def test_tests_of_wrong_or_failing_kernels_are_not_skipped():
    def fail():
        raise ZeroDivisionError

    for self_check in (lambda: 2.0, lambda: float("nan"), fail):
        reason = find_fault(self_check, "cpu", "the kernels")
        skip_if_missing(SimpleNamespace(usable=lambda reason=reason: (False, reason)))
    with pytest.raises(pytest.skip.Exception, match="there is no compiler"):
        skip_if_missing(SimpleNamespace(usable=lambda: (False, "there is no compiler")))
