"""The DeepSpeed JSON that a config means."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from lm.common.errors import ConfigError
from lm.common.files import parse_json
from lm.config.schema import Config

# Numbers of a gradient buffer. Four buffers of the 160M model: large enough for a network's full
# bandwidth, and a part is sent while the next is computed.
MAX_BUCKET = 50_000_000
# Keys of DeepSpeed's → our key that decides them.
DECIDED = {
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "torch_autocast": "train.precision",
}


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _own(cfg: Config) -> dict:
    """What `engine.deepspeed` says, or the file that it names.

    Raises:
        ConfigError: the file is missing or is no JSON mapping.
    """
    own = cfg.engine.deepspeed
    if not isinstance(own, str):
        return own or {}
    if Path(own).exists() and not Path(own).is_file():  # a device may have no end
        raise ConfigError(f"engine.deepspeed: {own} is no file")
    try:
        found = parse_json(Path(own).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:  # ValueError: no JSON, no UTF-8
        raise ConfigError(f"engine.deepspeed: cannot read {own} as JSON: {e}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"engine.deepspeed: {own} must hold a mapping of keys to values")
    return found


def deepspeed_config(cfg: Config, world_size: int, on_gpu: bool | None = None) -> dict:
    """Return DeepSpeed's JSON for a config, with `engine.deepspeed` merged over it.

    Args:
        cfg: The config of a run.
        world_size: Number of ranks.
        on_gpu: True if the ranks compute on GPUs; None: as on this machine.

    Raises:
        ConfigError: engine.deepspeed names a file that is missing or is no JSON mapping, or sets a
            key that the config decides, or a value that DeepSpeed cannot take.
    """
    t = cfg.train
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    config = {
        "train_micro_batch_size_per_gpu": t.micro_batch_size,
        "gradient_accumulation_steps": t.accumulation(world_size),
        "train_batch_size": t.sequences(world_size),
        "gradient_clipping": cfg.optim.grad_clip,
        "zero_optimization": {
            "stage": cfg.engine.zero_stage,
            # One rank has nothing to send, and a second buffer for gradients to pay for.
            "overlap_comm": on_gpu and world_size > 1,
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if t.precision == "bf16":
        # Weights in fp32, matrix products in bf16. DeepSpeed's default of the last key is every
        # linear layer: it rounds their gradients to bf16 before it accumulates and sums them.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    own = _own(cfg)
    for key, decides in DECIDED.items():
        if key in own:
            raise ConfigError(
                f"engine.deepspeed sets {key}, and `{decides}` decides it: leave it out, and set"
                f" `{decides}`"
            )
    _check_kinds(config, own)
    merged = _merge(config, own)
    for key in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
    ):
        if merged[key] != config[key]:
            raise ConfigError(
                f"engine.deepspeed sets {key} to {merged[key]!r}, the config means {config[key]}:"
                " set train.global_batch_size and train.micro_batch_size instead"
            )
    clipping = merged["gradient_clipping"]
    if clipping != "auto" and not 0 <= clipping < math.inf:
        raise ConfigError(
            f"engine.deepspeed sets gradient_clipping to {clipping!r}: it must be a norm from 0 on,"
            " and 0 turns clipping off"
        )
    zero = merged["zero_optimization"]
    if zero["stage"] not in (0, 1, 2, 3, "auto"):
        raise ConfigError(
            f"engine.deepspeed sets the stage of zero_optimization to {zero['stage']!r}: it must be"
            " one of 0, 1, 2, 3"
        )
    if "communication_data_type" in merged and t.precision == "bf16" and zero["stage"] != 0:
        raise ConfigError(
            "engine.deepspeed sets communication_data_type, which DeepSpeed does not use under"
            " autocast and ZeRO: leave it out to send gradients in fp32"
        )
    if '"auto"' in json.dumps(merged):
        raise ConfigError(
            'engine.deepspeed holds "auto", which only the HuggingFace Trainer fills in: give'
            " numbers, or leave the key out"
        )
    return merged


def _check_kinds(ours: dict, own: dict, section: str = "") -> None:
    """Raises ConfigError where a key that we set has a value of another kind in `own`."""
    for key in ours.keys() & own.keys():
        value, kind = own[key], type(ours[key])
        if kind is dict and isinstance(value, dict):
            _check_kinds(ours[key], value, f" of {key}")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number if kind in (int, float) else isinstance(value, kind)) and value != "auto":
            kinds = {dict: "a mapping", list: "a list", bool: "true or false", str: "text"}
            wanted = kinds.get(kind, "a number")
            raise ConfigError(
                f"engine.deepspeed sets {key}{section} to {value!r}: it must be {wanted}"
            )


def bucket_size(parameters: int, largest: int) -> int:
    """Return how many numbers DeepSpeed's gradient buffer holds.

    DeepSpeed allocates its default of 500 million numbers whatever the model is.

    Args:
        parameters: Number of the model's parameters. largest: Number of those in its largest
            tensor, which goes through the buffer whole.
    """
    return max(1, min(parameters, max(MAX_BUCKET, largest)))


def layout(cfg: Config, world_size: int) -> dict[str, int]:
    """How weights and optimizer are laid out: a checkpoint says the same of itself."""
    stage = deepspeed_config(cfg, world_size)["zero_optimization"]["stage"]
    return {"world_size": world_size, "zero_stage": stage}


def check_device(config: dict) -> None:
    """Refuse weights in fp16 on a CPU, which DeepSpeed refuses by a traceback.

    Args:
        config: DeepSpeed's JSON, as `deepspeed_config` returns it.

    Raises:
        ConfigError: They are asked for, or `fp16` is no mapping.
    """
    fp16 = config.get("fp16", {})
    if not isinstance(fp16, dict):
        raise ConfigError(
            f"engine.deepspeed sets fp16 to {fp16!r}: it must be a mapping, as in {{fp16:"
            " {enabled: true}}"
        )
    if fp16.get("enabled") and not torch.cuda.is_available():
        raise ConfigError(
            "engine.deepspeed sets fp16.enabled, which needs a GPU, and there is none: leave it"
            " out (train.precision: bf16 and fp32 run on a CPU)"
        )
