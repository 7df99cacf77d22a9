"""Time greedy decoding: ours with and without cache, the paper's procedure, transformers' Mamba.

python -m benchmarks.decode [--shape small --batches 1,32 --prompt 64 --new 64 --json FILE]

Random weights. Our rows solve each token's equation exactly; the paper's procedure has tolerance
0.1. Rows without a cache solve the whole text again for every token, and generate 1/16 of the
tokens. `ms a step` is a single call of the model for one token, without the overhead of `generate`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import contenders, paper
from benchmarks.harness import (
    autocast,
    format_ms,
    format_ratio,
    make_parser,
    parse_numbers,
    parse_options,
    run,
    time_in_turns,
)

# Names of rows.
CACHED, UNCACHED = "ours, cached", "ours, without cache"
PAPER, MAMBA = "paper's procedure", "transformers' Mamba"


class Variant(NamedTuple):
    """A model and how it decodes."""

    model: torch.nn.Module
    new_tokens: int  # to generate
    use_cache: bool
    wrap: Callable[[Callable], Callable] = lambda function: function  # sets solver options


def make_step(args, model, prompt):
    """Return a function that runs the model on one token after the prompt."""
    with autocast(args):
        out = model(prompt, use_cache=True)
    if out.get("past_key_values") is None:  # transformers' Mamba
        cache = {"cache_params": out.cache_params}
    else:
        cache = {"past_key_values": out.past_key_values}
    token = prompt[:, -1:]

    def step():
        with autocast(args):
            model(token, use_cache=True, **cache)

    return step


def generate(args, model, prompt, new_tokens, use_cache):
    """Return the ids of `new_tokens` tokens after a prompt."""
    with autocast(args):
        if isinstance(model, paper.LanguageModel):
            return model.greedy(prompt, new_tokens)
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=use_cache,
        )[:, prompt.shape[1] :]


@torch.no_grad()
def measure(args):
    """Return a row for each batch size and model."""
    fpmamba = contenders.make_fpmamba(args.shape, use_short_conv=True).to(args.device).eval()
    mamba = contenders.make_transformers_mamba(args.shape).to(args.device).eval()
    few_tokens = max(2, args.new // 16)
    solve_with, exact = contenders.solve_with, contenders.EXACT_FIELDS
    variants = {
        CACHED: Variant(fpmamba, args.new, True),
        "ours, plain": Variant(fpmamba, args.new, True, solve_with(fpmamba, "plain", **exact)),
        UNCACHED: Variant(fpmamba, few_tokens, False, solve_with(fpmamba, **exact)),
        PAPER: Variant(contenders.make_paper_model(fpmamba), few_tokens, False),
        MAMBA: Variant(mamba, args.new, True),
    }
    rows = []
    for batch in args.batches:
        prompt = torch.randint(args.shape.vocab, (batch, args.prompt)).to(args.device)
        generations, steps = {}, {}
        for name, (model, new_tokens, use_cache, wrap) in variants.items():
            function = functools.partial(generate, args, model, prompt, new_tokens, use_cache)
            generations[name] = wrap(function)
            if use_cache:
                steps[name] = wrap(make_step(args, model, prompt))
        seconds, _ = time_in_turns(generations, args, max_seconds=40.0)
        step_seconds, _ = time_in_turns(steps, args, calls=args.new)
        for name, total in seconds.items():
            row = dict(batch=batch, name=name, seconds_per_step=step_seconds.get(name))
            has_time = total is not None
            row["seconds_per_token"] = total / variants[name].new_tokens if has_time else None
            rows.append(row)
    return rows


def format_rows(rows):
    row_by_name = {(row["batch"], row["name"]): row for row in rows}
    text_rows = []
    for row in rows:
        seconds, step = row["seconds_per_token"], row["seconds_per_step"]
        mamba, uncached = (row_by_name.get((row["batch"], name), {}) for name in (MAMBA, UNCACHED))
        text_rows.append(
            {
                "": f"batch {row['batch']}, {row['name']}",
                "tokens/s": f"{row['batch'] / seconds if seconds else 0:,.1f}",
                "ms a token": format_ms(seconds),
                "in Mambas": format_ratio(seconds, mamba.get("seconds_per_token")),
                "ms a step": format_ms(step) if step else "–",
                "step, in Mambas": format_ratio(step, mamba.get("seconds_per_step")),
                "vs without cache": format_ratio(uncached.get("seconds_per_token"), seconds),
            }
        )
    return text_rows


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--batches", type=parse_numbers, default=[1, 32])
    run(parse_options(parser), measure, format_rows)
