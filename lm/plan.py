"""What a run will cost, before it starts: parameters, tokens, FLOPs, memory per GPU."""

from __future__ import annotations

from lm.build import build_model, vocabulary
from lm.config import Config

GIB = 2**30


def saved_bytes(cfg: Config) -> tuple[float, float]:
    """Bytes that one block keeps for its backward: (per token, whatever the length). Counted on one
    real layer of this shape at two lengths, not estimated. fprnn only."""
    import torch

    one = cfg.model_copy(deep=True)
    one.model.n_layer, one.model.max_iters, one.model.gradient_checkpointing = 1, 1, False
    block = build_model(one, 8).backbone.layers[0].train()
    owned = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def count(tokens: int) -> int:
        seen = {}

        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in owned:
                seen[storage.data_ptr()] = storage.nbytes()
            return t

        u = torch.randn(1, tokens, one.model.d_model, requires_grad=True)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=cfg.train.precision == "bf16"),
        ):
            output = block(u, None)  # kept alive, so that no address is used twice
        del output
        return sum(seen.values())

    short, long = count(64), count(256)
    per_token = (long - short) / 192
    return per_token, short - 64 * per_token


def plan(cfg: Config, world_size: int) -> dict:
    """Numbers of a run on `world_size` GPUs. Builds on the meta device; downloads nothing.

    Raises:
        ConfigError: as `build_model` and `vocabulary`.
    """
    import torch

    vocab_size = vocabulary(cfg)
    with torch.device("meta"):
        model = build_model(cfg, vocab_size)
    n = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    m, t, stage = cfg.model, cfg.train, cfg.engine.zero_stage
    tokens_per_step = cfg.tokens_per_step(world_size)

    if m.name == "fprnn":
        flops = {f"ℓ* = {k}": model.flops_per_token(k) for k in (1, 5, 10, 20)}
    else:  # 6 N for matrices and head, and what mixes time: forward and backward, 3 × the forward
        d, states = m.expand * m.d_model, m.d_state
        if m.name == "transformer":
            mixing = 6 * m.d_model * cfg.data.seq_len  # causal: half of all pairs
        elif m.name in ("mamba", "mamba2"):
            mixing = 27 * d * states  # Mamba's own count of its scan
        elif m.name == "lstm":
            mixing = 0
        else:  # erase, write, read a (d_model/heads × d/heads) state per head and reflection
            head = m.headdim if m.n_heads == "auto" else m.d_model // m.n_heads
            steps = 1 if m.name == "gated_deltanet" else m.n_householder
            mixing = 18 * m.d_model * m.expand * head * steps
        matrices = 6 * (n - (0 if m.tie_embeddings else embedding))
        flops = {m.name: matrices + mixing * m.n_layer}

    micro_tokens = t.micro_batch_size * cfg.data.seq_len
    shard = {"weights": 3, "gradients": 2, "optimizer": 1}  # from which ZeRO stage on
    memory = {
        name: n * size / (world_size if stage >= shard[name] else 1)
        for name, size in [("weights", 4), ("gradients", 4), ("optimizer", 8)]
    }
    if m.name == "fprnn":
        from lm.model.modeling_fprnn import LOSS_CHUNK_TOKENS
        from lm.model.scan import MAX_TEMPORARY

        per_token, constant = saved_bytes(cfg)
        boundary = 4 * m.d_model  # the fp32 residual stream
        if m.gradient_checkpointing:
            d = m.expand * m.d_model
            kept = m.n_layer * micro_tokens * (boundary + 4 * d)  # each layer's input and y*
            memory["activations"] = kept + micro_tokens * per_token + constant
        else:
            memory["activations"] = m.n_layer * (micro_tokens * (per_token + boundary) + constant)
        memory["solver and scan temporaries"] = 3 * MAX_TEMPORARY
        memory["logits"] = min(micro_tokens, LOSS_CHUNK_TOKENS) * vocab_size * 12
    else:
        half = 2 if t.precision == "bf16" else 4
        d = m.expand * m.d_model
        memory["activations (fused kernels)"] = (
            micro_tokens * m.n_layer * (8 * d * half + 8 * m.d_model)
        )
        memory["logits"] = micro_tokens * vocab_size * (half + 8)
    return {
        "world_size": world_size,
        "vocab_size": vocab_size,
        "parameters": n,
        "parameters_without_embedding": n - embedding,
        "sequences_per_step": t.micro_batch_size * t.grad_accum_steps * world_size,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens_per_step * t.steps,
        "flops_per_token": flops,
        "memory_per_gpu": memory,
    }


def describe(p: dict, cfg: Config):
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=f"Plan of {cfg.name}", show_header=False, title_justify="left")
    rows = [
        ("parameters", f"{p['parameters'] / 1e6:,.1f} M"),
        ("… without embedding", f"{p['parameters_without_embedding'] / 1e6:,.1f} M"),
        ("vocabulary", f"{p['vocab_size']:,}"),
        ("ranks (GPUs)", str(p["world_size"])),
        ("sequences per update", f"{p['sequences_per_step']:,} of {cfg.data.seq_len:,} tokens"),
        ("tokens per update", f"{p['tokens_per_step']:,}"),
        ("tokens in all", f"{p['tokens'] / 1e9:,.3f} B in {cfg.train.steps:,} updates"),
    ]
    for name, flops in p["flops_per_token"].items():
        total = flops * p["tokens"]
        rows.append((f"FLOPs per token, {name}", f"{flops / 1e9:,.3f} G  ({total:.2e} in all)"))
    for name, size in p["memory_per_gpu"].items():
        rows.append((f"memory: {name}", f"{size / GIB:,.2f} GiB"))
    rows.append(
        (f"memory per GPU, ZeRO-{cfg.engine.zero_stage}",
         f"{sum(p['memory_per_gpu'].values()) / GIB:,.1f} GiB (estimate)")
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table
