"""The demo model trained in bf16 by a plain loop, with kernels, and for a few updates without; then
saved, loaded and generating. A part of `make gpu-check`.

python -m benchmarks.gpu_training [--device cuda --updates 200 --plain 3 --json FILE]

It needs torch, transformers, tokenizers and PyYAML alone. Exits with 1 when a check fails.
"""

import argparse
import ast
import json
import math
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lm.kernels import available
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.metrics import fixed_point_metrics, probe

ROOT = Path(__file__).parents[1]
EOS = "<|endoftext|>"
WARM = 20  # updates that compile kernels, left out of tokens/s
NEAR = 0.03  # how far the losses with and without kernels may be apart, relative
QUICK = {
    "model": dict(d_model=16, n_layer=1, d_state=4),
    "tokenizer": dict(vocab_size=300),
    "data": dict(seq_len=8),
    "train": dict(global_batch_size=2, micro_batch_size=2),
}


def settings(quick):
    """configs/lm/demo.yaml, with other sizes to be quick."""
    tree = yaml.safe_load((ROOT / "configs/lm/demo.yaml").read_text(encoding="utf-8"))
    for section, values in QUICK.items() if quick else ():
        tree[section] = (tree.get(section) or {}) | values
    return tree


def text():
    """What every Python carries, a document each: the language's reference and the docstrings of
    the standard library's modules. (data/sources/open.py reads more of it, but needs pydantic.)"""
    from pydoc_data.topics import topics

    found = [topics[key] for key in sorted(topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = ast.walk(ast.parse(path.read_bytes()))
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
        found.append("\n\n".join(t for t in texts if t))
    return [document for document in found if document]


def tokens_of(documents, vocab_size):
    """A byte-level BPE trained on the documents, and all their ids in a row, EOS after each."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    ids = [i for e in bpe.encode_batch_fast(documents) for i in (*e.ids, bpe.token_to_id(EOS))]
    return bpe, torch.tensor(ids)


def build(cfg, bpe):
    """The model of a YAML, from one seed."""
    torch.manual_seed(0)
    vocab_size, eos = -(-bpe.get_vocab_size() // 8) * 8, bpe.token_to_id(EOS)
    longest = max(2048, cfg["data"]["seq_len"])
    return FPRNNForCausalLM(
        FPRNNConfig(
            **cfg["model"],
            **cfg.get("solver", {}),
            vocab_size=vocab_size,
            max_position_embeddings=longest,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    )


def optimiser(cfg, model, updates):
    """AdamW, with no decay where training has none, and its warm-up and cosine."""
    optim = cfg["optim"]
    no_decay = ("A_log", "D", "gain", "dt_bias", "bias", "norm")
    groups = [([], optim["weight_decay"]), ([], 0.0)]
    for name, p in model.named_parameters():
        *_, owner, leaf = name.split(".")
        groups["norm" in owner or leaf.startswith(no_decay)][0].append(p)
    adamw = torch.optim.AdamW(
        [dict(params=params, weight_decay=decay) for params, decay in groups], lr=optim["lr"]
    )
    warmup, floor = max(1, round(optim["warmup"] * updates)), optim["min_lr"] / optim["lr"]

    def factor(done):
        update = done + 1
        if update <= warmup:
            return update / warmup
        share = min(1.0, (update - warmup) / max(1, updates - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, factor)


def accumulation(cfg):
    """Micro-batches of an update on one GPU."""
    return cfg["train"]["global_batch_size"] // cfg["train"]["micro_batch_size"]


def train(cfg, bpe, ids, device, updates, schedule_updates):
    """The first `updates` updates of a run whose schedule is for `schedule_updates`.

    Returns:
        the model, and a record: losses, gradient norms, tokens/s, peak memory, the solver's needs.
    """
    model = build(cfg, bpe).to(device).train()
    adamw, schedule = optimiser(cfg, model, schedule_updates)
    micro = cfg["train"]["micro_batch_size"]
    length = cfg["data"]["seq_len"]
    accumulate = accumulation(cfg)
    generator = torch.Generator().manual_seed(0)
    on_gpu = device == "cuda"
    losses = []
    norms = []
    stats = []  # of the last updates' micro-batches
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for update in range(1, updates + 1):
        total = 0.0
        for _ in range(accumulate):
            starts = torch.randint(len(ids) - length - 1, (micro, 1), generator=generator)
            block = ids[starts + torch.arange(length + 1)].to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                out = model(block[:, :-1], shift_labels=block[:, 1:], loss_only=True)
            (out.loss / accumulate).backward()
            total += out.loss.detach() / accumulate
            if update > updates - 10:
                stats.append(out.fixed_point)
        clip = cfg["optim"]["grad_clip"]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        losses.append(total)
        if update == min(WARM, updates // 2):
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            warm_updates = update
        if update % max(1, updates // 10) == 0:
            print(f"update {update}: loss {losses[-1].item():.3f}", flush=True)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    tokens = (updates - warm_updates) * micro * length * accumulate
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    with torch.autocast(device, torch.bfloat16):
        probed = probe(model, block[:, :-1])
    solver = fixed_point_metrics(stats)
    return model, {
        "kernels": available(device),
        "losses": torch.stack(losses).tolist(),
        "grad_norms": torch.stack(norms).tolist(),
        "tokens_per_s": round(tokens / seconds, 1),
        "peak_bytes": peak,
        "evaluations": solver["evaluations"],
        "failed": solver["failed"],
        "num_iters": fixed_point_metrics([probed])["num_iters"]["mean"],
    }


@torch.no_grad()
def saved_and_generating(model, bpe, ids, device, new):
    """Largest difference of logits after save_pretrained and from_pretrained; what is generated
    with the cache, and the share of it that is also generated without."""
    model.eval()
    prompt = ids[:16].unsqueeze(0).to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = FPRNNForCausalLM.from_pretrained(folder).to(device).eval()
    difference = (again(prompt).logits - model(prompt).logits).abs().max().item()
    asked = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False)
    mask = torch.ones_like(prompt)
    with_cache, without = (
        again.generate(prompt, attention_mask=mask, use_cache=use_cache, **asked)[0, 16:]
        for use_cache in (True, False)
    )
    return {
        "load_difference": difference,
        "generated": bpe.decode(with_cache.tolist()),
        "new_tokens": len(with_cache),
        "same_without_cache": (with_cache == without).double().mean().item(),
    }


def check(ours, plain, after, fall, new):
    """What is wrong, in sentences."""
    wrong, losses = [], ours["losses"]
    numbers = losses + ours["grad_norms"] + plain["losses"] + plain["grad_norms"]
    if not all(map(math.isfinite, numbers)):
        wrong.append("a loss or gradient norm is not finite")
    fell = statistics.mean(losses[:3]) - statistics.mean(losses[-3:])
    if not fell >= fall:
        wrong.append(f"the loss fell by {fell:.2f}, not by {fall}")
    apart = max(abs(a - b) / b for a, b in zip(losses, plain["losses"]))
    if not apart <= NEAR:
        wrong.append(f"with and without kernels losses are {apart:.1%} apart, more than {NEAR:.0%}")
    if not after["load_difference"] < 1e-4:
        wrong.append(f"the loaded model's logits differ by {after['load_difference']:.1e}")
    if after["new_tokens"] != new:
        wrong.append(f"{after['new_tokens']} tokens were generated, not {new}")
    return wrong, {"fell": fell, "apart_from_plain": apart}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--updates", type=int, default=200)
    p.add_argument("--plain", type=int, default=3, help="updates without kernels, token by token")
    p.add_argument("--kernels", default="triton", help="FPRNN_KERNELS of the others")
    p.add_argument("--fall", type=float, default=2.5, help="the loss must fall by so much")
    p.add_argument("--new", type=int, default=24, help="tokens to generate")
    p.add_argument("--quick", action="store_true", help="tiny sizes")
    p.add_argument("--json", help="write the numbers here")
    a = p.parse_args()
    cfg, began = settings(a.quick), time.perf_counter()
    documents = text()[: 20 if a.quick else None]
    bpe, ids = tokens_of(documents, cfg["tokenizer"]["vocab_size"])
    print(f"{len(ids)} tokens of {bpe.get_vocab_size()} in {time.perf_counter() - began:.1f} s")
    records = {}
    for name, updates in (("plain", a.plain), (a.kernels, a.updates)):
        os.environ["FPRNN_KERNELS"] = name
        print(f"{updates} updates; kernels: {available(a.device)}", flush=True)
        model, records[name] = train(cfg, bpe, ids, a.device, updates, a.updates)
    ours, plain = records[a.kernels], records["plain"]
    after = saved_and_generating(model, bpe, ids, a.device, a.new)
    wrong, figures = check(ours, plain, after, a.fall, a.new)
    figures |= {
        "loss": [ours["losses"][0], ours["losses"][-1]],
        "tokens_per_s": ours["tokens_per_s"],
        "plain_tokens_per_s": plain["tokens_per_s"],
        "peak_mib": ours["peak_bytes"] and round(ours["peak_bytes"] / 2**20),
        "num_iters": ours["num_iters"],
        "evaluations": ours["evaluations"],
        "failed": ours["failed"],
        "same_without_cache": after["same_without_cache"],
    }
    for name, value in figures.items():
        print(f"{name}: {value}")
    if a.json:
        record = {"wrong": wrong, "figures": figures, "runs": records, "after": after}
        Path(a.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
