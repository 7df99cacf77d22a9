"""Run directory → HuggingFace directory; and the names of the paper's code in terms of ours."""

import os
import re
import shutil
import tempfile
from pathlib import Path

# Where the paper's implementation and ours call the same tensor differently, in order.
REFERENCE_RENAMES = [
    (r"\.parametrizations\.weight\.original0$", ".gain"),
    (r"\.parametrizations\.weight\.original1?$", ".weight"),
    (r"\.parametrizations\.weight\.0\.base$", ".base"),
    (r"^backbone\.embedding\.", "backbone.embeddings."),
    (r"^(backbone\.layers\.\d+)\.mixer\.", r"\1.block."),
    (r"\bmixer\.uv_project\.", "mixer.uv_proj."),
    (r"\bmixer\.(diag|alpha)\.", "mixer.gate_proj."),
    (r"^(backbone\.layers\.\d+\.block\.|)(output_)?norm\.weight$", r"\1out_norm.weight"),
    (r"\binput_trans\.", "in_proj."),
    (r"\boutput_trans\.", "out_proj."),
]


def reference_name(name):
    """The paper's parameter name → ours, e.g. mixer.u_proj.parametrizations.weight.original0 →
    mixer.u_proj.gain."""
    for pattern, replacement in REFERENCE_RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


class ExportError(RuntimeError):
    """An export that cannot be made; the message says why."""


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [{model_type}]
---
# {name}

Trained with fprnn for {step} updates.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
```
"""


def export(run_dir: Path, out: Path, checkpoint: Path | None = None) -> Path:
    """Write `out`: weights (fp32 safetensors), config, tokenizer, and for our models the code, so
    that `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` works without `lm`.

    Args:
        checkpoint: which one; None takes the newest complete one.
    Raises:
        CheckpointError: the run has no complete checkpoint.
        ExportError: `run_dir` holds no run, or `out` holds something that is no export.
    """
    from transformers.utils import logging

    from lm import checkpoint as checkpoints
    from lm.build import build_model, vocabulary
    from lm.config import load
    from lm.data.tokenizer import RECORD, load_tokenizer

    logging.disable_progress_bar()

    run_dir, out = Path(run_dir), Path(out)
    if not (run_dir / "config.yaml").is_file():
        raise ExportError(f"{run_dir} holds no run (it has no config.yaml)")
    if out.exists() and not (out / "config.json").is_file() and any(out.iterdir()):
        raise ExportError(f"{out} is not empty and holds no earlier export: choose another folder")
    path = Path(checkpoint) if checkpoint else checkpoints.newest(run_dir)
    if path is None:
        raise checkpoints.CheckpointError(f"{run_dir} has no complete checkpoint to export")
    step = checkpoints.verify(path)["step"]
    cfg = load(run_dir / "config.yaml")
    tokenizer = load_tokenizer(cfg, run_dir)
    model = build_model(
        cfg, vocabulary(cfg, len(tokenizer)), tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    model.load_state_dict(checkpoints.consolidated(path), strict=True)
    if cfg.model.name == "fprnn":
        from lm.model.configuration_fprnn import FPRNNConfig
        from lm.model.modeling_fprnn import FPRNNForCausalLM

        FPRNNConfig.register_for_auto_class()
        FPRNNForCausalLM.register_for_auto_class("AutoModelForCausalLM")

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new = Path(folder) / "export"
        model.save_pretrained(new)
        for file in (run_dir / "tokenizer").iterdir():
            if file.name != RECORD:
                shutil.copy(file, new)
        card = CARD.format(model_type=model.config.model_type, name=cfg.name, step=step)
        (new / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        os.replace(new, out)
    return out
