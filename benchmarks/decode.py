"""Greedy decoding at batch 1 and 32: with the cache and without, plain, the paper's, Mamba.

python -m benchmarks.decode [--shape small --prompt 64 --new 64 --threads 1,2 --json FILE]

Random weights, each token's own equation solved (token exact); the paper's procedure to 0.1. Rows
without a cache solve the whole text again for every token; they make a sixteenth as many. `a step`
is one call of the model for one token, without `generate`'s own work.
"""

import contextlib
import functools

import torch

from benchmarks import contenders, paper
from benchmarks.harness import autocast, ms, numbers, parse, parser, ratio, run, shortest

CACHED, UNCACHED = "ours", "ours, without cache"
PAPER_ROW, MAMBA = "paper's procedure", "transformers' Mamba"


def one_step(a, model, prompt):
    """Return a function that runs the model on one token after the prompt, again and again."""
    with autocast(a):
        out = model(prompt, use_cache=True)
    if out.get("past_key_values") is None:  # transformers' Mamba
        cache = {"cache_params": out.cache_params}
    else:
        cache = {"past_key_values": out.past_key_values}
    token = prompt[:, -1:]

    def step():
        with autocast(a):
            model(token, use_cache=True, **cache)

    return step


def generate(a, model, prompt, new, use_cache):
    """Return the new tokens."""
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


def with_options(function, model, options):
    """Return the function, run under options of contenders.running; None: as it is."""

    def solved():
        with contextlib.nullcontext() if options is None else contenders.running(model, **options):
            return function()

    return solved


@torch.no_grad()
def measure(a):
    """Return a row for each batch size and contestant."""
    ours = contenders.ours(a.shape, use_short_conv=True).to(a.device).eval()
    mamba = contenders.their_mamba(a.shape).to(a.device).eval()
    few, exact = max(2, a.new // 16), contenders.EXACT_FIELDS
    variants = {
        CACHED: (ours, a.new, True, None),
        "ours, plain": (ours, a.new, True, exact | {"kernel": "plain"}),
        UNCACHED: (ours, few, False, exact),
        PAPER_ROW: (contenders.paper_model(ours), few, False, None),
        MAMBA: (mamba, a.new, True, None),
    }
    rows = []
    for batch in a.batches:
        prompt = torch.randint(a.shape.vocab, (batch, a.prompt)).to(a.device)
        whole, steps = {}, {}
        for name, (model, new, use_cache, options) in variants.items():
            function = functools.partial(generate, a, model, prompt, new, use_cache)
            whole[name] = with_options(function, model, options)
            if use_cache:
                steps[name] = with_options(one_step(a, model, prompt), model, options)
        seconds, _ = shortest(whole, a, most=40.0)
        step_seconds, _ = shortest(steps, a, inner=a.new)
        for name, taken in seconds.items():
            row = dict(batch=batch, name=name, seconds_per_step=step_seconds.get(name))
            row["seconds_per_token"] = taken and taken / variants[name][1]
            rows.append(row)
    return rows


def table(rows):
    """Format rows for `show`."""
    base = {(row["batch"], row["name"]): row for row in rows}
    printed = []
    for row in rows:
        taken, step = row["seconds_per_token"], row["seconds_per_step"]
        mamba, uncached = (base.get((row["batch"], name), {}) for name in (MAMBA, UNCACHED))
        printed.append(
            {
                "": f"batch {row['batch']}, {row['name']}",
                "tokens/s": f"{row['batch'] / taken if taken else 0:,.1f}",
                "ms a token": ms(taken),
                "in Mambas": ratio(taken, mamba.get("seconds_per_token")),
                "ms a step": ms(step) if step else "–",
                "step, in Mambas": ratio(step, mamba.get("seconds_per_step")),
                "vs without cache": ratio(uncached.get("seconds_per_token"), taken),
            }
        )
    return printed


if __name__ == "__main__":
    options = parser(__doc__, repeats=3)
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--batches", type=numbers, default=[1, 32])
    run(parse(options), measure, table)
