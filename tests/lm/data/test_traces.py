"""Tests of traces: answers against oracles that read only the text, gaps, questions, errors."""

import contextlib
import io
import itertools
import json
import math
import re

import pytest
import torch

from lm.config.data import Data, Traces
from lm.data.batches.packing import IGNORE
from lm.data.batches.questions import QUESTION_COUNT, question_batches
from lm.data.corpus import cache
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.open import iter_documents
from lm.training.validation import Validation, answers_suffix
from tests.refusals import refused
from tests.running import ROOT, run

TINY = ROOT / "configs/tiny/lm.yaml"
BATCH_SIZE, SEQ_LEN = 50, 128  # of a micro-batch of training
PERMUTATIONS = list(itertools.permutations(range(3)))
WORDS = dict(zip(["ba", "be", "bi", "bo", "bu", "ca"], PERMUTATIONS))


def read_words(text: str) -> list[int]:
    """Check every answer of a document on S3; return the gaps before the questions."""
    gaps = []
    state = (0, 1, 2)
    gap = 0
    tokens = iter(text.split())
    for token in tokens:
        if token == "=":
            assert WORDS[next(tokens)] == state, text
            assert next(tokens) == ";"
            gaps.append(gap)
            gap = 0
        else:
            state = tuple(WORDS[token][place] for place in state)
            gap += 1
    assert gap == 0, "a document ends with an answer"
    return gaps


def play(text: str) -> list[int]:
    """Check every answer of a session by running it; return the gaps before the questions."""
    gaps = []
    variables = {}
    gap = 0
    lines = iter(text.splitlines())
    for line in lines:
        statement = line.removeprefix(">>> ")
        assert statement != line, "expected a statement, not an answer"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(statement, variables)
        if statement.startswith("print("):
            assert next(lines) == printed.getvalue().strip()
            gaps.append(gap)
            gap = 0
        elif re.fullmatch(r"([a-i]), ([a-i]) = \2, \1", statement):
            gap += 1
        else:
            assert not gaps and re.fullmatch(r"a, b, c = [123], [123], [123]", statement)
    assert gap == 0
    return gaps


@pytest.mark.parametrize(("form", "read"), [("words", read_words), ("repl", play)])
def test_answers_are_right_and_gaps_as_configured(form, read):
    source = Traces(group="S3", form=form, gaps=[1, 3, 7], answers=4, documents=300)
    texts = list(iter_documents(Data(source="traces", traces=source)))
    assert len(texts) == 300
    gaps = [read(text) for text in texts]
    assert {gap for document in gaps for gap in document} == {1, 3, 7}
    assert {len(document) for document in gaps} == {1, 2, 3, 4}
    assert texts == list(traces.iter_documents(source)), "documents must be the same at every call"


def test_session_may_ask_before_any_swap():
    source = Traces(form="repl", gaps=[0, 2], answers=4, documents=200)
    gaps = [play(text) for text in traces.iter_documents(source)]
    assert {0, 2} == {gap for document in gaps for gap in document}
    assert {document[0] for document in gaps} == {0, 2}


@pytest.mark.parametrize(("form", "read"), [("words", read_words), ("repl", play)])
def test_gaps_up_to_a_number_are_geometric(form, read):
    source = Traces(form=form, gaps=6, documents=8000)
    shortest = 1 if form == "words" else 0
    gaps = [gap for text in traces.iter_documents(source) for gap in read(text)]
    assert set(gaps) == set(source.possible_gaps) == set(range(shortest, 7))
    weights = {gap: 100 ** (-gap / 6) for gap in range(shortest, 7)}
    total = sum(weights.values())
    for gap, weight in weights.items():
        assert gaps.count(gap) / len(gaps) == pytest.approx(weight / total, abs=0.01)


def test_sessions_without_swaps_can_be_a_number():
    source = Traces(form="repl", gaps=0, documents=20)
    assert {gap for text in traces.iter_documents(source) for gap in play(text)} == {0}


def test_words_of_few_elements_have_low_order():
    """Four elements of S3 are the identity and the transpositions, whose products are all six."""
    source = Traces(num_elements=4, gaps=[1, 3], documents=300)
    for texts in (
        list(traces.iter_documents(source)),
        [
            turn.question + turn.answer + " ;"
            for turn in traces.iter_questions(source, 3, 100, "test")
        ],
    ):
        assert all(read_words(text) for text in texts)
        elements = {word for text in texts for word in re.findall(r"(?<!= )\b\w+", text)}
        assert elements == {"ba", "be", "bi", "ca"}
        answers = {word for text in texts for word in re.findall(r"= (\w+)", text)}
        assert answers == set(WORDS)


@pytest.mark.parametrize(("form", "read"), [("words", read_words), ("repl", play)])
def test_questions_are_right_and_not_in_training(form, read):
    turns = list(traces.iter_questions(Traces(form=form), 20, 60, "test"))
    end = traces.FORMS[form].end
    texts = [turn.question + turn.answer + end for turn in turns]
    assert [read(text) for text in texts] == [[20], [20, 20]] * 30
    for turn in turns:
        assert turn.question == turn.question.rstrip() and turn.answer == turn.answer.rstrip()
    source = Traces(group="S3", form=form, gaps=[20], answers=2, documents=2000)
    assert not set(texts) & set(traces.iter_documents(source))
    assert not set(turns) & set(traces.iter_questions(Traces(form=form), 20, 60, "validation"))


def test_traces_without_settings_are_the_defaults():
    assert list(iter_documents(Data(source="traces"))) == list(traces.iter_documents(Traces()))


def test_syllables_are_distinct_for_the_largest_group():
    words = traces.make_syllables(5040)
    assert len(set(words)) == 5040 and words[:6] == list(WORDS)
    assert all(re.fullmatch("[a-z]{2,4}", word) for word in words)


def test_other_traces_have_another_address(tmp_path):
    changes = [{}, {"gaps": [1, 2]}, {"group": "A5"}, {"form": "repl"}, {"answers": 2}]
    changes += [{"documents": 100}, {"gaps": 2}, {"num_elements": 3}]
    sources = [Traces(**settings) for settings in changes]
    contents = [cache.identify_text(tmp_path, Data(source="traces", traces=s)) for s in sources]
    assert len({json.dumps(content) for content in contents}) == len(sources)
    assert cache.identify_text(tmp_path, Data(source="traces")) == contents[0]
    assert "letters" not in contents[0], "the address of existing corpora would change"


def test_only_answers_are_targets_of_questions(bpe):
    source = Traces(group="S3", gaps=[2, 6], documents=1)
    batches = question_batches(source, bpe, BATCH_SIZE, SEQ_LEN)
    assert [len(batch["labels"]) for batch in batches] == [50, 50, QUESTION_COUNT - 100]
    turns = list(traces.iter_questions(Traces(), 6, QUESTION_COUNT, "validation"))
    inputs = torch.cat([batch["input_ids"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert (inputs[:, 0] == bpe.eos_token_id).all()
    for turn, row, targets in zip(turns, inputs, labels):
        places = (targets != IGNORE).nonzero().flatten()
        assert bpe.decode(targets[places]) == turn.answer
        assert bpe.decode(row[1 : places[0] + 1]) == turn.question


def test_questions_have_the_elements_of_their_source(bpe):
    source = Traces(num_elements=4, gaps=[3], documents=1)
    for batch in question_batches(source, bpe, BATCH_SIZE, SEQ_LEN):
        for row, targets in zip(batch["input_ids"], batch["labels"]):
            question = bpe.decode(row[1 : (targets != IGNORE).nonzero()[0] + 1])
            assert set(re.findall(r"(?<!= )\b\w+", question)) <= {"ba", "be", "bi", "ca"}


def test_questions_have_the_longest_gap_that_fits(bpe):
    """A micro-batch has no more tokens than a micro-batch of training."""
    source = Traces(group="S3", documents=1)
    batches, batches_6, batches_300 = (
        question_batches(source.model_copy(update={"gaps": gaps}), bpe, BATCH_SIZE, SEQ_LEN)
        for gaps in ([1, 6, 5000], [6], [300])
    )
    for batch, batch_6 in zip(batches, batches_6, strict=True):
        assert torch.equal(batch["input_ids"], batch_6["input_ids"])
    assert sum(len(batch["labels"]) for batch in batches_300) == QUESTION_COUNT
    for batch in batches_300:
        rows, width = batch["labels"].shape
        assert rows == 1 or rows * width <= BATCH_SIZE * SEQ_LEN


def test_every_question_of_the_longest_gap_fits(bpe):
    """Names of A5's elements differ in their number of tokens."""

    def find_width(gaps, seq_len):
        source = Traces(group="A5", gaps=gaps)
        return max(b["input_ids"].shape[1] for b in question_batches(source, bpe, 1, seq_len))

    for seq_len in range(find_width([1], SEQ_LEN) + 1, find_width([6], SEQ_LEN) + 1):
        assert find_width([1, 3, 6], seq_len) < seq_len


def test_answer_merged_with_its_question_is_a_target():
    """The tokenizer has tokens that cross the space before the answer."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

    source = Traces(group="S3", gaps=[2], documents=2000)
    merged = Tokenizer(models.BPE(unk_token="?"))
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["?", "<end>"])
    merged.train_from_iterator(traces.iter_documents(source), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged, eos_token="<end>")
    for batch in question_batches(source, tokenizer, BATCH_SIZE, SEQ_LEN):
        assert (batch["labels"] != IGNORE).any(-1).all()


def test_answer_probability_covers_all_tokens_and_sources(bpe):
    """All tokens of an answer count, and the minimum over the sources."""
    session, words = Traces(form="repl", gaps=[1]), Traces(group="S3", gaps=[2])
    validation = object.__new__(Validation)
    validation.questions = {
        "repl": question_batches(session, bpe, BATCH_SIZE, SEQ_LEN),
        "words": question_batches(words, bpe, BATCH_SIZE, SEQ_LEN),
    }
    questions = validation.questions
    nll = {id(questions["repl"]): 0.3, id(questions["words"]): 0.1}  # loss per token

    class Engine:
        def validate(self, batches, progress):
            progress(1, 1)
            return {"loss": nll[id(batches)]}

    answer_lengths = {
        name: [len(bpe(turn.answer)["input_ids"]) for turn in turns]
        for name, turns in (
            ("repl", traces.iter_questions(Traces(form="repl"), 1, QUESTION_COUNT, "validation")),
            ("words", traces.iter_questions(Traces(), 2, QUESTION_COUNT, "validation")),
        )
    }
    assert set(answer_lengths["repl"]) == {2}, "a line end and a number"
    answer_probability = {
        name: validation.answer_probability(Engine(), [name], lambda: None)
        for name in validation.questions
    }
    assert answer_probability["repl"] == pytest.approx(math.exp(-2 * 0.3))
    assert answer_probability["words"] == pytest.approx(
        math.exp(-0.1 * sum(answer_lengths["words"]) / QUESTION_COUNT)
    )
    both = validation.answer_probability(Engine(), ["words", "repl"], lambda: None)
    assert both == answer_probability["repl"] < answer_probability["words"]


def test_line_shows_answers_only_for_traces():
    assert answers_suffix({"answers": 0.987}) == " (answers 0.99)"
    assert answers_suffix({"loss": 1.0}) == ""


def test_invalid_traces_are_refused():
    with pytest.raises(DataError, match=r"S2 to S9 \(S3 has three variables\), not `A5`"):
        traces.check(Traces(form="repl", group="A5"))
    with pytest.raises(DataError, match="unknown group `Q8`"):
        traces.check(Traces(group="Q8"))
    with pytest.raises(DataError, match="traces of S3 have at most 6 `num_elements`, not 7"):
        traces.check(Traces(num_elements=7))
    with pytest.raises(ValueError, match="`num_elements` is only for form `words`"):
        Traces(form="repl", num_elements=2)
    with pytest.raises(ValueError, match="must be at least 1 for form `words`"):
        Traces(gaps=[0, 1])
    with pytest.raises(ValueError, match="must be at least 1 for form `words`"):
        Traces(gaps=0)
    with pytest.raises(ValueError, match="generates its text and has no"):
        Data(source="traces", path="x.jsonl")
    with pytest.raises(ValueError, match="`traces` is only for source `traces`, not for `builtin`"):
        Data(traces=Traces())
    mixture = {"a": {"source": "jsonl", "path": "x", "traces": {}, "weight": 1}}
    with pytest.raises(ValueError, match="only for source `traces`, not for `jsonl`"):
        Data(mixture=mixture)


def test_run_on_traces_reports_answer_probability(tmp_path):
    mixture = {
        "facts": {"source": "jsonl", "path": "tests/data/tiny.jsonl", "weight": 0.5},
        "s3": {"source": "traces", "traces": {"documents": 400}, "weight": 0.5},
    }
    keys = {"source": "builtin", "path": None, "mixture": mixture, "val_tokens": 300}
    data = [f"data.{key}={json.dumps(value)}" for key, value in keys.items()]
    _, process = run(tmp_path, *data)
    scores = json.loads((tmp_path / "tiny/result.json").read_text())["validation"]["sources"]
    assert 0 < scores["s3"]["answers"] < 1 and "answers" not in scores["facts"]
    assert f" (answers {scores['s3']['answers']:.2f})" in process.stdout


def test_unknown_group_is_refused_before_the_run_begins(tmp_path, capsys):
    source = {"source": "traces", "traces": {"group": "Q8"}, "weight": 1}
    keys = {"source": "builtin", "path": None, "mixture": {"q": source}}
    data = [f"data.{key}={json.dumps(value)}" for key, value in keys.items()]
    message = refused(capsys, "train", "--config", TINY, f"out_dir={tmp_path}", *data)
    assert not list(tmp_path.iterdir())
    assert "data.mixture.q" in message and "unknown group `Q8`" in message
