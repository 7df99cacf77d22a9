"""Warm-ups of batch and length: formulas, counts, what DeepSpeed makes of them, exact resuming."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from lm.common.errors import ConfigError
from lm.common.ranks import Ranks
from lm.config.load import load
from lm.config.schema import check_warmup
from lm.config.warmups import Growth
from lm.data.batches import loader
from lm.data.corpus.tokenizer import load_tokenizer
from lm.report.plan import plan
from lm.runs.checkpoint import CheckpointError, read_state
from lm.runs.run_dir import RunDir
from lm.training.build import build_model, vocabulary
from lm.training.preflight import check_config
from lm.training.reshard import consolidated
from lm.training.resume import check_batch, identity
from lm.training.train import RANK_FILE
from tests.lm.training.test_train import trace
from tests.running import ROOT, printed_by_ranks, run

CASES = [
    # start, whole, updates of the batch; start, whole, updates of the length
    (2, 8, 5, 4, 16, 5),
    (4, 64, 100, 16, 256, 70),
    (1, 7, 3, 5, 30, 2),
    (8, 16, 1, 16, 96, 120),
    (1, 6, 2, 1, 12, 1),
]


def growth(tiny, start, whole, updates, short, seq_len, until):
    return Growth(
        tiny(
            "train.grad_accum_steps=null", "train.micro_batch_size=1", "train.steps=200",
            f"train.global_batch_size={whole}", f"data.seq_len={seq_len}",
            f"train.batch_warmup={{start: {start}, updates: {updates}}}",
            f"train.length_warmup={{start: {short}, updates: {until}}}",
        ), 1,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_update_is_the_formulas(tiny, case):
    g = growth(tiny, *case)
    start, whole, updates, short, seq_len, until = case
    batches, lengths = [], []
    for t in range(1, 201):
        grown = start * (1 + (whole // start - 1) * (t - 1) // updates)
        batches.append(grown if t <= updates else whole)
        limit = short + (seq_len - short) * (t - 1) / until
        divisors = [n for n in range(1, seq_len + 1) if seq_len % n == 0 and n <= limit]
        lengths.append(divisors[-1] if t <= until else seq_len)
    assert [g.sequences(t) for t in range(1, 201)] == batches
    assert [g.length(t) for t in range(1, 201)] == lengths
    assert g.lengths == sorted(set(lengths))
    for count in (0, 1, 3, 50, 200):
        assert g.tokens_until(count) == sum(batches[:count]) * seq_len
        by_length = Counter()
        for sequences, length in zip(batches[:count], lengths[:count]):
            by_length[length] += sequences * seq_len
        assert {n: c for n, c in g.tokens_by_length(count).items() if c} == by_length


def test_cut_rows_keep_every_token_and_target(tiny):
    g = growth(tiny, *CASES[0])
    tokens = torch.arange(34)
    rows = torch.stack([tokens[:16], tokens[16:32]]), torch.stack([tokens[1:17], tokens[17:33]])
    (cut,) = g.cut([dict(zip(("input_ids", "labels"), rows))], 3)
    assert cut["input_ids"].shape == cut["labels"].shape == (4, 8)
    assert cut["input_ids"].flatten().tolist() == list(range(32))
    assert torch.equal(cut["labels"], cut["input_ids"] + 1)
    whole = [{"input_ids": rows[0]}]
    assert g.cut(whole, 6) is whole


BATCH = ("train.global_batch_size=8", "train.grad_accum_steps=null")


@pytest.mark.parametrize(
    "overrides, words",
    [
        (("train.batch_warmup={start: 2, updates: 4}",), "which is not set: set it"),
        ((*BATCH, "train.batch_warmup={start: 3, updates: 4}"), "starts at 3 .* must divide"),
        ((*BATCH, "train.batch_warmup={start: 8, updates: 4}"), "divide global_batch_size 8, and"),
        ((*BATCH, "train.batch_warmup={start: 0, updates: 4}"), r"batch_warmup.start` is 0"),
        ((*BATCH, "train.batch_warmup={start: 2}"), r"`train.batch_warmup.updates` is missing"),
        ((*BATCH, "train.batch_warmup={start: 2, update: 4}"), "did you mean .*updates"),
        ((*BATCH, "train.batch_warmup={start: 2, updates: 8}"), "takes 8 updates, and .* only 8"),
        ((*BATCH, "train.batch_warmup={start: 1, updates: 4}"), "starts at 1 .* × 1 rank = 2"),
        (("train.length_warmup={start: 5, updates: 4}",), "must divide data.seq_len 16"),
        (("train.length_warmup={start: 16, updates: 4}",), "and be below it"),
        (("train.length_warmup={start: 4, updates: 9}",), "train.length_warmup takes 9 updates"),
        (
            (
                *BATCH, "train.batch_warmup={start: 2, updates: 4}",
                "engine.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}",
            ),
            "offload_optimizer, under which updates of",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tiny, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_config(tiny(*overrides), 1)


def test_the_plan_counts_what_is_seen(tiny):
    both = (
        "model=transformer", *BATCH, "train.batch_warmup={start: 2, updates: 5}",
        "train.length_warmup={start: 4, updates: 5}",
    )  # fmt: skip
    check_warmup(tiny(*both))
    found, plain = plan(tiny(*both), 1), plan(tiny("model=transformer", *BATCH), 1)
    # 2, 2, 4, 4, 6 and three times 8 sequences; 4, 4, 8, 8, 8 and three times 16 tokens long.
    by_length = {4: 4 * 16, 8: 14 * 16, 16: 24 * 16}
    assert found["tokens"] == sum(by_length.values()) and plain["tokens"] == 64 * 16
    scores = 6 * 16 * 2  # FLOPs of attention, a token and a token looked at: 6 · d_model · n_layer
    rest = plain["flops"] / plain["tokens"] - scores * 16
    in_all = sum(count * (rest + scores * length) for length, count in by_length.items())
    assert found["flops"] == pytest.approx(in_all)
    assert [name for name, _ in found["warmups"]] == ["batch warm-up", "length warm-up"]
    assert plain["warmups"] == [] and found["memory"].total >= plain["memory"].total


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_updates_of_growing_batches_are_those_of_plain_torch(processes):
    for stage, (found, expected) in printed_by_ranks("tests.oracle_warmups", processes).items():
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-4), stage


RUN = (*BATCH, "train.batch_warmup={start: 2, updates: 5}", "checkpoint.every=1",
       "train.length_warmup={start: 4, updates: 5}", "checkpoint.keep=9")  # fmt: skip
SEEN = [(2, 4), (2, 4), (4, 8), (4, 8), (6, 8), (8, 16), (8, 16), (8, 16)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("warmups")
    records, done = run(out, *RUN)
    assert "batch warm-up: from 2 to 8 sequences an update over the first 5" in done.stdout
    return out / "tiny", records


def test_a_run_counts_its_tokens_and_resumes_in_the_middle_to_the_bit(whole, tmp_path):
    run_dir, records = whole
    assert [(r["batch_size"], r["length"]) for r in records] == SEEN
    seen = [16 * sum(size for size, _ in SEEN[: n + 1]) for n in range(8)]
    assert [r["tokens"] for r in records] == seen
    assert json.loads((run_dir / "result.json").read_text())["tokens"] == seen[-1]
    again, _ = run(tmp_path, *RUN, f"resume={run_dir / 'checkpoints/step-000003'}")
    assert trace(again) == trace(records[3:])
    assert [r["tokens"] for r in again] == seen[3:]


@pytest.mark.parametrize("done", [2, 5])
def test_an_update_sees_the_next_sequences_cut_to_its_length(whole, done):
    """Its loss from the checkpoint before it, by one pass over its rows."""
    run_dir, records = whole
    path = run_dir / f"checkpoints/step-{done:06d}"
    cfg = load(run_dir / "config.yaml", [f"data.path={ROOT / 'tests/data/tiny.jsonl'}"])
    tokenizer = load_tokenizer(cfg, run_dir)
    size, length = SEEN[done]
    batches, _ = loader.build(cfg, tokenizer, run_dir)
    batches.load_state_dict(read_state(path / RANK_FILE.format(0))["loader"])
    rows = [next(batches) for _ in range(size // 2)]
    ids, labels = (
        torch.cat([row[name] for row in rows]).view(-1, length) for name in ("input_ids", "labels")
    )
    model = build_model(cfg, vocabulary(cfg, len(tokenizer)), tokenizer.eos_token_id).train()
    model.load_state_dict(consolidated(path))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
    assert loss.item() == pytest.approx(records[done]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_on_two_ranks(whole, tmp_path):
    run_dir, records = whole
    checkpoint = run_dir / "checkpoints/step-000003"
    settings = (*RUN, "train.micro_batch_size=1", f"resume={checkpoint}")
    again, _ = run(tmp_path, *settings, processes=2)
    assert [r["tokens"] for r in again] == [r["tokens"] for r in records[3:]]
    assert [r["loss"] for r in again] == pytest.approx([r["loss"] for r in records[3:]], abs=1e-4)


def test_a_checkpoint_of_another_batch_warmup_is_refused(tiny):
    grown = tiny(*BATCH, "train.batch_warmup={start: 2, updates: 5}")
    plain = tiny(*BATCH)
    of_grown, of_plain = identity(grown, 1), identity(plain, 1)
    check_batch(Path("x"), of_grown, of_grown, None, None)
    check_batch(Path("x"), {"global_batch_size": 8}, of_plain, None, None)  # of an older version
    for manifest, now in [(of_grown, of_plain), (of_plain, of_grown)]:
        with pytest.raises(CheckpointError, match=r"train\.batch_warmup="):
            check_batch(Path("x"), manifest, now, None, None)


def test_a_checkpoint_of_0_1_in_a_directory_that_has_lost_its_config(tiny, tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text(tiny(*BATCH).to_yaml())  # as the run that goes on there has written it
    manifest, path = {"world_size": 1}, run.checkpoints / "step-000003"
    check_batch(path, manifest, identity(tiny(*BATCH), 1), run, Ranks())
    with pytest.raises(CheckpointError, match="with 8 sequences an update, this run has 4"):
        check_batch(path, manifest, {"batch_warmup": None, "global_batch_size": 4}, run, Ranks())
