"""Best-fit packing: no document cut that fits, every token a target once, exact resuming."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.data.batches.loader import MapLoader, build
from lm.data.batches.packing import IGNORE, micro_batch
from lm.data.corpus import best_fit
from lm.data.corpus.best_fit import BestFitRows, document_ends, pack, waste
from lm.data.corpus.corpora import prepare_sources
from lm.data.sources.errors import DataError
from lm.report.plan import plan

EOS = 0
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def stream(lengths: list[int], leading_eos: bool = False) -> np.ndarray:
    """Documents of so many tokens, EOS among them; all other tokens different."""
    tokens, number = [], itertools.count(1)
    for length in lengths:
        inner = length - 1 - leading_eos
        tokens += [EOS] * leading_eos + list(itertools.islice(number, inner)) + [EOS]
    return np.array(tokens, dtype=np.uint16)


def packed(lengths, seq_len, leading_eos=False):
    tokens = stream(lengths, leading_eos)
    ends = document_ends(tokens, EOS, leading_eos)
    packing = pack(ends, seq_len)
    return tokens, ends, packing, BestFitRows(tokens, packing, seq_len, EOS)


@given(LENGTHS, st.integers(1, 16))
@example([5, 5, 5], 5)
@example([6, 11, 10, 1], 5)
@settings(deadline=None)
def test_every_token_is_a_target_once_after_the_token_before_it(lengths, seq_len):
    tokens, ends, packing, rows = packed(lengths, seq_len)
    assert ends.tolist() == np.cumsum(lengths).tolist()
    batch = micro_batch(rows.rows(np.arange(len(rows))))
    inputs, labels = (batch[key].numpy() for key in ("input_ids", "labels"))
    there = labels != IGNORE
    pairs = Counter(zip(inputs[there].tolist(), labels[there].tolist()))
    before = np.concatenate([[EOS], tokens[:-1]])  # the first document is as any other
    assert pairs == Counter(zip(before.tolist(), tokens.tolist()))
    assert rows.targets(np.arange(len(rows))) == len(tokens)
    # All documents that fit are whole: in one row, in order, with nothing between.
    whole = {tuple(tokens[e - n : e].tolist()) for e, n in zip(ends, lengths) if n <= seq_len}
    lines = [" ".join(map(str, row[row != IGNORE])) for row in labels]
    for document in whole - {(EOS,)}:
        text = " ".join(map(str, document))
        assert any(f" {text} " in f" {line} " for line in lines), document
    for row, first in zip(rows.rows(np.arange(len(rows))), packing.firsts):
        full = packing.lengths[first] == seq_len
        assert row[0] == EOS or (full and row[0] == tokens[packing.starts[first] - 1])


@given(LENGTHS, st.integers(2, 16), st.booleans())
@settings(deadline=None)
def test_waste_is_what_is_counted(lengths, seq_len, leading_eos):
    lengths = [length + leading_eos for length in lengths]
    tokens, ends, packing, rows = packed(lengths, seq_len, leading_eos)
    cost = waste(packing, ends, seq_len)
    labels = micro_batch(rows.rows(np.arange(len(rows))))["labels"].numpy()
    assert cost.padding == pytest.approx((labels == IGNORE).mean())
    assert (cost.documents, cost.split) == (len(lengths), sum(n > seq_len for n in lengths))
    block = (np.arange(len(tokens)) - 1) // seq_len  # that a target has in plain packing
    block[0] = block[1] if len(block) > 1 else 0
    cut = [n <= seq_len and len(set(block[e - n : e])) > 1 for e, n in zip(ends.tolist(), lengths)]
    assert cost.cut_by_plain == sum(cut)


@pytest.mark.parametrize(
    "lengths, blocks",
    [
        ([3, 8, 2, 7], [[2, 8], [3, 7]]),  # none empty
        ([6, 8, 2], [[2, 8], [6]]),  # there is room for the 2 beside the 6 as well
        ([1, 4, 5, 7], [[1, 4, 5], [7]]),  # beside the 7, too, which was there first
        ([13, 6], [[6, 3], [10]]),  # what is left of the 13 takes four
        ([13, 7], [[3], [7], [10]]),
    ],
)
def test_it_fits_best(lengths, blocks):
    packing = packed(lengths, 10)[2]
    found = [packing.lengths[a:b].tolist() for a, b in itertools.pairwise(packing.firsts)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, blocks))


def test_a_stream_that_does_not_end_with_a_document_is_refused():
    with pytest.raises(DataError, match=r"do not end with a document \(EOS is 0\)"):
        document_ends(np.array([1, 2, 0, 3]), EOS, False)
    with pytest.raises(DataError, match="cannot find the documents"):
        document_ends(np.array([1, 2]), EOS, False)
    assert document_ends(np.array([0, 1, 0, 0, 0]), EOS, True).tolist() == [3, 5]


@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_is_exact(world_size):
    tokens, _, packing, rows = packed([3, 9, 1, 14, 7, 7, 2, 30, 5], 10)

    def loaders(size=2):
        return [
            MapLoader(tokens, 10, size, 3, rank, world_size, rows) for rank in range(world_size)
        ]

    def take(ranks, count):
        return [next(r)["labels"].tolist() for _ in range(count) for r in ranks]

    whole = loaders()
    take(whole, 5)
    state = json.loads(json.dumps(whole[-1].state_dict()))
    again = loaders()
    for rank in again:
        rank.load_state_dict(state)
    assert take(again, 9) == take(whole, 9)
    labels = np.array(take(loaders(1), 7 * packing.blocks))
    assert again[0].drawn() == whole[0].drawn()
    seen = loaders(1)[0]
    seen.load_state_dict(loaders(1)[0].state_dict() | {"next_global_micro_batch": packing.blocks})
    epoch = labels[: packing.blocks]
    assert seen.drawn() == {"data_padding": pytest.approx((epoch == IGNORE).mean(), abs=1e-6)}
    plain = MapLoader(tokens, 10, 2, 3)
    with pytest.raises(DataError, match=r"is of data.packing best_fit, this run has plain"):
        plain.load_state_dict(state)
    older = {key: value for key, value in plain.state_dict().items() if key != "packing"}
    plain.load_state_dict(older)  # of a run before there was a choice
    with pytest.raises(DataError, match=r"is of data.packing plain, this run has best_fit"):
        again[0].load_state_dict(older)


@pytest.mark.parametrize("leading_eos", [False, True])
def test_a_run_packs_its_corpus_once_and_the_plan_says_the_waste(cfg, bpe, capsys, leading_eos):
    cfg.data.packing, cfg.data.leading_eos = "best_fit", leading_eos
    cfg.model.d_model, cfg.model.n_layer = 16, 1
    assert "known once" in dict(plan(cfg, 1)["packing"])["packing"]
    corpus = prepare_sources(cfg, bpe, cfg.run_dir)[""]
    path = cfg.run_dir / "data/best_fit.npz"
    said = capsys.readouterr().out
    assert "best_fit: " in said and dict(plan(cfg, 1)["packing"])["packing"] in said
    written = path.stat().st_mtime_ns
    train, held_out = build(cfg, bpe, cfg.run_dir)
    prepare_sources(cfg, bpe, cfg.run_dir)
    assert path.stat().st_mtime_ns == written
    blocks = train.state_dict()["blocks"]
    rows = [row for _ in range(-(-blocks // 3)) for row in next(train)["labels"].tolist()]
    targets = Counter(t for row in rows[:blocks] for t in row if t != IGNORE)
    assert targets == Counter(corpus.train[:].tolist())
    # Validation is what it is without.
    plain = sorted(t for b in held_out[""] for t in b["labels"].flatten().tolist() if t != IGNORE)
    assert plain == sorted(corpus.val[1:].tolist())
    # A damaged file is made again; of another length of blocks, too.
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\0" * 40 + data[len(data) // 2 + 40 :])
    if best_fit.read(path.parent, cfg.data) is None:
        with pytest.raises(DataError, match=r"best_fit.npz is not there, damaged or of"):
            build(cfg, bpe, cfg.run_dir)
    prepare_sources(cfg, bpe, cfg.run_dir)
    assert build(cfg, bpe, cfg.run_dir)[0].state_dict()["blocks"] == blocks
    cfg.data.seq_len = 8
    assert best_fit.read(path.parent, cfg.data) is None


def test_a_stream_cannot_be_packed_best():
    with pytest.raises(ConfigError, match=r"`data.packing: best_fit` must see all"):
        config.build({"data": {"source": "fineweb", "packing": "best_fit"}})


def test_mixtures_are_packed_source_by_source(cfg, bpe):
    tree = cfg.model_dump()
    own = {"source": "jsonl", "path": tree["data"]["path"], "weight": 1}
    tree["data"] |= {"source": "builtin", "path": None, "packing": "best_fit",
                     "mixture": {"a": own, "b": own}}  # fmt: skip
    both = config.build(tree)
    prepare_sources(both, bpe, both.run_dir)
    train = build(both, bpe, both.run_dir)[0]
    batches = [next(train)["labels"].numpy() for _ in range(20)]
    padding = np.mean([batch == IGNORE for batch in batches])
    assert train.drawn()["data_padding"] == pytest.approx(padding, abs=1e-6)
    state = train.state_dict()
    expected = next(train)["labels"]
    again = build(both, bpe, both.run_dir)[0]
    again.load_state_dict(state)
    assert (next(again)["labels"] == expected).all() and state["packing"] == "best_fit"
