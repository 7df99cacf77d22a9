"""Mixtures: whose sequence is whose, one order on any ranks, exact resuming, shares, refusals."""

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
from lm.data.batches.mixture_loader import STRATA, Drawing, MixtureLoader, ShuffledBlocks, Stage
from lm.data.batches.packing import IGNORE
from lm.data.batches.stream import StreamLoader
from lm.data.corpus.corpora import open_sources, prepare_config, prepare_sources
from lm.data.corpus.tokenizer import training_texts
from lm.data.sources.errors import DataError
from lm.data.sources.mixture import parts, shares, tokenizer_bytes
from lm.data.sources.open import is_validation
from lm.report.plan import _what, describe, plan
from lm.training.validation import pooled
from tests.lm.report.test_plan import LM
from tests.refusals import refused

LENGTH = 4
TOKENS = {"a": 41, "b": 90, "c": 23}  # of each source: 10 blocks, 23 (the last of 1), 6 (of 2)
FIRST = {"a": 0, "b": 1000, "c": 2000}  # its ids, so that a target says whose it is
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
GOLDEN = [0, 0, 1, 2, 0, 1, 0, 2, 0, 0, 1, 1, 2, 0, 1, 2]


def loader(size=3, rank=0, world_size=1, seed=7, weights=None, tokens=None, stages=()):
    tokens = TOKENS if tokens is None else tokens
    sources = {
        name: ShuffledBlocks(np.arange(FIRST[name], FIRST[name] + n), LENGTH, seed, number)
        for number, (name, n) in enumerate(tokens.items())
    }
    return MixtureLoader(sources, weights or WEIGHTS, size, seed, rank, world_size, stages)


def rows(batches) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["labels"]]


def take(batches, count) -> list[list[int]]:
    return rows(itertools.islice(batches, count))


def owner(row: list[int]) -> str:
    return "abc"[row[0] // 1000]


def test_every_source_goes_through_its_own_epochs_and_has_its_share():
    whole = loader()
    drawn = take(whole, 400)
    count = Counter(map(owner, drawn))
    for name, weight in WEIGHTS.items():
        # Of every 256 in a row a source has its share to two: here of 1,200 in all.
        assert abs(count[name] - 1200 * weight) <= 2 * math.ceil(1200 / STRATA), name
        own = [row for row in drawn if owner(row) == name]
        blocks = -(-(TOKENS[name] - 1) // LENGTH)
        everything = list(range(FIRST[name] + 1, FIRST[name] + TOKENS[name]))
        for epoch in range(len(own) // blocks):
            part = own[epoch * blocks : (epoch + 1) * blocks]
            assert sorted(t for row in part for t in row if t != IGNORE) == everything, name
        assert own[:blocks] != own[blocks : 2 * blocks]  # each in another order
        assert whole.drawn()["data_epochs"][name] == pytest.approx(len(own) / blocks, abs=1e-4)
    for name, share in whole.drawn()["data_share"].items():
        assert share == pytest.approx(count[name] / 1200, abs=1e-6)


@pytest.mark.parametrize("before, after", [((3, 1), (3, 2)), ((3, 2), (1, 3)), ((2, 3), (6, 1))])
def test_resume_anywhere_on_other_ranks_and_with_other_micro_batches(before, after):
    expected = take(loader(1), 1500)
    for done in (0, 1, 42, 90):
        size, world_size = before
        old = [loader(size, r, world_size) for r in range(world_size)]
        for _ in range(done):
            for rank in old:
                next(rank)
        assert all(rank.state_dict() == old[0].state_dict() for rank in old)
        state = json.loads(json.dumps(old[-1].state_dict()))
        size, world_size = after
        new = [loader(size, r, world_size) for r in range(world_size)]
        for rank in new:
            rank.load_state_dict(state)
        found = [row for _ in range(60) for rank in new for row in take(rank, 1)]
        start = done * before[0] * before[1]
        assert found == expected[start : start + len(found)]


def test_the_drawing_is_of_seed_and_place_alone():
    drawing = Drawing([0.5, 0.3, 0.2], 3)
    whole = drawing.sources(0, 2000)
    assert [drawing.sources(p, 1)[0] for p in (0, 255, 256, 1999)] == whole[
        [0, 255, 256, 1999]
    ].tolist()
    assert np.array_equal(drawing.sources(700, 900), whole[700:1600])
    assert not np.array_equal(Drawing([0.5, 0.3, 0.2], 4).sources(0, 2000), whole)
    # It is no pattern: what follows a sequence of source 0 has all shares again.
    after = whole[1:][whole[:-1] == 0]
    assert np.bincount(after) / len(after) == pytest.approx([0.5, 0.3, 0.2], abs=0.06)
    assert set(Drawing([0.0, 1.0, 0.0], 0).sources(0, 3000)) == {1}
    # One of 256 is exactly one of each 256 in a row, from 0 on.
    rare = Drawing([1 / 256, 0.5, 127 / 256], 5).sources(0, 20 * STRATA).reshape(20, STRATA)
    assert [np.bincount(row).tolist() for row in rare] == [[1, 128, 127]] * 20
    # What runs were trained on stays what it is.
    assert drawing.sources(250, 16).tolist() == GOLDEN


STAGES = [(300, {"a": 1.0}), (720, {"b": 3.0, "c": 1.0})]


def test_a_curriculum_draws_by_the_weights_of_its_stages():
    drawn = [owner(row) for row in take(loader(stages=STAGES), 500)]
    assert set(drawn[:300]) == {"a"}
    of_second, after = Counter(drawn[300:720]), Counter(drawn[720:])
    assert set(of_second) == {"b", "c"} and abs(of_second["b"] / 420 - 0.75) < 0.03
    for name, weight in WEIGHTS.items():
        assert abs(after[name] / 780 - weight) < 0.03
    # What follows the stages is what it is without them.
    assert np.array_equal(
        Drawing([0.5, 0.5], 3, [Stage(10, [1.0, 0.0])]).sources(10, 990),
        Drawing([0.5, 0.5], 3).sources(10, 990),
    )


def test_a_curriculum_goes_on_exactly_on_other_ranks_and_not_another_one():
    expected = take(loader(1, stages=STAGES), 1200)
    old = loader(3, stages=STAGES)
    for _ in range(85):
        next(old)
    state = json.loads(json.dumps(old.state_dict()))
    ranks = [loader(1, rank, 3, stages=STAGES) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    found = [row for _ in range(200) for rank in ranks for row in take(rank, 1)]
    assert found == expected[255 : 255 + 600]
    for other in ((), STAGES[:1], [(301, {"a": 1.0}), STAGES[1]]):
        with pytest.raises(DataError, match=r"is of data\.curriculum \["):
            loader(3, stages=other).load_state_dict(state)


def test_a_stage_that_is_learned_ends_at_once_and_stays_so_on_other_ranks():
    old = loader(3, stages=STAGES)
    drawn = take(old, 40)
    assert old.stage == 0
    old.end_stage()
    assert old.stage == 1
    whole = drawn + take(old, 360)
    assert {owner(row) for row in whole[:120]} == {"a"}
    assert {owner(row) for row in whole[120:720]} == {"b", "c"}
    # From its end on all is as if the YAML had said so.
    assert whole == take(loader(3, stages=[(120, STAGES[0][1]), STAGES[1]]), 400)
    assert old.stage == 2  # 720 is where the last ends
    again = loader(3, stages=STAGES)
    drawn = take(again, 40)
    again.end_stage()
    drawn += take(again, 10)
    state = json.loads(json.dumps(again.state_dict()))
    ranks = [loader(1, rank, 3, stages=STAGES) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [rank.stage for rank in ranks] == [1, 1, 1]
    assert [row for _ in range(100) for rank in ranks for row in take(rank, 1)] == whole[150:450]
    del state["ends"]  # of a checkpoint of before stages could end so
    again.load_state_dict(state)
    assert again.stage == 0


def test_sources_of_one_size_are_shuffled_each_in_its_own_way():
    alike = loader(tokens={"a": 81, "b": 81}, weights={"a": 0.5, "b": 0.5})
    orders = {"a": [], "b": []}
    for row in take(alike, 30):
        orders[owner(row)].append(row[0] % 1000)
    assert sorted(orders["a"][:20]) == sorted(orders["b"][:20])
    assert orders["a"][:20] != orders["b"][:20]


def test_a_state_of_another_mixture_is_refused():
    state = loader().state_dict()
    with pytest.raises(DataError, match=r"data.mixture.b: weight 0.3, this run has 0.4"):
        loader(weights=WEIGHTS | {"b": 0.4}).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.mixture.b: blocks 23, this run has 24"):
        loader(tokens=TOKENS | {"b": 94}).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.mixture.c: weight 0.2, this run has None"):
        loader(tokens={"a": 41, "b": 90}).load_state_dict(state)
    with pytest.raises(DataError, match="seed 7, this run has 8"):
        loader(seed=8).load_state_dict(state)
    single = single_source_loader(np.arange(50), 4, 3)
    with pytest.raises(DataError, match="of another kind of data"):
        single.load_state_dict(state)
    with pytest.raises(DataError, match="of another kind of data"):
        loader().load_state_dict(single.state_dict())
    stream = StreamLoader(Data(streams=1), None, 3)
    for other in (state, single.state_dict()):
        with pytest.raises(DataError, match="is of prepared data, and this run streams"):
            stream.load_state_dict(other)


# Weights.


def test_shares_are_the_weights_of_a_mixture():
    mixture = {"b": {"source": "builtin", "weight": 3}, "a": {"source": "builtin", "weight": 1}}
    assert shares(config.build({"data": {"mixture": mixture}}).data) == {"a": 0.25, "b": 0.75}
    assert shares(Data()) == {"": 1.0}


def test_the_mean_of_validation_is_weighed_by_shares():
    found = {"a": {"loss": 2.0, "perplexity": 0, "tokens": 900, "bytes": 1800},
             "b": {"loss": 4.0, "perplexity": 0, "tokens": 100, "bytes": 600}}  # fmt: skip
    scores = pooled(found, {"a": 0.25, "b": 0.75})
    assert (scores["loss"], scores["tokens"], scores["sources"]) == (3.5, 1000, found)
    assert scores["perplexity"] == pytest.approx(math.exp(3.5))
    # A token of the mixture stands for 0.25 · 2 + 0.75 · 6 bytes.
    assert scores["bits_per_byte"] == pytest.approx(3.5 / math.log(2) / 5)
    assert scores["bytes"] == 2400
    unknown = found | {"b": found["b"] | {"bytes": None}}
    assert pooled(unknown, {"a": 0.25, "b": 0.75})["bits_per_byte"] is None
    assert pooled({"": found["a"]}, {"": 1.0}) == found["a"]


WEB = {"source": "text", "path": "x.txt", "weight": 1}
ONLY = {"until": 9, "weights": {"web": 1}}
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
        {"mixture": {"web": WEB}, "curriculum": [ONLY | {"min_answer_prob": 0.9}]},
        "`data.curriculum.0.min_answer_prob` waits for the answers of its traces, and none of its",
    ),
    ({"curriculum": [ONLY]}, "`data.curriculum` changes the weights of `data.mixture`"),
    ({"mixture": {"code": WEB}, "curriculum": [ONLY]}, "`data.curriculum.0` has a weight for web"),
    ({"mixture": {"web": WEB}, "curriculum": [ONLY, ONLY]}, "`data.curriculum.1` ends at update 9"),
    ({"mixture": {"web": WEB}, "curriculum": [{"until": 9, "weights": {"web": 0}}]}, "sum to 0"),
    ({"mixture": {"web": WEB}, "curriculum": [{"until": 0, "weights": {"web": 1}}]}, "until"),
]  # fmt: skip


@pytest.mark.parametrize("data, said", REFUSED)
def test_what_cannot_be_a_mixture_is_refused_by_name(data, said):
    with pytest.raises(ConfigError) as error:
        config.build({"data": data})
    assert said in str(error.value)


def test_overrides_and_sweeps_reach_into_a_mixture():
    tree = {"name": "x", "data": {"mixture": {"web": WEB, "code": WEB}}}
    config.set_overrides(tree, ["data.mixture.web.weight=3"])
    assert config.build(tree).data.mixture["web"].weight == 3
    tree["sweep"] = {"data.mixture.web.weight": [0.3, 0.5]}
    points = config.sweep_points(tree)
    assert config.point_name("x", 1, points[1]) == "x/001-weight=0.5"
    with pytest.raises(ConfigError, match=r"did you mean `data.mixture.web.weight`"):
        config.set_overrides(tree, ["data.mixture.web.wait=3"])
    with pytest.raises(ConfigError, match=r"`data.mixture.wbe.source` is missing"):
        config.set_overrides(
            other := {"data": {"mixture": {"web": WEB}}}, ["data.mixture.wbe.weight=3"]
        )
        config.build(other)


# Prepared, validated, planned.


@pytest.fixture
def two(cfg, texts, tmp_path):
    """`cfg` with a mixture: its own documents, and twenty others under another key."""
    other = tmp_path / "other.jsonl"
    lines = [
        json.dumps({"body": f"{text[::-1]} {i} backwards"}) for i, text in enumerate(texts[:20])
    ]
    other.write_text("\n".join(lines), encoding="utf-8")
    tree = cfg.model_dump()
    path = tree["data"]["path"]
    tree["data"] |= {"source": "builtin", "path": None, "cache_dir": str(tmp_path / "cache")}
    tree["data"]["mixture"] = {
        "own": {"source": "jsonl", "path": path, "weight": 3},
        "back": {"source": "jsonl", "path": str(other), "text_field": "body", "weight": 1},
    }
    return config.build(tree)


def test_each_source_is_prepared_as_it_is_alone_and_validated_alone(two, bpe):
    corpora = prepare_sources(two, bpe, two.run_dir)
    assert list(corpora) == ["back", "own"]
    for name, part in parts(two).items():
        part.name = f"alone-{name}"
        alone = prepare_sources(part, bpe, part.run_dir)[""]
        assert np.array_equal(alone.train, corpora[name].train) and len(alone.train)
        assert np.array_equal(open_sources(two, two.run_dir)[name].val, alone.val)
    assert corpora["own"].meta.documents == 200 and corpora["back"].meta.documents == 20
    train, held_out = build(two, bpe, two.run_dir)
    assert train.shares == {"back": 0.25, "own": 0.75}
    for name, corpus in corpora.items():
        found = [t for batch in held_out[name] for t in batch["labels"].flatten().tolist()]
        assert [t for t in found if t != IGNORE] == corpus.val[1:].tolist()
    both = {tuple(r[:5]) for r in rows(itertools.islice(train, 60))}
    own = np.lib.stride_tricks.sliding_window_view(corpora["own"].train[:].astype(int), 5)
    own = set(map(tuple, own.tolist()))
    assert 0.6 < sum(row in own for row in both) / len(both) <= 1


def test_a_tokenizer_of_a_mixture_reads_each_source_by_its_weight(two):
    two.tokenizer.train_bytes = 1000
    assert tokenizer_bytes(two) == {"back": 250, "own": 750}
    found = list(training_texts(two))
    back = [t for t in found if t.endswith("backwards")]
    assert (
        250 <= sum(map(len, back)) < 400
        and 750 <= sum(map(len, found)) - sum(map(len, back)) < 1100
    )
    assert not any(is_validation(text, two.data.val_fraction) for text in found)
    two.data.mixture["back"].weight = 0
    assert not any(t.endswith("backwards") for t in training_texts(two))


def test_a_sentence_about_a_source_names_its_key(two, bpe, capsys):
    two.data.mixture["back"].text_field = "text"
    with pytest.raises(DataError, match=r"no key `text`.*set data.mixture.back.text_field"):
        prepare_sources(two, bpe, two.run_dir)
    two.data.mixture["back"].path = "none.jsonl"
    with pytest.raises(DataError, match=r"^data.mixture.back.path none.jsonl: no such file"):
        prepare_sources(two, bpe, two.run_dir)
    said = refused(capsys, "plan", LM / "mixture.yaml", "data.mixture.prose.path=none.jsonl")
    assert said.startswith("data.mixture.prose.path none.jsonl: no such file")


def test_prepared_ahead_and_planned(two, capsys):
    two.model.d_model, two.model.n_layer, two.train.steps = 16, 1, 30
    columns = describe(plan(two, 1), two).columns
    planned = dict(zip(*(list(column.cells) for column in columns)))
    assert planned["source own"] == "75.00% of the sequences"
    text = prepare_config(two)
    assert "source   back: 25.00%" in text and "corpus   20 documents" in text


def test_the_shipped_mixture_is_planned():
    cfg = config.load(LM / "mixture.yaml")
    cfg.optim.lr_factors = {"*.A_log": 0.5}
    rows = [name for name, _ in _what(plan(cfg, 1), cfg)]
    assert rows[-3:] == ["source prose", "source python", "optimizer"]


def test_a_single_source_draws_what_it_drew_before():
    """The permutations of a run on one source are still those of (seed, epoch)."""
    found = [row[0] - 1 for row in take(single_source_loader(np.arange(101), 1, 10, 5), 20)]
    expected = [np.random.default_rng([5, epoch]).permutation(100) for epoch in (0, 1)]
    assert found == np.concatenate(expected).tolist()
    assert torch.equal(next(single_source_loader(np.arange(9), 4, 2))["input_ids"][:, 1:] + 1,
                       next(single_source_loader(np.arange(9), 4, 2))["labels"][:, 1:])  # fmt: skip
