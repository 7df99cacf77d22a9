"""Tests of mixtures: shares, the order on any ranks, resuming, curricula, validation, errors."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.data import Data
from lm.data.batches.loader import build, single_source_loader
from lm.data.batches.mixture_loader import (
    STRATUM,
    MixtureLoader,
    ShuffledBlocks,
    Stage,
    draw_sources,
    skip_data,
)
from lm.data.batches.packing import IGNORE
from lm.data.batches.stream import StreamLoader
from lm.data.corpus.corpora import open_sources, prepare_config, prepare_sources
from lm.data.corpus.tokenizer import training_texts
from lm.data.sources.errors import DataError
from lm.data.sources.mixture import configs_by_source, source_shares, tokenizer_bytes
from lm.data.sources.open import is_validation
from lm.report.plan import _model_rows, make_table, plan
from lm.training.validation import pool_scores
from tests.lm.report.test_plan import LM
from tests.refusals import refused

LENGTH = 4
# 10, 23 and 6 blocks; the last block is padded in b and c.
TOKEN_COUNTS = {"a": 41, "b": 90, "c": 23}
# First token id of each source: token id // 1000 identifies the source.
FIRST_IDS = {"a": 0, "b": 1000, "c": 2000}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
# Sources of the sequences from 250 on, as earlier versions drew them with seed 3.
OLD_SOURCES = [0, 0, 1, 2, 0, 1, 0, 2, 0, 0, 1, 1, 2, 0, 1, 2]


def make_loader(size=3, rank=0, world_size=1, seed=7, weights=None, token_counts=None, stages=()):
    sources = {}
    for index, (name, count) in enumerate((token_counts or TOKEN_COUNTS).items()):
        tokens = FIRST_IDS[name] + np.arange(count)
        sources[name] = ShuffledBlocks(tokens, LENGTH, seed, index)
    return MixtureLoader(sources, weights or WEIGHTS, size, seed, rank, world_size, stages)


def draw_with(first, count, seed, weights, *stages) -> np.ndarray:
    """Draw the sources of sequences by `stages`, and by `weights` after the stages."""
    return draw_sources(first, count, seed, [*stages, Stage(-1, weights)])


def label_rows(batches) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["labels"]]


def take(batches, count) -> list[list[int]]:
    return label_rows(itertools.islice(batches, count))


def find_source(row: list[int]) -> str:
    return "abc"[row[0] // 1000]


def test_every_source_has_its_share_and_its_own_epochs():
    batches = make_loader()
    drawn = take(batches, 400)
    count = Counter(map(find_source, drawn))
    for name, weight in WEIGHTS.items():
        # In every stratum a source has its share to within two sequences.
        assert abs(count[name] - 1200 * weight) <= 2 * math.ceil(1200 / STRATUM), name
        source_rows = [row for row in drawn if find_source(row) == name]
        blocks = math.ceil((TOKEN_COUNTS[name] - 1) / LENGTH)
        all_tokens = list(range(FIRST_IDS[name] + 1, FIRST_IDS[name] + TOKEN_COUNTS[name]))
        for epoch in range(len(source_rows) // blocks):
            epoch_rows = source_rows[epoch * blocks : (epoch + 1) * blocks]
            assert sorted(t for row in epoch_rows for t in row if t != IGNORE) == all_tokens, name
        first_epoch, second_epoch = source_rows[:blocks], source_rows[blocks : 2 * blocks]
        assert first_epoch != second_epoch
        epochs = batches.source_metrics()["data_epochs"][name]
        assert epochs == pytest.approx(len(source_rows) / blocks, abs=1e-4)
    for name, share in batches.source_metrics()["data_share"].items():
        assert share == pytest.approx(count[name] / 1200, abs=1e-6)


# (micro-batch size, number of ranks) before and after resuming.
@pytest.mark.parametrize("old, new", [((3, 1), (3, 2)), ((3, 2), (1, 3)), ((2, 3), (6, 1))])
def test_resume_is_exact_on_other_ranks_and_batch_sizes(old, new):
    expected = take(make_loader(size=1), 1500)
    for count in (0, 1, 42, 90):
        size, world_size = old
        ranks = [make_loader(size, r, world_size) for r in range(world_size)]
        for _ in range(count):
            for rank in ranks:
                next(rank)
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        size, world_size = new
        ranks = [make_loader(size, r, world_size) for r in range(world_size)]
        for rank in ranks:
            rank.load_state_dict(state)
        resumed = [row for _ in range(60) for rank in ranks for row in take(rank, 1)]
        start = count * old[0] * old[1]
        assert resumed == expected[start : start + len(resumed)]


def test_sources_depend_only_on_seed_and_index():
    weights = [0.5, 0.3, 0.2]
    sources = draw_with(0, 2000, 3, weights)
    indices = [0, 255, 256, 1999]
    assert [draw_with(i, 1, 3, weights)[0] for i in indices] == sources[indices].tolist()
    assert np.array_equal(draw_with(700, 900, 3, weights), sources[700:1600])
    assert not np.array_equal(draw_with(0, 2000, 4, weights), sources)
    # The successors of source 0 have the same shares, so there is no pattern.
    successors = sources[1:][sources[:-1] == 0]
    assert np.bincount(successors) / len(successors) == pytest.approx(weights, abs=0.06)
    assert set(draw_with(0, 3000, 0, [0.0, 1.0, 0.0])) == {1}
    # A share of 1/256 is exactly one sequence in every stratum of 256.
    strata = draw_with(0, 20 * STRATUM, 5, [1 / 256, 0.5, 127 / 256]).reshape(20, STRATUM)
    assert [np.bincount(stratum).tolist() for stratum in strata] == [[1, 128, 127]] * 20
    # Runs of earlier versions continue with the same sources.
    assert draw_with(250, 16, 3, weights).tolist() == OLD_SOURCES


STAGES = [(300, {"a": 1.0}), (720, {"b": 3.0, "c": 1.0})]


def test_curriculum_draws_by_the_weights_of_its_stages():
    sources = [find_source(row) for row in take(make_loader(stages=STAGES), 500)]
    assert set(sources[:300]) == {"a"}
    second_stage, rest = Counter(sources[300:720]), Counter(sources[720:])
    assert set(second_stage) == {"b", "c"} and abs(second_stage["b"] / 420 - 0.75) < 0.03
    for name, weight in WEIGHTS.items():
        assert abs(rest[name] / 780 - weight) < 0.03
    # Stages do not change the sources after them.
    assert np.array_equal(
        draw_with(10, 990, 3, [0.5, 0.5], Stage(10, [1.0, 0.0])), draw_with(10, 990, 3, [0.5, 0.5])
    )


def test_curriculum_resumes_on_other_ranks_if_unchanged():
    expected = take(make_loader(size=1, stages=STAGES), 1200)
    old = make_loader(size=3, stages=STAGES)
    for _ in range(85):  # 255 sequences
        next(old)
    state = json.loads(json.dumps(old.state_dict()))
    ranks = [make_loader(1, rank, 3, stages=STAGES) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = [row for _ in range(200) for rank in ranks for row in take(rank, 1)]
    assert resumed == expected[255 : 255 + 200 * 3]
    for other in ((), STAGES[:1], [(301, {"a": 1.0}), STAGES[1]]):
        with pytest.raises(DataError, match=r"has data\.curriculum \["):
            make_loader(3, stages=other).load_state_dict(state)


def test_ended_stage_stays_ended_after_a_resume():
    batches = make_loader(3, stages=STAGES)
    drawn = take(batches, 40)
    assert batches.stage == 0
    batches.end_stage()
    assert batches.stage == 1
    all_rows = drawn + take(batches, 360)
    assert {find_source(row) for row in all_rows[:120]} == {"a"}
    assert {find_source(row) for row in all_rows[120:720]} == {"b", "c"}
    # The rest equals a run whose first stage is configured to end at sequence 120 = 40 · 3.
    assert all_rows == take(make_loader(3, stages=[(120, STAGES[0][1]), STAGES[1]]), 400)
    assert batches.stage == 2  # the last stage ends at 720
    interrupted = make_loader(3, stages=STAGES)
    drawn = take(interrupted, 40)
    interrupted.end_stage()
    drawn += take(interrupted, 10)
    state = json.loads(json.dumps(interrupted.state_dict()))
    ranks = [make_loader(1, rank, 3, stages=STAGES) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [rank.stage for rank in ranks] == [1, 1, 1]
    assert [row for _ in range(100) for rank in ranks for row in take(rank, 1)] == all_rows[150:450]


def test_skipped_data_shortens_no_stage():
    batches = make_loader(3, stages=STAGES)
    take(batches, 20)
    batches.end_stage()
    take(batches, 10)
    state = batches.state_dict()  # at sequence 90; stage 1 ends at 720
    take(batches, 5)
    batches.end_stage()
    take(batches, 5)
    later_state = batches.state_dict()
    batches.load_state_dict(skip_data(state, later_state))
    assert batches.stage == 1
    in_stage_1 = take(batches, (720 - 90) // 3)
    assert {find_source(row) for row in in_stage_1} == {"b", "c"} and batches.stage == 2
    assert batches.state_dict()["next_global_micro_batch"] == 40 + 210
    single_source = {"next_global_micro_batch": 4, "micro_batch_size": 3}
    assert skip_data(single_source, single_source) == single_source


def test_sources_of_equal_size_have_different_orders():
    batches = make_loader(token_counts={"a": 81, "b": 81}, weights={"a": 0.5, "b": 0.5})
    orders = {"a": [], "b": []}
    for row in take(batches, 30):
        orders[find_source(row)].append(row[0] % 1000)
    assert sorted(orders["a"][:20]) == sorted(orders["b"][:20])
    assert orders["a"][:20] != orders["b"][:20]


def test_state_of_another_mixture_is_refused():
    state = make_loader().state_dict()
    with pytest.raises(DataError, match=r"data.mixture.b: weight 0.3, this run has 0.4"):
        make_loader(weights=WEIGHTS | {"b": 0.4}).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.mixture.b: blocks 23, this run has 24"):
        make_loader(token_counts=TOKEN_COUNTS | {"b": 94}).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.mixture.c: weight 0.2, this run has None"):
        make_loader(token_counts={"a": 41, "b": 90}).load_state_dict(state)
    with pytest.raises(DataError, match="seed 7, this run has 8"):
        make_loader(seed=8).load_state_dict(state)
    single = single_source_loader(np.arange(50), LENGTH, micro_batch_size=3)
    with pytest.raises(DataError, match="belongs to another kind of data"):
        single.load_state_dict(state)
    with pytest.raises(DataError, match="belongs to another kind of data"):
        make_loader().load_state_dict(single.state_dict())
    stream = StreamLoader(Data(streams=1), None, 3)
    for other in (state, single.state_dict()):
        with pytest.raises(DataError, match="belongs to prepared data, and this run streams"):
            stream.load_state_dict(other)


def test_shares_are_normalized_weights():
    mixture = {"b": {"source": "builtin", "weight": 3}, "a": {"source": "builtin", "weight": 1}}
    assert source_shares(config.build({"data": {"mixture": mixture}}).data) == {
        "a": 0.25,
        "b": 0.75,
    }
    assert source_shares(Data()) == {"": 1.0}


def test_validation_mean_is_weighted_by_shares():
    sources = {
        "a": {"loss": 2.0, "perplexity": 0, "tokens": 900, "bytes": 1800},
        "b": {"loss": 4.0, "perplexity": 0, "tokens": 100, "bytes": 600},
    }
    scores = pool_scores(sources, {"a": 0.25, "b": 0.75})
    assert (scores["loss"], scores["tokens"], scores["sources"]) == (3.5, 1000, sources)
    assert scores["perplexity"] == pytest.approx(math.exp(3.5))
    # A token of the mixture has 0.25 · 2 + 0.75 · 6 = 5 bytes on average.
    assert scores["bits_per_byte"] == pytest.approx(3.5 / math.log(2) / 5)
    assert scores["bytes"] == 2400
    unknown = sources | {"b": sources["b"] | {"bytes": None}}
    assert pool_scores(unknown, {"a": 0.25, "b": 0.75})["bits_per_byte"] is None
    assert pool_scores({"": sources["a"]}, {"": 1.0}) == sources["a"]


WEB = {"source": "text", "path": "x.txt", "weight": 1}
WEB_STAGE = {"until": 9, "weights": {"web": 1}}
REFUSED = [
    ({"mixture": {"web": WEB | {"weight": 0}}}, "`data.mixture` (web) sum to 0"),
    ({"mixture": {"web": WEB | {"weight": -1}}}, "`data.mixture.web.weight` is -1"),
    ({"mixture": {"web": {"source": "builtin"}}}, "`data.mixture.web.weight` is missing"),
    ({"mixture": {"web": {"weight": 1}}}, "`data.mixture.web.source` is missing"),
    ({"mixture": {"web": WEB | {"source": "webb"}}}, "`data.mixture.web.source` is 'webb'"),
    ({"mixture": {"web": WEB | {"source": "fineweb"}}}, "`data.mixture.web.source`: a stream"),
    ({"mixture": {"web": WEB | {"path": None}}}, "source `text` needs `path`"),
    ({"mixture": {"web": WEB | {"source": "builtin"}}}, "`builtin` has no `path`"),
    ({"mixture": {"web": WEB | {"wieght": 2}}}, "did you mean `data.mixture.web.weight`?"),
    ({"mixture": {"../web": WEB}}, "must match pattern"),
    ({"mixture": {2023: WEB}}, "`data.mixture[2023]` is"),
    ({"mixture": [WEB]}, "it must be a valid dictionary"),
    ({"mixture": {}}, "must have at least 1 item"),
    ({"mixture": {"web": WEB}, "source": "jsonl", "path": "y"}, "`data.source` describes a single"),
    ({"mixture": {"web": WEB}, "text_field": "y"}, "`data.text_field` describes a single"),
    ({"temperature": 2}, "`data.temperature` is 2, but the key was removed"),
    (
        {"mixture": {"web": WEB}, "curriculum": [WEB_STAGE | {"min_answer_prob": 0.9}]},
        "`data.curriculum.0.min_answer_prob` waits for the answers of its traces, and none of its",
    ),
    ({"curriculum": [WEB_STAGE]}, "`data.curriculum` changes the weights of `data.mixture`"),
    (
        {"mixture": {"code": WEB}, "curriculum": [WEB_STAGE]},
        "`data.curriculum.0` has a weight for web",
    ),
    (
        {"mixture": {"web": WEB}, "curriculum": [WEB_STAGE, WEB_STAGE]},
        "`data.curriculum.1` ends at update 9",
    ),
    ({"mixture": {"web": WEB}, "curriculum": [{"until": 9, "weights": {"web": 0}}]}, "sum to 0"),
    ({"mixture": {"web": WEB}, "curriculum": [{"until": 0, "weights": {"web": 1}}]}, "until"),
]


@pytest.mark.parametrize("data, message", REFUSED)
def test_invalid_mixture_is_refused_by_key(data, message):
    with pytest.raises(ConfigError) as error:
        config.build({"data": data})
    assert message in str(error.value)


def test_overrides_and_sweeps_set_keys_of_a_mixture():
    tree = {"name": "x", "data": {"mixture": {"web": WEB, "code": WEB}}}
    config.set_overrides(tree, ["data.mixture.web.weight=3"])
    assert config.build(tree).data.mixture["web"].weight == 3
    tree["sweep"] = {"data.mixture.web.weight": [0.3, 0.5]}
    points = config.sweep_points(tree)
    assert config.point_name("x", 1, points[1]) == "x/001-weight=0.5"
    with pytest.raises(ConfigError, match=r"did you mean `data.mixture.web.weight`"):
        config.set_overrides(tree, ["data.mixture.web.wait=3"])
    other = {"data": {"mixture": {"web": WEB}}}
    config.set_overrides(other, ["data.mixture.wbe.weight=3"])
    with pytest.raises(ConfigError, match=r"`data.mixture.wbe.source` is missing"):
        config.build(other)


@pytest.fixture
def mixture_cfg(cfg, texts, tmp_path):
    """Config of a mixture: the usual documents, and twenty others under another key."""
    other = tmp_path / "other.jsonl"
    bodies = [f"{text[::-1]} {i} backwards" for i, text in enumerate(texts[:20])]
    lines = [json.dumps({"body": body}) for body in bodies]
    other.write_text("\n".join(lines), encoding="utf-8")
    tree = cfg.model_dump()
    path = tree["data"]["path"]
    tree["data"] |= {"source": "builtin", "path": None, "cache_dir": str(tmp_path / "cache")}
    tree["data"]["mixture"] = {
        "own": {"source": "jsonl", "path": path, "weight": 3},
        "back": {"source": "jsonl", "path": str(other), "text_field": "body", "weight": 1},
    }
    return config.build(tree)


def test_sources_are_prepared_and_validated_separately(mixture_cfg, bpe):
    corpora = prepare_sources(mixture_cfg, bpe, mixture_cfg.run_dir)
    assert list(corpora) == ["back", "own"]
    for name, source_cfg in configs_by_source(mixture_cfg).items():
        source_cfg.name = f"single-{name}"
        single = prepare_sources(source_cfg, bpe, source_cfg.run_dir)[""]
        assert np.array_equal(single.train[:], corpora[name].train[:]) and len(single.train)
        corpus = open_sources(mixture_cfg, mixture_cfg.run_dir)[name]
        assert np.array_equal(corpus.val[:], single.val[:])
    assert corpora["own"].meta.documents == 200 and corpora["back"].meta.documents == 20
    train, validation = build(mixture_cfg, bpe, mixture_cfg.run_dir)
    assert train.shares == {"back": 0.25, "own": 0.75}
    for name, corpus in corpora.items():
        labels = [t for batch in validation[name] for t in batch["labels"].flatten().tolist()]
        assert [t for t in labels if t != IGNORE] == corpus.val[1:].tolist()
    # The first five tokens of a sequence show its source: three quarters are from "own".
    drawn = {tuple(row[:5]) for row in take(train, 60)}
    tokens = corpora["own"].train[:].astype(int)
    windows = set(map(tuple, np.lib.stride_tricks.sliding_window_view(tokens, 5).tolist()))
    assert 0.6 < sum(row in windows for row in drawn) / len(drawn) <= 1


def test_tokenizer_reads_each_source_by_its_weight(mixture_cfg):
    mixture_cfg.tokenizer.train_bytes = 1000
    assert tokenizer_bytes(mixture_cfg) == {"back": 250, "own": 750}
    texts = list(training_texts(mixture_cfg))
    back_size = sum(len(text) for text in texts if text.endswith("backwards"))
    # The last document of a source may exceed its bytes.
    assert 250 <= back_size < 400 and 750 <= sum(map(len, texts)) - back_size < 1100
    assert not any(is_validation(text, mixture_cfg.data.val_fraction) for text in texts)
    mixture_cfg.data.mixture["back"].weight = 0
    assert not any(t.endswith("backwards") for t in training_texts(mixture_cfg))


def test_errors_of_a_source_name_its_key(mixture_cfg, bpe, capsys):
    mixture_cfg.data.mixture["back"].text_field = "text"
    with pytest.raises(DataError, match=r"no key `text`.*set data.mixture.back.text_field"):
        prepare_sources(mixture_cfg, bpe, mixture_cfg.run_dir)
    mixture_cfg.data.mixture["back"].path = "none.jsonl"
    with pytest.raises(DataError, match=r"^data.mixture.back.path none.jsonl: no such file"):
        prepare_sources(mixture_cfg, bpe, mixture_cfg.run_dir)
    message = refused(capsys, "plan", LM / "mixture.yaml", "data.mixture.prose.path=none.jsonl")
    assert message.startswith("data.mixture.prose.path none.jsonl: no such file")


def test_mixture_is_planned_and_prepared_ahead(mixture_cfg, capsys):
    mixture_cfg.model.d_model, mixture_cfg.model.n_layer, mixture_cfg.train.steps = 16, 1, 30
    columns = make_table(plan(mixture_cfg, 1), mixture_cfg).columns
    plan_rows = dict(zip(*(list(column.cells) for column in columns)))
    assert plan_rows["source own"] == "75.00% of the sequences"
    text = prepare_config(mixture_cfg)
    assert "source   back: 25.00%" in text and "corpus   20 documents" in text


def test_shipped_mixture_is_planned():
    cfg = config.load(LM / "mixture.yaml")
    cfg.optim.lr_factors = {"*.A_log": 0.5}
    rows = [name for name, _ in _model_rows(plan(cfg, 1), cfg)]
    assert rows[-3:] == ["source prose", "source python", "optimizer"]


def test_single_source_keeps_its_permutations():
    """Runs of earlier versions continue with permutations drawn from (seed, epoch)."""
    loader = single_source_loader(np.arange(101), seq_len=1, micro_batch_size=10, seed=5)
    order = [row[0] - 1 for row in take(loader, 20)]
    expected = [np.random.default_rng([5, epoch]).permutation(100) for epoch in (0, 1)]
    assert order == np.concatenate(expected).tolist()
    batch = next(single_source_loader(np.arange(9), seq_len=4, micro_batch_size=2))
    assert torch.equal(batch["input_ids"][:, 1:] + 1, batch["labels"][:, 1:])
