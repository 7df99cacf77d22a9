"""DeepSpeed's JSON derived from a configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from lm.common.errors import ConfigError
from lm.common.files import parse_json
from lm.config.schema import Config

# Elements of a gradient buffer. The gradients of a 160M model fill four buffers: each is large
# enough for the network's full bandwidth, and is sent while the next is computed.
MAX_BUCKET = 50_000_000
# {key of DeepSpeed: our key that sets it}
RESERVED = {
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "torch_autocast": "train.precision",
}


def _merge(base: dict, overrides: dict) -> dict:
    """Return a nested mapping with the values of another in it."""
    merged = dict(base)
    for key, value in overrides.items():
        is_nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if is_nested else value
    return merged


def _read_overrides(cfg: Config) -> dict:
    """Return `engine.deepspeed`, or the content of the file that it names.

    Raises:
        ConfigError: If the file is missing or is no JSON mapping.
    """
    section = cfg.engine.deepspeed
    if not isinstance(section, str):
        return section or {}
    if Path(section).exists() and not Path(section).is_file():  # reading a device may never end
        raise ConfigError(f"engine.deepspeed: {section} is no file")
    try:
        overrides = parse_json(Path(section).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:  # ValueError: no JSON, or no UTF-8
        raise ConfigError(f"engine.deepspeed: cannot read {section} as JSON: {e}") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f"engine.deepspeed: {section} must hold a mapping of keys to values")
    return overrides


def deepspeed_config(cfg: Config, world_size: int, on_gpu: bool | None = None) -> dict:
    """Return DeepSpeed's JSON for a config, with `engine.deepspeed` merged over it.

    Args:
        cfg: Configuration of the run.
        world_size: Number of ranks.
        on_gpu: True if the ranks compute on GPUs; None: as on this machine.

    Raises:
        ConfigError: If engine.deepspeed names a file that is missing or is no JSON mapping, or sets
            a key that `train` or `optim` decides, or a value that DeepSpeed does not accept.
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
            # One rank sends nothing, and would pay for a second gradient buffer.
            "overlap_comm": on_gpu and world_size > 1,
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if t.precision == "bf16":
        # Weights in fp32, matrix products in bf16. By default the last key lists all linear layers,
        # and DeepSpeed rounds their gradients to bf16 before it accumulates and reduces them.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    overrides = _read_overrides(cfg)
    for key, our_key in RESERVED.items():
        if key in overrides:
            raise ConfigError(
                f"engine.deepspeed sets {key}, which is derived from `{our_key}`: remove it, and"
                f" set `{our_key}`"
            )
    _check_types(config, overrides)
    merged = _merge(config, overrides)
    for key in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
    ):
        if merged[key] != config[key]:
            raise ConfigError(
                f"engine.deepspeed sets {key} to {merged[key]!r}, the config needs {config[key]}:"
                " set train.global_batch_size and train.micro_batch_size instead"
            )
    clipping = merged["gradient_clipping"]
    if clipping != "auto" and not 0 <= clipping < math.inf:
        raise ConfigError(
            f"engine.deepspeed sets gradient_clipping to {clipping!r}: it must be a norm of at"
            " least 0, and 0 turns clipping off"
        )
    zero = merged["zero_optimization"]
    if zero["stage"] not in (0, 1, 2, 3, "auto"):
        raise ConfigError(
            f"engine.deepspeed sets the stage of zero_optimization to {zero['stage']!r}: it must be"
            " one of 0, 1, 2, 3"
        )
    if "communication_data_type" in merged and t.precision == "bf16" and zero["stage"] != 0:
        raise ConfigError(
            "engine.deepspeed sets communication_data_type, which DeepSpeed ignores with"
            " autocast and ZeRO: remove it; gradients are sent in fp32"
        )
    if '"auto"' in json.dumps(merged):
        raise ConfigError(
            'engine.deepspeed holds "auto", which only the HuggingFace Trainer replaces:'
            " set numbers, or remove the key"
        )
    return merged


def _check_types(config: dict, overrides: dict, section: str = "") -> None:
    """Check that overrides have the types of the values that they replace.

    Raises:
        ConfigError: If one has another type.
    """
    for key in config.keys() & overrides.keys():
        value, kind = overrides[key], type(config[key])
        if kind is dict and isinstance(value, dict):
            _check_types(config[key], value, f" of {key}")
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        has_type = is_number if kind in (int, float) else isinstance(value, kind)
        if not has_type and value != "auto":
            names = {dict: "a mapping", list: "a list", bool: "true or false", str: "text"}
            expected = names.get(kind, "a number")
            raise ConfigError(
                f"engine.deepspeed sets {key}{section} to {value!r}: it must be {expected}"
            )


def bucket_size(parameters: int, largest: int) -> int:
    """Return the number of elements of DeepSpeed's gradient buffer.

    DeepSpeed's default is 500 million for any model.

    Args:
        parameters: Number of parameters of the model.
        largest: Number of elements of its largest tensor, which must fit into the buffer.
    """
    return max(1, min(parameters, max(MAX_BUCKET, largest)))


def layout(cfg: Config, world_size: int) -> dict[str, int]:
    """Return the layout of weights and optimizer over ranks, as a manifest has it."""
    stage = deepspeed_config(cfg, world_size)["zero_optimization"]["stage"]
    return {"world_size": world_size, "zero_stage": stage}


def check_device(config: dict) -> None:
    """Refuse fp16 weights on a CPU, for which DeepSpeed raises a traceback.

    Args:
        config: DeepSpeed's JSON, as `deepspeed_config` returns it.

    Raises:
        ConfigError: If `fp16` is enabled, or is no mapping.
    """
    fp16 = config.get("fp16", {})
    if not isinstance(fp16, dict):
        raise ConfigError(
            f"engine.deepspeed sets fp16 to {fp16!r}: it must be a mapping, as in {{fp16:"
            " {enabled: true}}"
        )
    if fp16.get("enabled") and not torch.cuda.is_available():
        raise ConfigError(
            "engine.deepspeed sets fp16.enabled, which needs a GPU, and there is none: remove"
            " it (train.precision: bf16 and fp32 run on a CPU)"
        )
