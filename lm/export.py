"""Run directory → HuggingFace directory; and the names of the paper's code in terms of ours."""

import re

# Where the paper's implementation and ours call the same tensor differently, in order.
REFERENCE_RENAMES = [
    (r"\.parametrizations\.weight\.original0$", ".gain"),
    (r"\.parametrizations\.weight\.original1$", ".weight"),
    (r"^backbone\.embedding\.", "backbone.embeddings."),
    (r"^(backbone\.layers\.\d+)\.mixer\.", r"\1.block."),
    (r"\bmixer\.uv_project\.", "mixer.uv_proj."),
    (r"\bmixer\.diag\.", "mixer.gate_proj."),
]


def reference_name(name):
    """The paper's parameter name → ours, e.g. mixer.u_proj.parametrizations.weight.original0 →
    mixer.u_proj.gain."""
    for pattern, replacement in REFERENCE_RENAMES:
        name = re.sub(pattern, replacement, name)
    return name
