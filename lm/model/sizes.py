"""Which sizes of a layer go together, and what those left open are."""

from typing import Any

GATED = ("householder", "dplr", "kronecker", "monarch", "mixture")  # mixers with gates a_t
H_DEP = {"b_h_dep": True, "c_h_dep": True, "dt_h_dep": False, "gate_h_dep": True}  # of FP-Mamba
MAX_DENSE = 256  # d_inner above which selective_dense is refused: it costs O(d³) per token


def nearest_divisor(whole: int, wanted: int) -> int:
    """The divisor of `whole` that is nearest to `wanted`."""
    divisors = (m for m in range(1, whole + 1) if whole % m == 0)
    return min(divisors, key=lambda m: abs(m - wanted))


def heads_of(config: Any) -> int:
    """Of attention and of a delta layer: `n_heads`, or as many of `headdim` as fit in d_model, at
    least one."""
    return max(1, config.d_model // config.headdim) if config.n_heads == "auto" else config.n_heads


def negative_eigenvalues(config: Any, kind: str) -> bool:
    """Whether β of a delta layer is in (0, 2), not (0, 1)."""
    if config.allow_neg_eigval == "auto":
        return kind != "gated_deltanet"
    return bool(config.allow_neg_eigval)


def width_of_mlp(config: Any) -> int:
    """Width inside the gated MLP: 8/3 · d_model rounded up to a multiple of 64 (Llama's rule)."""
    return -(-8 * config.d_model // (3 * 64)) * 64 if config.d_ff == "auto" else config.d_ff


def check_sizes(config: Any, kind: str) -> None:
    """Find out whether the sizes of a layer of some kind go together.

    Args: config: the FPRNNConfig of the layer. kind: see patterns.KINDS.
    Raises:
        ValueError: they do not; names the field, and what would do.
    """
    if kind in ("fp_mamba2", "mamba2"):
        _check_mamba2(config)
    if kind.startswith("fp_"):
        _check_mixer(config, kind)
    if kind in ("attention", "gated_deltanet", "gated_deltaproduct", "deltaproduct"):
        _check_heads(config, kind)


def _check_mamba2(config):
    d = config.d_inner
    if d % config.headdim:
        raise ValueError(
            f"headdim is {config.headdim}: it must divide d_inner = expand · d_model = {d}, as"
            f" {nearest_divisor(d, config.headdim)} does"
        )
    heads = d // config.headdim
    if heads % config.ngroups:
        raise ValueError(
            f"ngroups is {config.ngroups}: it must divide the {heads} heads (d_inner / headdim),"
            f" as {nearest_divisor(heads, config.ngroups)} does"
        )


def _check_mixer(config, kind):
    d = config.d_inner
    if kind == "fp_rnn" and config.glu_in_loop:
        raise ValueError(
            "glu_in_loop is for fp_mamba1 and fp_mamba2: fp_rnn iterates its state itself"
        )
    for name, default in H_DEP.items():
        if kind == "fp_rnn" and getattr(config, name) != default:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which only fp_mamba1 and fp_mamba2 can have;"
                f" of fp_rnn it must be {default}"
            )
    if config.glu_in_loop and not config.gate_h_dep:
        raise ValueError(
            "gate_h_dep is False: with glu_in_loop the gate is inside the iteration and reads x"
            " alone as it is; leave gate_h_dep True (in this layer's options)"
        )
    if config.mixer_gate_start and config.mixer not in GATED:
        raise ValueError(
            f"mixer_gate_start is {config.mixer_gate_start}: it is for mixers with gates"
            f" ({', '.join(GATED)}), not for {config.mixer}: leave it 0 (in this layer's options)"
        )
    if config.mixer == "monarch" and d % config.mixer_rank:
        raise ValueError(
            f"mixer_rank is {config.mixer_rank}: of monarch it is the block size and must divide"
            f" d_inner = expand · d_model = {d}, as {nearest_divisor(d, config.mixer_rank)} does"
        )
    if config.mixer == "selective_dense" and d > MAX_DENSE:
        raise ValueError(
            f"selective_dense builds a {d}×{d} matrix per token and iteration: d_inner ="
            f" expand · d_model may be at most {MAX_DENSE}"
        )
    if config.mixer_proj_rank is not None and config.mixer not in ("householder", "dplr"):
        raise ValueError(f"mixer_proj_rank is for householder and dplr, not for {config.mixer}")


def _check_heads(config, kind):
    d, heads = config.d_model, heads_of(config)
    if d % heads:
        raise ValueError(
            f"n_heads is {config.n_heads} ({heads} heads): it must divide d_model = {d},"
            f" as {nearest_divisor(d, heads)} does"
        )
    if kind == "attention" and config.position == "rope" and (d // heads) % 2:
        raise ValueError(
            f"d_model / n_heads is {d // heads}: RoPE rotates pairs, so it must be even; or set"
            " position to nope"
        )
