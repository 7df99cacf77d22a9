"""Translation of parameter names and configurations of the golden cases to ours."""

import re

from lm.model.configuration_fprnn import FPRNNConfig

# Names of tensors in the paper's code → our names; applied in this order.
RENAMES = [
    (r"\.parametrizations\.weight\.original0$", ".gain"),
    (r"\.parametrizations\.weight\.original1$", ".direction"),
    (r"\.parametrizations\.weight\.original$", ".weight"),
    (r"\.parametrizations\.weight\.0\.base$", ".base"),
    (r"^backbone\.embedding\.", "backbone.embeddings."),
    (r"^(backbone\.layers\.\d+)\.mixer\.", r"\1.block."),
    (r"\bmixer\.uv_project\.", "mixer.uv_proj."),
    (r"\bmixer\.(diag|alpha)\.", "mixer.gate_proj."),
    (r"^(backbone\.layers\.\d+\.block\.|)(output_)?norm\.weight$", r"\1out_norm.weight"),
    (r"\binput_trans\.", "in_proj."),
    (r"\boutput_trans\.", "out_proj."),
]
LANGUAGE_MODEL = "FPLMHeadModel"
BLOCKS = {
    "FPMamba": "fp_mamba1",
    "FPMamba1": "fp_mamba1",
    "FPMamba2": "fp_mamba2",
    "FPRNN": "fp_rnn",
}
MIXERS = {
    "householderproduct": {"mixer": "householder"},
    "dplr": {"mixer": "dplr"},
    "kronecker": {"mixer": "kronecker"},
    "monarch": {"mixer": "monarch", "eigen_range": "positive"},
    "nonselective": {"mixer": "nonselective"},
}
# Keys with the same name and meaning.
EQUAL_KEYS = {
    *("d_model", "n_layer", "vocab_size", "d_state", "headdim", "mixer_rank", "stepsize_decay"),
    *("bc_norm", "glu_in_loop", "use_short_conv", "symm_mixer", "mixer_h_dep"),
}
OTHER_KEYS = {
    *("layer", "mixer_type", "mixer_proj_rank", "norm_eps"),
    *("outlier_quantile", "stepsize0", "decay_patience"),
    "d_mixer",  # an unused argument in the paper's code
}
SOLVER_KEYS = ("outlier_quantile", "stepsize0", "stepsize_decay", "decay_patience")
# Fixed behaviour of the paper's code that is an option of FPRNNConfig.
FIXED = {
    "token": "iterate",
    "schedule": "parallel",
    "stopping": "paper",
    "eval_max_iters": 1000,
    "gradient": "one_step",
    "contractive": None,
    "b_h_dep": True,
    "c_h_dep": True,
    "dt_h_dep": False,
    "gate_h_dep": True,
    "reset_at_eos": False,
}


def reference_name(name):
    """Return our name of one of the paper's parameters."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def reference_config(record, **overrides):
    """Return the FPRNNConfig of a case.

    Args:
        record: The case's JSON: of a block `cls` and `config`, of a language model `model_config`
            and `ssm_cfg`; next to them keys of the solver.
        overrides: Fields of FPRNNConfig.

    Raises:
        ValueError: If it has a key that is not known here, whose effect would be lost.
    """
    sections = (record.get(key, {}) for key in ("model_config", "ssm_cfg", "config"))
    keys = {key: value for section in sections for key, value in section.items()}
    keys |= {key: record[key] for key in SOLVER_KEYS if key in record}
    if unknown := keys.keys() - EQUAL_KEYS - OTHER_KEYS:
        raise ValueError(f"unknown keys of the configuration: {', '.join(sorted(unknown))}")
    block = BLOCKS[keys.get("layer", record["cls"])]
    fields = {key: value for key, value in keys.items() if key in EQUAL_KEYS}
    fields |= {"block": block, **FIXED, **MIXERS[keys["mixer_type"]]}
    if block == "fp_mamba2":
        fields["bc_norm"] = True
    fields["eps"] = fields["out_norm_epsilon"] = keys.get("norm_eps", 1e-5)
    if keys.get("mixer_proj_rank", -1) != -1:
        fields["mixer_proj_rank"] = keys["mixer_proj_rank"]
    # FPRNN divides by the largest eigenvalue as well.
    spectral = block == "fp_rnn" and fields["mixer"] == "kronecker"
    fields["kronecker_norm"] = "spectral" if spectral else "rows"
    if "outlier_quantile" in keys:
        fields["quantile"] = 1 - keys["outlier_quantile"]
        fields["stepsize"] = keys["stepsize0"]
        fields["patience"] = keys["decay_patience"]
    return FPRNNConfig(**{**fields, **overrides})
