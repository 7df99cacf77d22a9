"""Collect the wheels that `make gpu-check` needs on a machine with one GPU and no network.

python -m benchmarks.card_wheels [--out .card/whl] [--compile --python python3.12 --arch 9.0]

That machine has Python 3.12, torch 2.11 for CUDA 13.0, Triton 3.6 and transformers 5.17. The
script downloads the requirements of DeepSpeed and lm-eval, and builds those without a wheel.
With --compile it also compiles mamba-ssm and causal-conv1d, which needs `nvcc` 13.0 but no GPU: on
one core 4 minutes for causal-conv1d and 12 for mamba-ssm. At the end it prints the size of all
wheels.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH_VERSION = "2.11.0"  # PyPI's wheel is for CUDA 13.0
TRANSFORMERS_VERSION = "5.17.0"
# Packages without a wheel on PyPI. All are pure Python, so this script builds their wheels.
WHEELS_TO_BUILD = ("deepspeed", "rouge_score", "sqlitedict", "word2number")
# Requirements of DeepSpeed, and einops for mamba-ssm. constraints.txt has the versions.
WHEELS_TO_DOWNLOAD = ["pydantic", "pydantic_core", "annotated-types", "typing-inspection"]
WHEELS_TO_DOWNLOAD += ["typing_extensions", "hjson", "msgpack", "einops", "psutil", "py-cpuinfo"]
# lm-eval and its requirements, except pandas, pyarrow, sacrebleu and scikit-learn, which the
# machine has.
WHEELS_TO_DOWNLOAD += ["lm_eval", "datasets", "dill", "multiprocess", "evaluate", "more-itertools"]
WHEELS_TO_DOWNLOAD += ["pytablewriter", "DataProperty", "mbstrdecoder", "typepy", "tabledata"]
WHEELS_TO_DOWNLOAD += ["tcolorpy", "pathvalidate", "nltk", "chardet"]
COMPILED_VERSIONS = {"causal-conv1d": "1.7.0", "mamba-ssm": "2.3.2.post1"}
# Modules that load the compiled libraries.
COMPILED_MODULES = (
    "causal_conv1d",
    "mamba_ssm.ops.selective_scan_interface",
    "mamba_ssm.ops.triton.ssd_combined",
)


def run(*command: object, **options: object) -> None:
    """Print and run a command; a failure ends the script."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    subprocess.run(words, check=True, **options)  # type: ignore[call-overload]


def download(out: Path) -> None:
    """Download the wheels for Python 3.12, and build those that PyPI lacks."""
    pip = (sys.executable, "-m", "pip")
    constraints = ("-c", ROOT / "constraints.txt")
    platforms = ("--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64")
    machine = ("--only-binary=:all:", "--python-version=3.12", *platforms)
    run(*pip, "download", "-q", "--no-deps", *machine, *constraints, "-d", out, *WHEELS_TO_DOWNLOAD)
    run(*pip, "wheel", "-q", "--no-deps", *constraints, "-w", out, *WHEELS_TO_BUILD)


def use_chosen_architectures(setup: Path) -> None:
    """Remove the GPU architectures from setup.py, so that TORCH_CUDA_ARCH_LIST selects them.

    Also remove line numbers for profilers, and use one compiler thread instead of four.
    """
    text = setup.read_text(encoding="utf-8")
    text, count = re.subn(r'cc_flag\.append\("(-gencode|arch=[^"]*)"\)', "pass", text)
    if not count:
        raise SystemExit(
            f"{setup} names no architectures any more: adapt benchmarks/card_wheels.py"
        )
    text = text.replace('"--threads", "4"', '"--threads", "1"').replace('"-lineinfo",', "")
    setup.write_text(text, encoding="utf-8")


def compile_wheels(out: Path, work: Path, python: str, arch: str, cuda: Path) -> None:
    """Compile mamba-ssm and causal-conv1d in an environment that has the GPU machine's torch.

    Args:
        out: Folder for the wheels.
        work: Folder for the environment (6 GB) and the sources; an environment there is reused.
        python: Interpreter of the GPU machine's Python version.
        arch: Compute capability, "9.0" for an H100 and "8.0" for an A100.
        cuda: Folder of CUDA 13.0, with bin/nvcc.
    """
    env_python = work / "venv/bin/python"
    if not env_python.exists():
        run(python, "-m", "venv", work / "venv")
    pip = (env_python, "-m", "pip")
    packages = [f"torch=={TORCH_VERSION}", f"transformers=={TRANSFORMERS_VERSION}"]
    packages += ["einops", "numpy", "setuptools<82", "wheel", "ninja", "packaging"]
    run(*pip, "install", "-q", *packages)
    # CUDA's headers that a bare nvcc lacks (cuBLAS, cuSPARSE, …) come with torch.
    headers = next((work / "venv/lib").glob("python3.*/site-packages/nvidia/cu13/include"))
    environment = os.environ | {
        "PATH": f"{env_python.parent}:{os.environ['PATH']}",
        "CUDA_HOME": str(cuda),
        "CPATH": str(headers),
        "TORCH_CUDA_ARCH_LIST": arch,
        "MAX_JOBS": "1",
        "LDFLAGS": "-s",  # without debug information
        # Together with LDFLAGS, 12 MiB instead of 62.
        "NVCC_APPEND_FLAGS": "--compress-mode=size",
        "CAUSAL_CONV1D_FORCE_BUILD": "TRUE",  # setup.py looks for a wheel on GitHub otherwise
        "MAMBA_FORCE_BUILD": "TRUE",
        "MAMBA_KEEP_CUDA_BUILD": "TRUE",
    }
    for name, version in COMPILED_VERSIONS.items():
        source = work / f"{name.replace('-', '_')}-{version}"
        shutil.rmtree(source, ignore_errors=True)
        options = ("-q", "--no-deps", "--no-build-isolation")
        download_options = (*options, "--no-binary=:all:", "-d", work)
        run(*pip, "download", *download_options, f"{name}=={version}", env=environment)
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(work, filter="data")
        use_chosen_architectures(source / "setup.py")
        run("nice", "-n", "15", *pip, "wheel", *options, "-w", out, source, env=environment)
        wheel = next(out.glob(f"{name.replace('-', '_')}-*.whl"))
        run(*pip, "install", "-q", "--no-deps", "--force-reinstall", wheel)
    # An import resolves every symbol of torch that the libraries need. It needs no GPU.
    for module in COMPILED_MODULES:
        run(env_python, "-c", f"import {module}", cwd=work)


def compute_total_mib(files: Sequence[Path]) -> float:
    return sum(file.stat().st_size for file in files) / 2**20


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".card/whl")
    parser.add_argument(
        "--compile", action="store_true", help="also compile mamba-ssm and causal-conv1d"
    )
    parser.add_argument("--python", default="python3.12", help="interpreter for --compile")
    parser.add_argument("--arch", default="9.0", help="compute capability: 9.0 H100, 8.0 A100")
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda-13.0"))
    parser.add_argument("--cuda", type=Path, default=cuda, help="CUDA 13.0, default: %(default)s")
    parser.add_argument(
        "--work", type=Path, help="folder for --compile, which is kept (default: temporary)"
    )
    args = parser.parse_args()
    if args.compile and not (args.cuda / "bin/nvcc").exists():
        parser.error(
            f"--compile needs {args.cuda}/bin/nvcc: name the folder of CUDA 13.0 with --cuda"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    download(args.out.resolve())
    if args.compile:
        with tempfile.TemporaryDirectory(prefix="fprnn-card-") as temporary:
            work = args.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            compile_wheels(args.out.resolve(), work.resolve(), args.python, args.arch, args.cuda)
    wheels = sorted(args.out.glob("*.whl"))
    print(*(f"{compute_total_mib([wheel]):7.2f} MiB  {wheel.name}" for wheel in wheels), sep="\n")
    print(f"{compute_total_mib(wheels):7.2f} MiB  in {args.out}")


if __name__ == "__main__":
    main()
