"""Greedy decoding at batch 1 and 32: with the cache and without, plain, the paper's, Mamba.

python benchmarks/decode.py [--shape small --prompt 64 --new 64 --threads 1,2 --json FILE]

Random weights: the counts of iterations are those of a model that has learnt nothing. It has
several fixed points, and all tokens at once find others than one by one, as decoding does;
`--unique` makes the iteration contract, so that there is one, and then the tokens must agree.
Rows without a cache solve the whole text again for every token; they make a sixteenth as many. Ours
solves to 0.01, as in evaluation, the paper's procedure to 0.1.
"""

import functools

import contenders
import torch
from common import (
    Cost,
    ceilings,
    iteration_seconds,
    ms,
    parse,
    parser,
    ratio,
    share,
    shortest,
    show,
    thread_counts,
    title,
    wanted,
    write_json,
)
from common import numbers as number_list

CACHED, UNCACHED, MAMBA = "ours", "ours, without cache", "transformers' Mamba"


def models(a):
    """(ours, transformers' Mamba): the same widths, random weights."""
    unique = dict(contractive=0.3, out_norm_epsilon=1.0) if a.unique else {}
    made = contenders.ours(a.shape, use_short_conv=True, schedule=a.schedule, **unique)
    return made.to(a.device).eval(), contenders.their_mamba(a.shape).to(a.device).eval()


def autocast(a):
    return torch.autocast(a.device.type, torch.bfloat16, enabled=a.shape.dtype == "bf16")


def agreement(model, text, prompt):
    """On one text, solved at once and decoded after `prompt` tokens: mean iterations of a token in
    each, the share of equal most likely tokens, and the largest difference of logits relative to
    their spread."""
    whole = model(text)
    outs = [model(text[:, :prompt], use_cache=True)]
    cache = outs[0].past_key_values
    outs += [model(token, past_key_values=cache) for token in text[:, prompt:].split(1, 1)]
    decoded, logits = torch.cat([o.logits for o in outs[1:]], 1), whole.logits[:, prompt:]
    return dict(
        iterations_at_once=whole.fixed_point.token_iters.double().mean().item(),
        iterations_decoding=sum(o.fixed_point.token_iters.double().mean().item() for o in outs[1:])
        / len(outs[1:]),
        same_tokens=(decoded.argmax(-1) == logits.argmax(-1)).double().mean().item(),
        difference=((decoded - logits).abs().max() / logits.std()).item(),
    )


def generate(a, model, prompt, new, use_cache, options=None):
    """The new tokens. options: of contenders.running, None for a model that does not iterate."""

    def run():
        with autocast(a):
            return model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new,
                do_sample=False, use_cache=use_cache,
            )[:, prompt.shape[1] :]  # fmt: skip

    if options is None:
        return run()
    with contenders.running(model, **options):
        return run()


def bound(a, model, batch, iterations, limits):
    """The least time of one token of `batch` texts: the iterations, in each of which the scan also
    reads and writes its state, and once everything else's weights."""
    s, blocks = a.shape, contenders.blocks(model)
    state = Cost(bytes=8 * batch * 2 * s.d_model * s.d_state).seconds(limits)
    once = sum(block.flops_per_token()[0] for block in blocks) + 2 * model.lm_head.weight.numel()
    size = 2 if s.dtype == "bf16" else 4
    rest = Cost(bytes=size * once / 2, gemm=batch * once).seconds(limits)
    return s.layers * iterations * (iteration_seconds(s, batch, limits) + state) + rest


def measure(a, ours, mamba, batch, limits):
    """Rows for this batch, and what `agreement` says."""
    prompt = torch.randint(a.shape.vocab, (batch, a.prompt)).to(a.device)
    few, mixed = max(2, a.new // 16), dict(schedule=a.schedule)
    variants = {
        CACHED: (ours, a.new, True, mixed),
        "ours, plain": (ours, a.new, True, dict(mixed, kernel="plain")),
        UNCACHED: (ours, few, False, mixed),
        "paper's procedure": (ours, few, False, dict(stopping="paper", scan="plain")),
        MAMBA: (mamba, a.new, True, None),
    }
    variants = wanted(a, variants)
    functions = {
        name: functools.partial(generate, a, model, prompt, new, use_cache, options)
        for name, (model, new, use_cache, options) in variants.items()
    }
    seconds, tokens = shortest(functions, a, most=40.0)
    agree = {}
    if CACHED in tokens:
        with contenders.running(ours, **mixed), autocast(a):
            agree = agreement(ours, torch.cat([prompt, tokens[CACHED]], 1), a.prompt)
    rows = []
    for name, (_, new, *_) in variants.items():
        taken = seconds[name] and seconds[name] / new
        row = dict(batch=batch, name=name, seconds_per_token=taken, new=new)
        row["tokens_per_second"] = taken and batch / taken
        if name == CACHED and agree:
            row |= agree | dict(
                bound=bound(a, ours, batch, agree["iterations_decoding"], limits)
            )  # fmt: skip
        rows.append(row)
    return rows, agree


@torch.no_grad()
def main():
    p = parser(__doc__, repeats=3)
    p.add_argument("--schedule", default="mixed", help="of the model (default: the config's)")
    p.add_argument("--unique", action="store_true", help="a model with one fixed point")
    p.add_argument("--prompt", type=int, default=64)
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--batches", type=number_list, default=[1, 32])
    a = parse(p)
    everything, measured, (ours, mamba) = [], {}, models(a)
    for count, threads in thread_counts(a):
        limits = ceilings(a)
        measured[count] = limits._asdict()
        print(f"{title(a, limits, threads)}\nprompt {a.prompt}, {a.new} new tokens")
        for batch in a.batches:
            rows, agree = measure(a, ours, mamba, batch, limits)
            everything += [dict(row, threads=count) for row in rows]
            base = {row["name"]: row["seconds_per_token"] for row in rows}
            cells = [
                {
                    f"batch {batch}": row["name"],
                    "tokens/s": f"{row['tokens_per_second'] or 0:,.1f}",
                    "ms a token": ms(row["seconds_per_token"]),
                    "vs without cache": ratio(base.get(UNCACHED), row["seconds_per_token"]),
                    "vs Mamba": ratio(base.get(MAMBA), row["seconds_per_token"]),
                    "of bound": share(row["bound"], row["seconds_per_token"])
                    if "bound" in row
                    else "–",
                }
                for row in rows
            ]
            words = (
                "iterations per token: {iterations_at_once:.1f} of a text at once,"
                " {iterations_decoding:.1f} decoding it; most likely tokens the same in"
                " {same_tokens:.1%}, largest difference {difference:.1e} of the logits' spread"
            )
            show(words.format(**agree) if agree else "", cells)
    write_json(a, everything, ceilings=measured)


if __name__ == "__main__":
    main()
