"""`fprnn import`: its options, and what it does with them."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path


def add(commands: argparse._SubParsersAction) -> None:
    """Adds the command to those of the command line. Nothing heavy is imported."""
    c = commands.add_parser(
        "import",
        help="a checkpoint of the paper's code, or a Mamba of transformers → HuggingFace directory",
        description="SRC: a folder with config.json and weights as transformers writes a Mamba or"
        " Mamba-2, or a name on the hub; OUT computes the same logits on our scans. With --config"
        " SRC is a checkpoint of the paper's code (a .pth or state dict): CONFIG has `model_config`"
        " (d_model, n_layer) and `ssm_cfg` (layer, mixer_type, …), as that code has them, and what"
        " is imported is solved exactly (token: exact), whatever it says of the iteration. Any name"
        " that is missing, extra or misshapen is an error. `init_from` takes OUT.",
    )
    c.add_argument("source", metavar="SRC")
    c.add_argument("out", metavar="OUT")
    c.add_argument("--config", metavar="CONFIG", help="JSON or YAML of the paper's code's model")
    c.add_argument(
        "--tokenizer", metavar="DIR", help="a tokenizer's folder to copy beside it (default: SRC's)"
    )
    c.set_defaults(run_command=_import)


def _import(args: argparse.Namespace) -> int:
    from lm.runs import places

    if args.config is not None:
        places.check_files({"--config": args.config, "SRC": args.source})
    elif not Path(args.source).expanduser().is_dir():
        places.find_model(args.source)
    places.check_folders({"--tokenizer": args.tokenizer})

    if args.config is None:
        print(import_mamba(args.source, args.out, args.tokenizer))
        return 0
    from lm.export.reference import ORIGIN, import_reference

    done = import_reference(args.source, args.config, args.out, args.tokenizer)
    print(f"note: {ORIGIN}", file=sys.stderr)
    print(done)
    return 0


def import_mamba(source: str | Path, out: str | Path, tokenizer: str | Path | None = None) -> Path:
    """A Mamba or Mamba-2 of transformers → our HuggingFace directory `out`.

    Args:
        source: its folder, or a name on the hub. tokenizer: a folder whose files are copied beside
            it; None: those of `source`, where there are any.
    Raises:
        SourceError: as `foreign.read_folder`; a model of ours; a tokenizer that is not there.
        ExportError, OutputError: as `write_export`.
    """
    from lm.export.export import write_export
    from lm.model.configuration_fprnn import MODEL_TYPES
    from lm.model.modeling_fprnn import FPRNNForCausalLM
    from lm.runs.run_dir import RunDir
    from lm.runs.written import TOKENIZER_FILES
    from lm.training.foreign import TOKENIZER, SourceError, read_config, read_folder

    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _downloaded(str(source))
    if RunDir(folder).holds_run or read_config(folder).get("model_type") in MODEL_TYPES:
        raise SourceError(f"{folder} is of ours already: `fprnn export` exports a run")
    if folder.resolve().is_relative_to(Path(out).resolve()):  # which would replace it
        raise SourceError(f"{out} holds the model that is to be imported: choose another OUT")
    found = read_folder(folder)
    of_tokens = found.tokenizer
    if tokenizer:
        of_tokens = Path(tokenizer)
        if not any((of_tokens / name).is_file() for name in TOKENIZER):
            raise SourceError(f"{of_tokens} holds no tokenizer: none of {', '.join(TOKENIZER)}")
    model = FPRNNForCausalLM(found.config)
    state = model.state_dict()
    for name, tensor in found.weights.items():
        state[name].copy_(tensor)
    with tempfile.TemporaryDirectory() as copies:
        files = [of_tokens / name for name in TOKENIZER_FILES] if of_tokens else []
        for file in files:
            if file.is_file():
                shutil.copy(file, copies)
        origin = f"Imported from {found.what} checkpoint: the same logits, on our scans."
        return write_export(model, Path(out), Path(copies), Path(source).name, origin)


def _downloaded(name: str) -> Path:
    """The files of a model on the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    from lm.runs.written import TOKENIZER_FILES
    from lm.training.foreign import TOKENIZER, WEIGHTS, SourceError

    patterns = ["config.json", *TOKENIZER, *TOKENIZER_FILES, *WEIGHTS]
    patterns += ["*.index.json", "model-*.safetensors", "pytorch_model-*.bin"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, OSError) as e:  # OSError: of the network, and of the hub's answers
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise SourceError(
            f"{name} is no folder here, and cannot be had from the hub: {reason}"
        ) from None
