"""DeepSpeed's JSON derived from a configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from lm.common.errors import ConfigError
from lm.common.files import parse_json
from lm.config.schema import Config
from lm.kernels import requested_backend

# The gradients of a 160M model fill four buffers of this size: each uses the full bandwidth of the
# network, and is sent while the gradients of the next buffer are computed.
MAX_BUCKET_ELEMENTS = 50_000_000
# {key of DeepSpeed: our key from which it is derived}
DERIVED_KEYS = {
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "torch_autocast": "train.precision",
}
# Keys that follow from `train`: an override must repeat the derived value.
BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def _merge(base: dict, overrides: dict) -> dict:
    """Return a copy of `base`, a nested mapping, with the values of `overrides` in it."""
    merged = dict(base)
    for key, value in overrides.items():
        are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if are_sections else value
    return merged


def _read_overrides(cfg: Config) -> dict:
    """Return `engine.deepspeed`, or the content of the file that it names."""
    mapping_or_path = cfg.engine.deepspeed
    if not isinstance(mapping_or_path, str):
        return mapping_or_path or {}
    path = Path(mapping_or_path)
    if path.exists() and not path.is_file():  # reading a device may never end
        raise ConfigError(f"engine.deepspeed: {path} is no file")
    try:
        overrides = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:  # ValueError: no JSON, or no UTF-8
        raise ConfigError(f"engine.deepspeed: cannot read {path} as JSON: {e}") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f"engine.deepspeed: {path} must hold a mapping of keys to values")
    return overrides


def deepspeed_config(cfg: Config, world_size: int, on_gpu: bool | None = None) -> dict:
    """Return DeepSpeed's JSON for a config, with `engine.deepspeed` merged over it.

    Args:
        cfg: Configuration of the run.
        world_size: Number of ranks.
        on_gpu: True if the ranks compute on GPUs; None: as on this machine.

    Raises:
        ConfigError: If engine.deepspeed names a file that is missing or holds no JSON mapping, sets
            a key that follows from `train` or `optim`, or has a value that DeepSpeed refuses.
    """
    config = _derive(cfg, world_size, torch.cuda.is_available() if on_gpu is None else on_gpu)
    overrides = _read_overrides(cfg)
    for key, our_key in DERIVED_KEYS.items():
        if key in overrides:
            raise ConfigError(
                f"engine.deepspeed sets {key}, which is derived from `{our_key}`: remove it, and"
                f" set `{our_key}`"
            )
    _check_types(config, overrides)
    merged = _merge(config, overrides)
    _check_values(merged, config)
    return merged


def _derive(cfg: Config, world_size: int, on_gpu: bool) -> dict:
    """Return DeepSpeed's JSON for a config without `engine.deepspeed`."""
    config = {
        "train_micro_batch_size_per_gpu": cfg.train.micro_batch_size,
        "gradient_accumulation_steps": cfg.train.accumulation(world_size),
        "train_batch_size": cfg.train.sequences(world_size),
        "gradient_clipping": cfg.optim.grad_clip,
        "zero_optimization": {
            "stage": cfg.engine.zero_stage,
            # A single rank sends nothing, so a second gradient buffer would only cost memory. The
            # kernels of backend `cuda` occupy all multiprocessors of the GPU until they end, so
            # NCCL must not run at the same time.
            "overlap_comm": on_gpu and world_size > 1 and requested_backend() != "cuda",
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # never
        "wall_clock_breakdown": False,
    }
    if cfg.train.precision == "bf16":
        # Weights in fp32, matrix products in bf16. By default the last key lists all linear layers,
        # and DeepSpeed rounds their gradients to bf16 before it accumulates and reduces them.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    return config


def _check_values(merged: dict, derived: dict) -> None:
    """Refuse values of `engine.deepspeed` that contradict the config or that DeepSpeed ignores.

    `merged` is the JSON with these values, `derived` the JSON without them.
    """
    for key in BATCH_KEYS:
        if merged[key] != derived[key]:
            raise ConfigError(
                f"engine.deepspeed sets {key} to {merged[key]!r}, the config needs {derived[key]}:"
                " set train.global_batch_size and train.micro_batch_size instead"
            )
    clipping = merged["gradient_clipping"]
    if clipping != "auto" and not 0 <= clipping < math.inf:
        raise ConfigError(
            f"engine.deepspeed sets gradient_clipping to {clipping!r}: it must be a norm of at"
            " least 0, and 0 turns clipping off"
        )
    stage = merged["zero_optimization"]["stage"]
    if stage not in (0, 1, 2, 3, "auto"):
        raise ConfigError(
            f"engine.deepspeed sets the stage of zero_optimization to {stage!r}: it must be one of"
            " 0, 1, 2, 3"
        )
    if "communication_data_type" in merged and "torch_autocast" in merged and stage != 0:
        raise ConfigError(
            "engine.deepspeed sets communication_data_type, which DeepSpeed ignores with"
            " autocast and ZeRO: remove it; gradients are sent in fp32"
        )
    if '"auto"' in json.dumps(merged):  # at any depth
        raise ConfigError(
            'engine.deepspeed holds "auto", which only the HuggingFace Trainer replaces:'
            " set numbers, or remove the key"
        )


def _check_types(config: dict, overrides: dict, section_suffix: str = "") -> None:
    """Check that overrides have the types of the values that they replace."""
    for key in config.keys() & overrides.keys():
        value, expected_type = overrides[key], type(config[key])
        if expected_type is dict and isinstance(value, dict):
            _check_types(config[key], value, section_suffix=f" of {key}")
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        needs_number = expected_type in (int, float)
        has_type = is_number if needs_number else isinstance(value, expected_type)
        if not has_type and value != "auto":  # `_check_values` refuses "auto"
            names = {dict: "a mapping", list: "a list", bool: "true or false", str: "text"}
            expected = names.get(expected_type, "a number")
            raise ConfigError(
                f"engine.deepspeed sets {key}{section_suffix} to {value!r}: it must be {expected}"
            )


def bucket_size(parameter_count: int, largest_tensor: int) -> int:
    """Return the size of DeepSpeed's gradient buffer in elements; its default is 500 million.

    Args:
        parameter_count: Number of parameters of the model.
        largest_tensor: Elements of its largest tensor, which must fit into the buffer.
    """
    return max(1, min(parameter_count, max(MAX_BUCKET_ELEMENTS, largest_tensor)))


def layout(cfg: Config, world_size: int) -> dict[str, int]:
    """Return the entries of a manifest that determine the layout of weights over ranks."""
    stage = deepspeed_config(cfg, world_size)["zero_optimization"]["stage"]
    return {"world_size": world_size, "zero_stage": stage}


def check_device(config: dict) -> None:
    """Raise ConfigError if DeepSpeed's JSON has fp16 on a CPU, which DeepSpeed does not support."""
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
