"""What a run will cost, before it starts: parameters, tokens, FLOPs, memory per GPU."""

from __future__ import annotations

from lm.build import build_model, vocabulary
from lm.config import Config
from lm.deepspeed_json import deepspeed_config

GIB = 2**30

# Tokens of hub datasets, by their own cards (in GPT-2's): about so many.
HUB_TOKENS = {
    ("HuggingFaceFW/fineweb", "sample-10BT"): 10e9,
    ("HuggingFaceFW/fineweb", "sample-100BT"): 100e9,
    ("HuggingFaceFW/fineweb", "sample-350BT"): 350e9,
}


def is_gpt2(tokenizer: str) -> bool:
    """Whether a tokenizer of this name or folder calls itself GPT-2's."""
    return tokenizer.rstrip("/").rpartition("/")[2] == "gpt2"


def training_data(cfg: Config) -> tuple[float | None, str]:
    """Tokens that the run can be trained on before any comes again, and where the number is from;
    None where nothing says before the source is tokenised: what the run directory holds counts only
    if it was made of this source with this tokenizer. Reads no text."""
    d = cfg.data
    if d.source == "fineweb":
        name = f"{d.dataset} {d.name}"
        if (total := HUB_TOKENS.get((d.dataset, d.name))) is None:
            return None, f"how many {name} has is not known here"
        whose = "GPT-2's tokens"
        if not is_gpt2(cfg.tokenizer.name):
            whose += f", those of `{cfg.tokenizer.name}` will be more or fewer"
        return total * (1 - d.val_fraction), f"about, of {name}, less validation's share; {whose}"
    unknown = None, f"known once `{d.source}` is tokenised, when the run starts"
    if not (cfg.run_dir / "tokenizer").is_dir():
        return unknown
    from lm.data.prepare import fingerprint, open_corpus
    from lm.data.sources import DataError
    from lm.data.tokenizer import load_tokenizer

    try:
        meta = open_corpus(cfg.run_dir).meta
        wanted = fingerprint(d, load_tokenizer(cfg, cfg.run_dir))
    except DataError:  # not there, or of another tokenizer
        return unknown
    if meta.fingerprint != wanted:
        return unknown
    return meta.train_tokens, f"as tokenised in {cfg.run_dir}"


def _passes(p: dict, cfg: Config) -> str:
    """How often the run goes over its data, and what happens when they are at an end."""
    again = "the documents come again in their order, shuffled anew in a buffer"
    if cfg.data.source != "fineweb":
        again = "its blocks come again in a new order"
    if p["passes"] is None:
        return f"not known; after each {again}"
    count = f"{p['passes']:.2f}"
    if cfg.data.source == "fineweb" and not is_gpt2(cfg.tokenizer.name):
        count = f"about {count} (in GPT-2's tokens)"
    if p["passes"] <= 1:
        return f"{count}: nothing is read twice"
    return f"{count}: data repeats; after each pass {again}"


def saved_bytes(cfg: Config) -> tuple[float, float]:
    """Bytes that one block keeps for its backward: (per token, whatever the length). Counted on one
    real layer of this shape at two lengths, not estimated. fprnn only."""
    import torch

    one = cfg.model_copy(deep=True)
    one.model.n_layer, one.model.gradient_checkpointing = 1, False
    one.solver.max_iters = 1  # what is kept does not depend on how near the solution is
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


def fprnn_parameters(cfg: Config, vocab_size: int) -> int | None:
    """Of the fixed-point model with a baseline's sizes (d_model, n_layer, …); None for fprnn."""
    import torch

    if cfg.model.name == "fprnn":
        return None
    same = cfg.model_copy(deep=True)
    same.model.name = "fprnn"
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(same, vocab_size).parameters())


def plan(cfg: Config, world_size: int) -> dict:
    """Numbers of a run on `world_size` GPUs. Builds on the meta device; downloads nothing.

    Raises:
        ConfigError: as `build_model`, `vocabulary` and `deepspeed_config`.
    """
    import torch

    vocab_size = vocabulary(cfg)
    with torch.device("meta"):
        model = build_model(cfg, vocab_size)
    n = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    m, t = cfg.model, cfg.train
    stage = deepspeed_config(cfg, world_size)["zero_optimization"]["stage"]
    tokens_per_step = cfg.tokens_per_step(world_size)

    if m.name == "fprnn":
        counts = (1, 5, 10, 20)  # token by token, an exact one takes 1
        flops = {f"evaluations = {k}": model.flops_per_token(k) for k in counts}
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
    tokens = tokens_per_step * t.steps
    dataset_tokens, dataset = training_data(cfg)
    return {
        "world_size": world_size,
        "zero_stage": stage,
        "vocab_size": vocab_size,
        "parameters": n,
        "parameters_without_embedding": n - embedding,
        "sequences_per_step": t.sequences(world_size),
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "dataset_tokens": dataset_tokens,
        "dataset": dataset,
        "passes": tokens / dataset_tokens if dataset_tokens else None,
        "parameters_of_fprnn": fprnn_parameters(cfg, vocab_size),
        "flops_per_token": flops,
        "memory_per_gpu": memory,
    }


def _tokens(count: float | None, where: str) -> str:
    if count is None:
        return where
    return f"{_amount(count)} ({where})"


def _amount(count: float) -> str:
    """2.517 B; smaller numbers in full."""
    return f"{count / 1e9:,.3f} B" if count >= 1e8 else f"{count:,.0f}"


def describe(p: dict, cfg: Config):
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=f"Plan of {cfg.name}", show_header=False, title_justify="left")
    rows = [("parameters", f"{p['parameters'] / 1e6:,.1f} M")]
    if beside := p["parameters_of_fprnn"]:
        m = cfg.model
        share = f"{p['parameters'] / beside:.2f} of its {beside / 1e6:,.1f} M"
        sizes = f"{m.n_layer} layers, d_model {m.d_model}, as here"
        rows.append(("… beside fprnn", f"{share} ({sizes})"))
    rows += [
        ("… without embedding", f"{p['parameters_without_embedding'] / 1e6:,.1f} M"),
        ("vocabulary", f"{p['vocab_size']:,}"),
        ("ranks (GPUs)", str(p["world_size"])),
        ("sequences per update", f"{p['sequences_per_step']:,} of {cfg.data.seq_len:,} tokens"),
        ("tokens per update", f"{p['tokens_per_step']:,}"),
        ("tokens trained on", f"{_amount(p['tokens'])} in {cfg.train.steps:,} updates"),
        ("tokens in the data", _tokens(p["dataset_tokens"], p["dataset"])),
        ("passes over the data", _passes(p, cfg)),
    ]
    for name, flops in p["flops_per_token"].items():
        total = flops * p["tokens"]
        rows.append((f"FLOPs per token, {name}", f"{flops / 1e9:,.3f} G  ({total:.2e} in all)"))
    for name, size in p["memory_per_gpu"].items():
        rows.append((f"memory: {name}", f"{size / GIB:,.2f} GiB"))
    rows.append(
        (f"memory per GPU, ZeRO-{p['zero_stage']}",
         f"{sum(p['memory_per_gpu'].values()) / GIB:,.1f} GiB (estimate)")
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table
