"""Looking inside: every number against an oracle of its own; tokens, page, terminal, facade."""

import html
import io
import json
import math
import re
import subprocess
import sys

import pytest
import torch

import fprnn
from lm.cli.main import main
from lm.common.errors import FAILED, UserError
from lm.evaluation.inspection import measure, show
from lm.evaluation.inspection.page import MADE_BY, Inspection, render_page
from lm.evaluation.inspection.tokens import make_tokens, show_bytes
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.exported import load_tokenizer
from lm.runs.metrics import probe

TEXT = "f(g(h(x), [1, 2]))\n  naïve 東 🙂 <b>&amp;</b> $x$"
START = 0  # the id of EOS, which stands before a text
SIZES = dict(vocab_size=264, d_model=16, d_state=4, contractive=0.9, eos_token_id=START)
MODELS = {
    "fp_mamba1": dict(n_layer=2, mixer_rank=2),
    "fp_mamba2": dict(n_layer=1, block="fp_mamba2", headdim=8),
    "fp_rnn": dict(n_layer=1, block="fp_rnn", mixer="dplr", use_short_conv=True),
    "hybrid": dict(n_layer=4, layers=["mamba", "fp_mamba1", "mamba", "fp_mamba1"]),
    "resets": dict(n_layer=1, reset_at_eos=True),
}


def model_of(name: str) -> FPRNNForCausalLM:
    torch.manual_seed(0)
    return FPRNNForCausalLM(FPRNNConfig(**SIZES, **MODELS[name])).eval()


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return load_tokenizer(byte_tokenizer)


def inspected(name: str, tokenizer) -> tuple[FPRNNForCausalLM, Inspection]:
    model = model_of(name)
    return model, measure.inspect_text(model, tokenizer, TEXT, name)


@pytest.mark.parametrize("name", MODELS)
def test_iterations_are_those_of_the_probe_and_losses_those_of_the_model(name, tokenizer):
    model, found = inspected(name, tokenizer)
    ids = torch.tensor([[token.id for token in found.tokens]])
    assert ids[0, 0] == START and found.has_start

    report = probe(model, ids)
    assert torch.equal(found.layers.iterations, report.token_iters[:, 0])
    assert torch.equal(found.layers.converged, report.converged[:, 0])
    solved = [i for i, layer in enumerate(model.config.layer_list()) if layer.kind != "mamba"]
    assert found.layers.numbers == solved

    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    assert found.mean_loss == pytest.approx(float(output.loss), rel=1e-5)
    bits = float(output.loss) * (ids.shape[1] - 1) / math.log(2) / len(TEXT.encode())
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-5)
    p = output.logits[0].double().softmax(-1)
    for t in range(1, ids.shape[1]):
        assert float(found.loss[t]) == pytest.approx(-math.log(p[t - 1, ids[0, t]]), rel=1e-4)
        entropy = -float((p[t - 1] * p[t - 1].log()).sum())
        assert float(found.entropy[t]) == pytest.approx(entropy, rel=1e-4)
        best = p[t - 1].topk(5)
        assert [guess.id for guess in found.guesses[t]] == best.indices.tolist()
        assert found.guesses[t][0].probability == pytest.approx(float(best.values[0]), rel=1e-4)
    assert math.isnan(found.loss[0]) and found.guesses[0] == []
    assert found.following[0].id == int(p[-1].argmax())


@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_rnn", "hybrid"])
def test_state_norms_are_those_of_the_state_that_token_by_token_is_carried(name, tokenizer):
    model, found = inspected(name, tokenizer)
    state, norms = None, []
    for token in found.tokens:
        with torch.no_grad():
            output = model(input_ids=torch.tensor([[token.id]]), state=state, return_state=True)
        state = output.state
        norms.append([float(state.layers[i].h.norm()) for i in found.layers.numbers])
    torch.testing.assert_close(found.layers.state_norm, torch.tensor(norms).T, rtol=2e-3, atol=1e-5)


def test_the_gate_is_half_of_what_one_reflection_takes_off(tokenizer):
    torch.manual_seed(0)
    sizes = {**SIZES, "contractive": None}
    model = FPRNNForCausalLM(FPRNNConfig(**sizes, n_layer=1, mixer_rank=1, glu_in_loop=True)).eval()
    (block,), hidden = model.fixed_point_blocks(), torch.randn(1, 7, 16)
    found = block.trace_tokens(hidden)
    with torch.no_grad():
        s = block.prepare(hidden)
        y = block.choose_solver(hidden).solve(s).y
        before = torch.nn.functional.pad(y[:, :-1], (0, 0, 1, 0))
        Q = block.mixer.matrix(torch.cat([s.x, before], -1))
    mixing = torch.linalg.matrix_norm(torch.eye(Q.shape[-1]) - Q, ord=2)
    torch.testing.assert_close(found.gate, mixing / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mixer, layer",
    [("kronecker", "gate_proj"), ("monarch", "gate_proj"), ("dplr", "alpha_proj")],
)
def test_gates_are_those_of_the_mixers_own_layer(mixer, layer):
    torch.manual_seed(0)
    config = FPRNNConfig(**{**SIZES, "contractive": None}, mixer=mixer, mixer_rank=4, n_layer=1)
    (block,), P = FPRNNForCausalLM(config).fixed_point_blocks(), torch.randn(3, 64)
    with torch.no_grad():
        weights = block.mixer.weights(P)
        raw = torch.nn.functional.linear(P, weights.first, weights.bias)
        expected = torch.sigmoid(getattr(block.mixer, layer)(P))
        torch.testing.assert_close(block.mixer.gates(raw), expected)


def test_mixers_without_gates_have_none():
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, n_layer=1, mixer="nonselective")).eval()
    assert model.fixed_point_blocks()[0].trace_tokens(torch.randn(1, 3, 16)).gate is None
    _, layers = measure.run_with_probe(model, torch.tensor([[1, 2, 3]]))
    assert layers.gate.isnan().all()


def test_the_decay_is_the_rate_at_which_a_state_fades():
    """With nothing written to it, FP-Mamba's state becomes exp(Δ A) times what it was."""
    model = model_of("fp_mamba1")
    block, hidden = model.fixed_point_blocks()[0], torch.randn(1, 5, 16)
    found = block.trace_tokens(hidden)
    with torch.no_grad():
        s = block.prepare(hidden)
        kept = []
        for t in range(5):
            window = s.cut(t, t + 1, None)
            ones = torch.ones(1, block.config.d_inner, block.config.d_state)
            state = fprnn_state(ones)
            window = window._replace(seqs=window.seqs._replace(state=state))
            parts = block.select_parameters(window, window.projections.rows(state.y[:, None]))
            _, h = block.run_recurrence(window, parts, torch.zeros_like(window.x))
            kept.append(float(h.mean()))
    torch.testing.assert_close(found.decay[0], torch.tensor(kept), rtol=1e-4, atol=1e-6)


def fprnn_state(h):
    from lm.model.state import BlockState

    y = torch.zeros(1, h.shape[1])
    return BlockState(y, y, h, ())


def test_a_document_that_starts_keeps_nothing(tokenizer):
    _, found = inspected("resets", tokenizer)
    assert found.layers.decay[0, 1] == 0 and (found.layers.decay[0, 2:] > 0).all()


def test_losses_are_lm_evals(small_export):
    """By lm-eval's own window over the text, and its own start token."""
    from lm_eval import utils

    model = fprnn.load(small_export)
    found = model.inspect(TEXT)
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ((context, target),) = utils.get_rolling_token_windows(ids, START, 2048, 1)
    with torch.no_grad():
        logits = model.model(torch.tensor([[*context, *target][:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None])[:, 0]
    torch.testing.assert_close(-found.loss[1:], expected, rtol=1e-4, atol=1e-5)


def test_tokens_show_what_cannot_be_seen():
    shown = {
        b" a\n\t": "·a↵→",
        "東".encode()[:2]: "⟨E6⟩⟨9D⟩",
        b"a\x00\xff": "a⟨U+0000⟩⟨FF⟩",
        "\u202e\u200b\u00a0".encode(): "⟨U+202E⟩⟨U+200B⟩⟨U+00A0⟩",
    }
    assert {raw: show_bytes(raw) for raw in shown} == shown
    whole = "a東🙂\n".encode()
    tokens = make_tokens([0, 1, 2, 3], [whole[:2], whole[2:5], whole[5:8], whole[8:]])
    assert [token.ends_line for token in tokens] == [False, False, False, True]


def test_the_page_holds_every_token_and_number_and_nothing_of_the_text_as_markup(tokenizer):
    _, found = inspected("fp_mamba1", tokenizer)
    text = render_page(found)
    tokens = re.findall(r"<span class='token[^>]*>(.*?)</span>", text)
    assert [html.unescape(token) for token in tokens] == [token.shown for token in found.tokens]
    assert not re.search(r"[<>]|&(?!\w+;|#\d+;)", "".join(tokens))
    data = json.loads(text.split("id='data'>")[1].split("</script>")[0])
    assert [layer["iterations"] for layer in data["layers"]] == found.layers.iterations.tolist()
    names = [way["name"] for way in data["colourings"]]
    assert names == [
        "ℓ*, mean over layers",
        "ℓ*, layer 0",
        "ℓ*, layer 1",
        "loss of the token, nats",
        "entropy of the token, nats",
    ]
    assert data["colourings"][3]["values"][1:] == pytest.approx(found.loss[1:].tolist())
    assert data["colourings"][3]["values"][0] is None
    assert not re.search(r"<link|src=|@import|url\((?!#)|href=['\"](?!#)", text)
    frame = found._repr_html_()
    assert frame.startswith("<iframe srcdoc='") and frame.count("'") == 4


def test_a_model_without_a_solver_has_loss_and_entropy_and_says_so(tokenizer, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=START,
        bos_token_id=START,
    )
    found = measure.inspect_text(LlamaForCausalLM(config).eval(), tokenizer, "a (b)", "llama")
    assert found.layers is None and found.scored == 5
    text = render_page(found)
    assert "no layer that is solved" in text
    show.show(found, tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert "there is no ℓ*" in printed and "ℓ*, mean" not in printed


def test_a_terminal_has_the_text_and_its_layers(tokenizer, tmp_path, capsys):
    _, found = inspected("fp_mamba1", tokenizer)
    show.show(found, tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "ℓ*, mean" in printed
    assert "f(g(h(x),·[1,·2]))↵\n" in printed and "page: " in printed


@pytest.mark.parametrize(
    "text, words",
    [("", "is empty"), ("\ud800", "not Unicode"), ("x" * 3000, "3,000 tokens, and evaluation")],
)
def test_texts_that_cannot_be_read_are_refused(tokenizer, text, words):
    with pytest.raises(UserError, match=words):
        measure.inspect_text(model_of("resets"), tokenizer, text, "x")


def test_text_that_spells_a_special_token_stays_text(tokenizer):
    start, ids = measure.encode(model_of("resets"), tokenizer, "<eos>")
    assert start == [START] and len(ids) == 5


def test_without_a_start_token_the_first_token_has_no_loss(byte_tokenizer):
    tokenizer = load_tokenizer(byte_tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    model = model_of("resets")
    found = measure.inspect_text(model, tokenizer, "abc", "x")
    assert len(found.tokens) == 3 and found.scored == 2 and found.bits_per_byte is None


def test_a_model_is_described_in_words():
    words = measure.describe_model(model_of("hybrid"))
    assert "mamba', 'fp_mamba1'], mixer householder, layers 4, d_model 16, " in words
    assert measure.describe_model(model_of("fp_rnn")).startswith(
        "fp_rnn, mixer dplr, layers 1, d_model"
    )


def test_a_run_directory_is_loaded_like_its_export(tiny_run, tiny_export):
    run, export = fprnn.load(tiny_run), fprnn.load(tiny_export)
    mine, theirs = run.inspect("a list of (x)"), export.inspect("a list of (x)")
    assert torch.equal(mine.loss[1:], theirs.loss[1:])
    assert torch.equal(mine.layers.iterations, theirs.layers.iterations)
    assert run.name == "tiny" and export.name == "hf" and "layers 2" in repr(run)
    options = dict(max_new_tokens=5, seed=3)
    assert run.generate("The", **options) == export.generate("The", **options)


def test_the_command_writes_a_page_and_replaces_only_its_own(small_export, tmp_path, capsys):
    out = tmp_path / "p.html"
    command = ["inspect", str(small_export), "--out", str(out), "f(x)", "y"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "<eos>f(x)·y" in printed and f"page: {out}" in printed
    assert MADE_BY in out.read_text(encoding="utf-8")
    assert main([*command[:-1], "z"]) == 0 and "f(x)·z" in capsys.readouterr().out
    out.write_text("mine")
    assert main(command) == 1 and out.read_text() == "mine"
    assert "is there already" in capsys.readouterr().err


def test_the_command_takes_standard_input(small_export, tmp_path, capsys, monkeypatch):
    out = ["--out", str(tmp_path / "p.html")]
    given = io.TextIOWrapper(io.BytesIO("é-x".encode()))
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["inspect", str(small_export), *out, "-"]) == 0
    assert "<eos>⟨C3⟩⟨A9⟩-x" in capsys.readouterr().out
    assert main(["inspect", str(small_export), *out, "--", "-x"]) == 0
    assert "<eos>-x" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words", [([], "no text is given"), (["a", "--out", "."], "is a folder")]
)
def test_mistakes_are_one_line(small_export, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(small_export), *arguments]) == FAILED
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_export_is_inspected_with_what_the_package_itself_depends_on(small_export, tmp_path):
    code = (
        "import sys\n"
        "for name in ('pydantic', 'rich', 'matplotlib', 'deepspeed', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import fprnn\n"
        "found = fprnn.load(sys.argv[1]).inspect('f(x)')\n"
        "print(found, found.to_html(sys.argv[2]))\n"
    )
    arguments = [small_export, tmp_path / "p.html"]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Inspection(small: 5 tokens, loss ")
    assert MADE_BY in (tmp_path / "p.html").read_text(encoding="utf-8")
