"""lm.evaluation.agree: a tiny random model under every schedule, each refusal."""

import json
import math
import shutil

import pytest

pytest.importorskip("rich")

import torch

from lm.cli.main import main
from lm.data.sources.open import is_validation
from lm.evaluation import agree as module
from lm.evaluation import facade
from lm.evaluation.agree import SCHEDULES, AgreementError, agree, table
from lm.evaluation.facade import generate
from lm.evaluation.generate import GenerationError
from lm.export.export import write_export
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import SOLVER
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.exported import LoadError
from lm.runs.places import PlaceError

SMALL = {"sequences": 3, "length": 12, "batch_size": 2}
ROW = {
    "tol", "perplexity", "bits_per_byte", "evaluations", "failed", "seconds", "difference", "top1",
}  # fmt: skip


def exported(folder, tokenizer, **settings):
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=264, d_model=16, n_layer=2, d_state=4, eos_token_id=0, pad_token_id=0,
        **settings,
    )  # fmt: skip
    return write_export(FPRNNForCausalLM(config), folder / "tiny", tokenizer, "tiny", "Random.")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    return exported(
        tmp_path_factory.mktemp("fp_mamba1"), byte_tokenizer, tol=0.05, glu_in_loop=True
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("Mary went to the kitchen. Where is the apple? " * 4, encoding="utf-8")
    return path


@pytest.fixture
def loaded(monkeypatch):
    """The models that `agree` loaded."""
    models = []

    def load(path, trust):
        models.append(plain(path, trust))
        return models[-1]

    plain = facade.load
    monkeypatch.setattr(facade, "load", load)
    return models


def test_every_schedule_is_compared_and_the_config_is_as_before(checkpoint, text, loaded):
    seen = []
    results = agree(checkpoint, text, **SMALL, progress=lambda *update: seen.append(update))
    written = checkpoint / "eval" / "agree.json"
    assert json.loads(written.read_text()) == results
    assert list(written.parent.iterdir()) == [written]
    assert str(checkpoint.parents[1]) not in written.read_text()
    assert tuple(results["schedules"]) == SCHEDULES
    tight = results["tight"]
    assert tight.keys() == ROW
    assert (tight["tol"], tight["failed"], tight["evaluations"]) == (None, 0, 1)
    assert (tight["difference"], tight["top1"]) == (0, 1)
    assert (results["text"], results["sequences"], results["length"]) == ("words.txt", 3, 12)
    assert results["evaluated_with"]["token"] == "exact"
    assert len(results["num_iters"]) == 2 and min(results["num_iters"]) > 1
    for row in results["schedules"].values():
        assert row.keys() == ROW
        assert row["evaluations"] >= 1 and row["seconds"] > 0
    for name in ("sequential", "window:16", "parallel"):
        row = results["schedules"][name]
        assert row["tol"] is None if name == "sequential" else row["tol"] == 1e-5
        assert row["failed"] == 0 and row["top1"] > 0.95 and row["difference"] < 1e-3
        assert row["perplexity"] == pytest.approx(tight["perplexity"], rel=1e-3)
    paper = results["schedules"]["paper"]
    assert paper["tol"] == 0.05 and 0 <= paper["top1"] <= 1 and paper["evaluations"] > 1
    finished = [what for *_, what in seen if what]
    assert finished == ["reading the text", "tight", *SCHEDULES]
    assert seen[0][:2] == (0, None) and {total for _, total, _ in seen[1:]} == {10}
    assert [done for done, *_ in seen] == list(range(11))
    config, fresh = loaded[0].model.config, FPRNNConfig()
    for name in SOLVER:
        if name not in ("tol", "stepsize"):  # of the checkpoint
            assert getattr(config, name) == getattr(fresh, name)


def test_a_tolerance_nearer_to_zero_is_nearer_to_the_tight_solution(checkpoint, text, tmp_path):
    def distance(tol):
        options = {"schedules": ["parallel", "sequential"], "tol": tol, "out": tmp_path / "a.json"}
        rows = agree(checkpoint, text, sequences=1, length=40, **options)["schedules"]
        assert rows["sequential"]["difference"] == 0 and rows["sequential"]["top1"] == 1
        return rows["parallel"]["difference"], rows["parallel"]["evaluations"]

    (loose, fewer), (near, more) = distance(0.5), distance(1e-6)
    assert near < 1e-4 < loose and fewer < more


@pytest.mark.parametrize(
    "settings",
    [
        {"stopping": "paper"},
        {"token": "iterate", "gradient": "implicit"},
        {"block": "fp_rnn", "stopping": "paper"},
        {"block": "fp_mamba2", "headdim": 8, "mixer": "dplr", "mixer_rank": 2},
        {"mixer": "kronecker", "gradient": "adjoint:3", "schedule": "window:4"},
        {"dt_h_dep": True},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_whatever_trained_it_the_exact_schedules_agree(tmp_path, byte_tokenizer, text, settings):
    path = exported(tmp_path, byte_tokenizer, **settings)
    results = agree(path, text, sequences=2, length=12, tol=1e-4)
    for name in ("sequential", "window:16", "parallel"):
        row = results["schedules"][name]
        assert row["top1"] == 1 and row["difference"] < 0.02, name


def test_lengths_beyond_any_training_are_compared(checkpoint, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("Mary went to the kitchen. Where is the apple? " * 10, encoding="utf-8")
    options = {"schedules": ["window:16"], "sequences": 1, "length": 400}
    results = agree(checkpoint, long, **options, out=tmp_path / "a.json")
    for row in results["schedules"].values():
        assert row["top1"] > 0.99 and row["failed"] == 0


def test_logits_are_compared_a_part_at_a_time(checkpoint, text, tmp_path, monkeypatch):
    options = {"schedules": ["parallel"], "out": tmp_path / "a.json", **SMALL}
    whole = agree(checkpoint, text, **options)["schedules"]["parallel"]
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 5)
    parts = agree(checkpoint, text, **options)["schedules"]["parallel"]
    for name in ROW - {"seconds"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-5), name


def test_the_perplexity_is_that_of_the_causal_language_model(checkpoint, text, tmp_path, loaded):
    results = agree(
        checkpoint, text, schedules=["auto"], sequences=1, length=20, out=tmp_path / "a.json"
    )
    model, tokenizer = loaded[0].model, loaded[0].tokenizer
    ids = torch.tensor([tokenizer(text.read_text())["input_ids"] + [0]])
    blocks = ids[0, : (ids.shape[1] - 1) // 20 * 20 + 1]
    losses = [
        model(blocks[None, s : s + 20], shift_labels=blocks[None, s + 1 : s + 21]).loss.item()
        for s in range(0, len(blocks) - 1, 20)
    ]
    perplexity = results["schedules"]["auto"]["perplexity"]
    assert min(abs(math.exp(loss) - perplexity) for loss in losses) < 1e-3
    # Each token of this text is one byte.
    bits = results["schedules"]["auto"]["bits_per_byte"]
    assert results["bytes"] == 20 and bits == pytest.approx(math.log2(perplexity))


def test_the_seed_chooses_the_places_and_a_short_text_has_fewer(checkpoint, text, tmp_path):
    quick = {"schedules": ["paper"], "out": tmp_path / "a.json"}

    def perplexity(**options):
        results = agree(checkpoint, text, **quick, **options)
        return results["sequences"], results["tight"]["perplexity"]

    few = {"sequences": 1, "length": 8}
    assert perplexity(**few) == perplexity(**few)
    assert len({perplexity(**few, seed=s) for s in range(4)}) > 1
    assert perplexity(sequences=50, length=90)[0] == 2  # 184 bytes and an EOS


def test_by_default_the_text_is_the_builtin_corpus_held_out(checkpoint, tmp_path, monkeypatch):
    texts = [f"{i:03d}" for i in range(200)]
    held_out = [text for text in texts if is_validation(text, 0.05)]
    monkeypatch.setattr("lm.data.sources.open.builtin_documents", lambda: texts)
    few = {"schedules": ["paper"], "sequences": 500, "length": 4}
    results = agree(checkpoint, **few, out=tmp_path / "a.json")
    assert results["text"] == "the built-in corpus, held-out documents"
    assert results["sequences"] == (4 * len(held_out) - 1) // 4  # three digits and an EOS each


def test_tables_fit_a_terminal(checkpoint, text, tmp_path):
    from rich.console import Console

    console = Console(width=80)
    small = {"sequences": 1, "length": 4}
    results = agree(checkpoint, text, **small, out=tmp_path / "a.json")
    results["tight"]["perplexity"] = 1234.56
    with console.capture() as capture:
        console.print(table(results))
    shown = capture.get()
    assert "…" not in shown
    assert shown.count("bits per byte of the text") == 1
    for part in ("sequential", "window:16", "1234.56", "1e-05", "failed", "max Δ"):
        assert part in shown


@pytest.mark.parametrize(
    "options, words",
    [
        ({"sequences": 0}, "sequences is 0: it must be at least 1"),
        ({"length": -1}, "length is -1: it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"tol": 0.0}, "tol is 0: it is a relative residual, above 0"),
        ({"tol": math.nan}, "tol is nan"),
        ({"schedules": []}, "no schedules given; by default they are sequential, window:16"),
        ({"schedules": ["auto", "windw:4"]}, r"schedule is `windw:4`.*window:W.*; paper \(the"),
        ({"schedules": ["window:0"]}, "W is at least 1"),
        ({"text": "nowhere.txt"}, r"no text file at nowhere\.txt"),
        ({"length": 500}, r"has 185 tokens, but a sequence of length 500 needs 501"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(checkpoint, text, tmp_path, options, words):
    with pytest.raises((AgreementError, GenerationError), match=words):
        agree(checkpoint, **{"text": text, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_checkpoint_of_ours_is_a_sentence(checkpoint, tmp_path, byte_tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(PlaceError, match="nowhere: no such folder; give a run or an export"):
        agree(tmp_path / "nowhere")
    with pytest.raises(PlaceError, match=r"holds neither a run \(config.yaml\) nor an export"):
        agree(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(byte_tokenizer, other)
    GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        other
    )
    with pytest.raises(AgreementError, match="is a gpt2 model: it has no fixed point"):
        agree(other)
    with pytest.raises(GenerationError, match="is a gpt2 model: it has no fixed point"):
        generate(other, "Mary", max_new_tokens=2, schedule="auto")
    assert generate(other, "Mary", max_new_tokens=2).startswith("Mary")
    bare = tmp_path / "bare"
    shutil.copytree(byte_tokenizer, bare)
    (bare / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(LoadError, match="cannot load"):
        agree(bare)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    with pytest.raises(GenerationError, match="holds no tokenizer"):
        agree(bare)


def test_the_commands(checkpoint, text, tmp_path, capsys):
    small = ["--text", str(text), "--sequences", "1", "--length", "6"]
    out = tmp_path / "a.json"
    options = ["--schedules", "paper, window:2", "--tol", "0.02", "--out", str(out)]
    assert main(["agree", str(checkpoint), *small, *options]) == 0
    assert "window:2" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert {name: r["tol"] for name, r in results["schedules"].items()} == {
        "paper": 0.05, "window:2": 0.02,
    }  # fmt: skip
    assert main(["agree", str(checkpoint), *small, "--schedules", "nonsense"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: schedule is `nonsense`") and error.count("\n") == 1


def test_generate_takes_a_schedule_and_a_cache(checkpoint, monkeypatch, capsys):
    calls, plain = [], FPRNNForCausalLM.generate

    def spy(self, **kwargs):
        calls.append((self.solver(length=4), kwargs))
        return plain(self, **kwargs)

    monkeypatch.setattr(FPRNNForCausalLM, "generate", spy)
    texts = [
        generate(checkpoint, "Mary went", max_new_tokens=6, temperature=0, schedule=name, tol=1e-4)
        for name in (None, "parallel", "sequential", "window:3")
    ]
    assert len(set(texts)) == 1
    options = ["--schedule", "paper", "--tol", "0.2", "--max-iters", "7", "--max-new-tokens", "2"]
    assert main(["generate", str(checkpoint), "--prompt", "Mary", *options]) == 0
    assert capsys.readouterr().out.startswith("Mary")
    assert all(kwargs["use_cache"] is True for _, kwargs in calls)
    solver = calls[-1][0]
    assert (solver["schedule"], solver["stopping"]) == ("parallel", "paper")
    assert (solver["tol"], solver["max_iters"]) == (0.2, 7)
    assert [c["schedule"] for c, _ in calls[1:4]] == ["parallel", "sequential", "window:3"]


@pytest.mark.parametrize(
    "option, words",
    [
        ({"schedule": "nonsense"}, "schedule is `nonsense`"),
        ({"tol": -1.0}, "tol is -1"),
        ({"max_iters": 0}, "max_iters is 0: it counts iterations, at least 1"),
    ],
)
def test_a_wrong_setting_of_generate_is_a_sentence(checkpoint, option, words):
    with pytest.raises(GenerationError, match=words):
        generate(checkpoint, "Mary", **option)


def test_a_run_directory_is_compared_and_generates_as_its_export_does(
    tiny_run, tiny_export, tmp_path
):
    options = {"sequences": 1, "length": 8, "schedules": ["window:4"]}
    results = [
        agree(folder, **options, out=tmp_path / "a.json") for folder in (tiny_run, tiny_export)
    ]
    assert results[0]["tight"]["perplexity"] == results[1]["tight"]["perplexity"]
    texts = [generate(folder, "The", max_new_tokens=4) for folder in (tiny_run, tiny_export)]
    assert texts[0] == texts[1]
