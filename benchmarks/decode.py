"""Greedy decoding with the cache against without, and transformers' Mamba beside it, in one run.

python benchmarks/decode.py [--block fp_mamba1 --d-model 128 --layers 2 --prompt 64 --new 64]

Random weights: the counts of iterations are those of a model that has learnt nothing. It has
several fixed points, and all tokens at once find others than one by one, as decoding does;
`--unique` makes the iteration contract, so that there is one, and then the tokens must agree.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.scan import compiled

VOCAB, D_STATE = 1024, 16


def models(a):
    """(ours, transformers' Mamba): the same widths, random weights."""
    ours = FPRNNConfig(
        vocab_size=VOCAB, d_model=a.d_model, n_layer=a.layers, d_state=D_STATE, block=a.block,
        schedule=a.schedule, use_short_conv=True,
        **(dict(contractive=0.3, out_norm_epsilon=1.0) if a.unique else {}),
    )  # fmt: skip
    theirs = MambaConfig(
        vocab_size=VOCAB, hidden_size=a.d_model, num_hidden_layers=a.layers, state_size=D_STATE,
        eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return FPRNNForCausalLM(ours).eval(), MambaForCausalLM(theirs).eval()


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


def generate(model, prompt, new, use_cache):
    """Seconds and the new tokens."""
    began = time.perf_counter()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False,
        use_cache=use_cache,
    )  # fmt: skip
    return time.perf_counter() - began, tokens[:, prompt.shape[1] :]


def measure(a, ours, mamba, batch):
    """Rows for this batch: the shortest of a.repeats, all variants by turns."""
    prompt = torch.randint(VOCAB, (batch, a.prompt))
    variants = {
        "FP without cache": (ours, False),
        "FP with cache": (ours, True),
        "Mamba with cache": (mamba, True),
    }
    seconds = dict.fromkeys(variants, float("inf"))
    for model, use_cache in variants.values():
        generate(model, prompt, 2, use_cache)  # not counted
    for _ in range(a.repeats):
        for name, (model, use_cache) in variants.items():
            took, tokens = generate(model, prompt, a.new, use_cache)
            seconds[name] = min(seconds[name], took)
    base = seconds["FP without cache"]
    agree = agreement(ours, torch.cat([prompt, tokens], 1), a.prompt)
    print(
        "batch {}; iterations per token: {iterations_at_once:.1f} of a text at once,"
        " {iterations_decoding:.1f} decoding it; most likely tokens the same in {same_tokens:.1%},"
        " largest difference {difference:.1e} of the logits' spread".format(batch, **agree)
    )
    rows = []
    for name, s in seconds.items():
        rate = batch * a.new / s
        print(f"  {name:<18} {s:8.2f} s {rate:10.1f} tokens/s   {base / s:6.1f}×")
        rows.append(
            dict(batch=batch, name=name, seconds=s, tokens_per_second=rate)
            | dict(times_without_cache=base / s, **agree)
        )
    return rows


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--block", default="fp_mamba1")
    p.add_argument("--schedule", default="mixed", help="of the model (default: the config's)")
    p.add_argument("--unique", action="store_true", help="a model with one fixed point")
    for name, default in [
        ("d-model", 128), ("layers", 2), ("prompt", 64), ("new", 64), ("threads", 1),
        ("repeats", 1),
    ]:  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    p.add_argument("--json", help="also write the numbers here")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    ours, mamba = models(a)
    kernel = "compiled scan" if compiled("cpu") else "no compiled scan"
    print(
        f"{a.block}, d_model {a.d_model}, {a.layers} layers, prompt {a.prompt}, {a.new} new tokens,"
        f" {a.threads} thread(s), {kernel}; the shortest of {a.repeats}"
    )
    rows = [row for batch in a.batch for row in measure(a, ours, mamba, batch)]
    if a.json:
        Path(a.json).write_text(json.dumps({"arguments": vars(a), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
