"""Greedy decoding at batch 1 and 32: with the cache and without, plain, the paper's, Mamba.

python -m benchmarks.decode [--shape small --prompt 64 --new 64 --threads 1,2 --json FILE]

Random weights, each token's own equation solved (token exact); the paper's procedure to 0.1. Rows
without a cache solve the whole text again for every token; they make a sixteenth as many. `a step`
is one call of the model for one token, without `generate`'s own work.
"""

import functools

import torch

from benchmarks import contenders, paper
from benchmarks.harness import (
    Cost,
    autocast,
    iteration_seconds,
    ms,
    parse,
    parser,
    ratio,
    share,
    shortest,
    show,
    title,
    wanted,
    with_each_thread_count,
)
from benchmarks.harness import numbers as number_list

CACHED, UNCACHED = "ours", "ours, without cache"
PAPER_ROW, MAMBA = "paper's procedure", "transformers' Mamba"
AGREEMENT = (
    "decoded and solved at once: most likely tokens the same in {same_tokens:.1%},"
    " largest difference {difference:.1e} of the logits' spread"
)


def models(a):
    """(ours, transformers' Mamba): the same widths, random weights."""
    made = contenders.ours(a.shape, use_short_conv=True)
    return made.to(a.device).eval(), contenders.their_mamba(a.shape).to(a.device).eval()


def agreement(model, text, prompt):
    """On one text, solved at once and decoded after `prompt` tokens: the share of equal most likely
    tokens, and the largest difference of logits relative to their spread."""
    whole = model(text)
    outs = [model(text[:, :prompt], use_cache=True)]
    cache = outs[0].past_key_values
    outs += [model(token, past_key_values=cache) for token in text[:, prompt:].split(1, 1)]
    decoded, logits = torch.cat([o.logits for o in outs[1:]], 1), whole.logits[:, prompt:]
    return dict(
        same_tokens=(decoded.argmax(-1) == logits.argmax(-1)).double().mean().item(),
        difference=((decoded - logits).abs().max() / logits.std()).item(),
    )


def one_step(a, model, prompt, options=None):
    """A function that runs the model on one token after the prompt, again and again."""
    with autocast(a):
        cache = {"past_key_values": model(prompt, use_cache=True).get("past_key_values")}
        if cache["past_key_values"] is None:  # transformers' Mamba
            cache = {"cache_params": model(prompt, use_cache=True).cache_params}
    token = prompt[:, -1:]

    def run():
        with autocast(a):
            model(token, use_cache=True, **cache)

    if options is None:
        return run

    def solved():
        with contenders.running(model, **options):
            run()

    return solved


def generate(a, model, prompt, new, use_cache, options=None):
    """The new tokens. options: of contenders.running, None for a model that does not iterate."""

    def run():
        with autocast(a):
            if isinstance(model, paper.LanguageModel):
                return model.greedy(prompt, new)
            return model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new,
                do_sample=False,
                use_cache=use_cache,
            )[:, prompt.shape[1] :]

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
    few = max(2, a.new // 16)
    exact = contenders.EXACT_FIELDS
    variants = {
        CACHED: (ours, a.new, True, None),  # as it is
        "ours, plain": (ours, a.new, True, exact | {"kernel": "plain"}),
        UNCACHED: (ours, few, False, exact),
        PAPER_ROW: (contenders.paper_model(ours), few, False, None),
        MAMBA: (mamba, a.new, True, None),
    }
    variants = wanted(a, variants)
    functions = {
        name: functools.partial(generate, a, model, prompt, new, use_cache, options)
        for name, (model, new, use_cache, options) in variants.items()
    }
    seconds, tokens = shortest(functions, a, most=40.0)
    cached = {
        name: one_step(a, model, prompt, options)
        for name, (model, _, use_cache, options) in variants.items()
        if use_cache
    }
    steps, _ = shortest(cached, a, inner=a.new)
    agree = {}
    if CACHED in tokens:
        with contenders.running(ours, **exact), autocast(a):
            agree = agreement(ours, torch.cat([prompt, tokens[CACHED]], 1), a.prompt)
    rows = []
    for name, (_, new, *_) in variants.items():
        taken = seconds[name] and seconds[name] / new
        row = dict(batch=batch, name=name, seconds_per_token=taken, new=new)
        row |= dict(tokens_per_second=taken and batch / taken, seconds_per_step=steps.get(name))
        if name == CACHED and agree:
            row |= agree | dict(bound=bound(a, ours, batch, 1, limits))
        rows.append(row)
    return rows, agree


def table(batch, rows):
    """What `show` prints."""
    base = {row["name"]: row for row in rows}
    mamba, uncached = base.get(MAMBA, {}), base.get(UNCACHED, {})
    return [
        {
            f"batch {batch}": row["name"],
            "tokens/s": f"{row['tokens_per_second'] or 0:,.1f}",
            "ms a token": ms(row["seconds_per_token"]),
            "in Mambas": ratio(row["seconds_per_token"], mamba.get("seconds_per_token")),
            "ms a step": ms(row["seconds_per_step"]) if row["seconds_per_step"] else "–",
            "step, in Mambas": ratio(row["seconds_per_step"], mamba.get("seconds_per_step")),
            "vs without cache": ratio(uncached.get("seconds_per_token"), row["seconds_per_token"]),
            "of bound": share(row["bound"], row["seconds_per_token"]) if "bound" in row else "–",
        }
        for row in rows
    ]


def shown(ours, mamba, a, limits, threads):
    """Measures every batch size, prints a table of each, and returns the rows of all."""
    print(f"{title(a, limits, threads)}\nprompt {a.prompt}, {a.new} new tokens")
    found = []
    for batch in a.batches:
        rows, agree = measure(a, ours, mamba, batch, limits)
        show(AGREEMENT.format(**agree) if agree else "", table(batch, rows))
        found += rows
    return found


@torch.no_grad()
def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--prompt", type=int, default=64)
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--batches", type=number_list, default=[1, 32])
    a = parse(p)
    with_each_thread_count(a, functools.partial(shown, *models(a)))


if __name__ == "__main__":
    main()
