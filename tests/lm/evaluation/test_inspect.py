"""Inspection: each number equals an independent computation; tokens, page, terminal, API."""

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
START = 0  # id of EOS, which is put before a text
SIZES = dict(vocab_size=264, d_model=16, d_state=4, contractive=0.9, eos_token_id=START)
MODELS = {
    "fp_mamba1": dict(n_layer=2, mixer_rank=2),
    "fp_mamba2": dict(n_layer=1, block="fp_mamba2", headdim=8),
    "fp_rnn": dict(n_layer=1, block="fp_rnn", mixer="dplr", use_short_conv=True),
    "hybrid": dict(n_layer=4, layers=["mamba", "fp_mamba1", "mamba", "fp_mamba1"]),
    "resets": dict(n_layer=1, reset_at_eos=True),
}


def make_model(name: str) -> FPRNNForCausalLM:
    torch.manual_seed(0)
    return FPRNNForCausalLM(FPRNNConfig(**SIZES, **MODELS[name])).eval()


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return load_tokenizer(byte_tokenizer)


def inspect_model(name: str, tokenizer) -> tuple[FPRNNForCausalLM, Inspection]:
    model = make_model(name)
    return model, measure.inspect_text(model, tokenizer, TEXT, name)


@pytest.mark.parametrize("name", MODELS)
def test_iterations_equal_the_probe_and_losses_the_model(name, tokenizer):
    model, inspection = inspect_model(name, tokenizer)
    ids = torch.tensor([[token.id for token in inspection.tokens]])
    assert ids[0, 0] == START and inspection.has_start

    report = probe(model, ids)
    assert torch.equal(inspection.layers.iterations, report.token_iters[:, 0])
    assert torch.equal(inspection.layers.converged, report.converged[:, 0])
    layers = model.config.layer_list()
    assert inspection.layers.indices == [i for i, x in enumerate(layers) if x.kind != "mamba"]

    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    assert inspection.mean_loss == pytest.approx(float(output.loss), rel=1e-5)
    bits = float(output.loss) * (ids.shape[1] - 1) / math.log(2) / len(TEXT.encode())
    assert inspection.bits_per_byte == pytest.approx(bits, rel=1e-5)
    p = output.logits[0].double().softmax(-1)
    for t in range(1, ids.shape[1]):
        assert float(inspection.loss[t]) == pytest.approx(-math.log(p[t - 1, ids[0, t]]), rel=1e-4)
        entropy = -float((p[t - 1] * p[t - 1].log()).sum())
        assert float(inspection.entropy[t]) == pytest.approx(entropy, rel=1e-4)
        top = p[t - 1].topk(5)
        assert [guess.id for guess in inspection.guesses[t]] == top.indices.tolist()
        probability = inspection.guesses[t][0].probability
        assert probability == pytest.approx(float(top.values[0]), rel=1e-4)
    assert math.isnan(inspection.loss[0]) and inspection.guesses[0] == []
    assert inspection.next_guesses[0].id == int(p[-1].argmax())


@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_rnn", "hybrid"])
def test_state_norms_equal_those_of_token_by_token_decoding(name, tokenizer):
    model, inspection = inspect_model(name, tokenizer)
    state, norms = None, []
    for token in inspection.tokens:
        with torch.no_grad():
            output = model(input_ids=torch.tensor([[token.id]]), state=state, return_state=True)
        state = output.state
        norms.append([float(state.layers[i].h.norm()) for i in inspection.layers.indices])
    torch.testing.assert_close(
        inspection.layers.state_norm, torch.tensor(norms).T, rtol=2e-3, atol=1e-5
    )


def test_gate_is_half_the_norm_of_one_reflection(tokenizer):
    torch.manual_seed(0)
    sizes = {**SIZES, "contractive": None}
    model = FPRNNForCausalLM(FPRNNConfig(**sizes, n_layer=1, mixer_rank=1, glu_in_loop=True)).eval()
    (block,), hidden = model.fixed_point_blocks(), torch.randn(1, 7, 16)
    trace = block.trace_tokens(hidden)
    with torch.no_grad():
        static = block.prepare(hidden)
        y = block.choose_solver(hidden).solve(static).y
        previous_y = torch.nn.functional.pad(y[:, :-1], (0, 0, 1, 0))
        Q = block.mixer.matrix(torch.cat([static.x, previous_y], -1))
    mixing_norm = torch.linalg.matrix_norm(torch.eye(Q.shape[-1]) - Q, ord=2)
    torch.testing.assert_close(trace.gate, mixing_norm / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mixer, layer", [("kronecker", "gate_proj"), ("monarch", "gate_proj"), ("dplr", "alpha_proj")]
)
def test_gates_equal_the_output_of_the_gate_layer(mixer, layer):
    torch.manual_seed(0)
    config = FPRNNConfig(**{**SIZES, "contractive": None}, mixer=mixer, mixer_rank=4, n_layer=1)
    (block,), inputs = FPRNNForCausalLM(config).fixed_point_blocks(), torch.randn(3, 64)
    with torch.no_grad():
        weights = block.mixer.weights(inputs)
        projected = torch.nn.functional.linear(inputs, weights.matrix, weights.bias)
        expected = torch.sigmoid(getattr(block.mixer, layer)(inputs))
        torch.testing.assert_close(block.mixer.gates(projected), expected)


def test_gate_is_nan_for_mixers_without_gates():
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, n_layer=1, mixer="nonselective")).eval()
    assert model.fixed_point_blocks()[0].trace_tokens(torch.randn(1, 3, 16)).gate is None
    _, layers = measure.run_with_probe(model, torch.tensor([[1, 2, 3]]))
    assert layers.gate.isnan().all()


def test_decay_is_the_factor_on_an_unwritten_state():
    """With an input of 0, FP-Mamba's state is multiplied by exp(Δ A)."""
    model = make_model("fp_mamba1")
    block, hidden = model.fixed_point_blocks()[0], torch.randn(1, 5, 16)
    trace = block.trace_tokens(hidden)
    with torch.no_grad():
        static = block.prepare(hidden)
        means = []
        for t in range(5):
            window = static.cut(t, t + 1, None)
            state = make_state_of_ones(block.config)
            window = window._replace(seqs=window.seqs._replace(state=state))
            parts = block.select_parameters(window, window.projections.rows(state.y[:, None]))
            _, h = block.run_recurrence(window, parts, torch.zeros_like(window.x))
            means.append(float(h.mean()))
    torch.testing.assert_close(trace.decay[0], torch.tensor(means), rtol=1e-4, atol=1e-6)


def make_state_of_ones(config):
    from lm.model.state import BlockState

    y, h = torch.zeros(1, config.d_inner), torch.ones(1, config.d_inner, config.d_state)
    return BlockState(y, y, h, ())


def test_decay_is_zero_at_the_start_of_a_document(tokenizer):
    _, inspection = inspect_model("resets", tokenizer)
    assert inspection.layers.decay[0, 1] == 0 and (inspection.layers.decay[0, 2:] > 0).all()


def test_losses_equal_those_of_lm_eval(small_export):
    """lm-eval's function makes the window and the start token."""
    from lm_eval import utils

    model = fprnn.load(small_export)
    inspection = model.inspect(TEXT)
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ((context, target),) = utils.get_rolling_token_windows(ids, START, 2048, 1)
    with torch.no_grad():
        logits = model.model(torch.tensor([[*context, *target][:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None])[:, 0]
    torch.testing.assert_close(-inspection.loss[1:], expected, rtol=1e-4, atol=1e-5)


def test_tokens_show_spaces_and_incomplete_characters():
    readable = {
        b" a\n\t": "·a↵→",
        "東".encode()[:2]: "⟨E6⟩⟨9D⟩",
        b"a\x00\xff": "a⟨U+0000⟩⟨FF⟩",
        "\u202e\u200b\u00a0".encode(): "⟨U+202E⟩⟨U+200B⟩⟨U+00A0⟩",
    }
    assert {raw: show_bytes(raw) for raw in readable} == readable
    raw = "a東🙂\n".encode()
    tokens = make_tokens([0, 1, 2, 3], [raw[:2], raw[2:5], raw[5:8], raw[8:]])
    assert [token.ends_line for token in tokens] == [False, False, False, True]


def test_page_has_all_tokens_and_escapes_markup(tokenizer):
    _, inspection = inspect_model("fp_mamba1", tokenizer)
    text = render_page(inspection)
    tokens = re.findall(r"<span class='token[^>]*>(.*?)</span>", text)
    labels = [token.label for token in inspection.tokens]
    assert [html.unescape(token) for token in tokens] == labels
    assert not re.search(r"[<>]|&(?!\w+;|#\d+;)", "".join(tokens))
    data = json.loads(text.split("id='data'>")[1].split("</script>")[0])
    iterations = [layer["iterations"] for layer in data["layers"]]
    assert iterations == inspection.layers.iterations.tolist()
    names = [colouring["name"] for colouring in data["colourings"]]
    assert names == [
        "ℓ*, mean over layers",
        "ℓ*, layer 0",
        "ℓ*, layer 1",
        "loss of the token, nats",
        "entropy of the token, nats",
    ]
    assert data["colourings"][3]["values"][1:] == pytest.approx(inspection.loss[1:].tolist())
    assert data["colourings"][3]["values"][0] is None
    assert not re.search(r"<link|src=|@import|url\((?!#)|href=['\"](?!#)", text)
    frame = inspection._repr_html_()
    assert frame.startswith("<iframe srcdoc='") and frame.count("'") == 4


def test_model_without_solver_has_loss_and_entropy_only(tokenizer, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=264, **sizes, eos_token_id=START, bos_token_id=START)
    inspection = measure.inspect_text(LlamaForCausalLM(config).eval(), tokenizer, "a (b)", "llama")
    assert inspection.layers is None and inspection.scored_count == 5
    text = render_page(inspection)
    assert "no fixed-point layer" in text
    show.show(inspection, tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert "therefore no ℓ*" in printed and "mean ℓ*" not in printed


def test_terminal_output_has_the_text_and_a_table_of_layers(tokenizer, tmp_path, capsys):
    _, inspection = inspect_model("fp_mamba1", tokenizer)
    show.show(inspection, tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "mean ℓ*" in printed
    assert "f(g(h(x),·[1,·2]))↵\n" in printed and "page: " in printed


@pytest.mark.parametrize(
    "text, message",
    [("", "is empty"), ("\ud800", "not Unicode"), ("x" * 3000, "3,000 tokens, but the model")],
)
def test_invalid_texts_are_refused(tokenizer, text, message):
    with pytest.raises(UserError, match=message):
        measure.inspect_text(make_model("resets"), tokenizer, text, "x")


def test_text_and_start_token_fill_the_model_at_most(tokenizer):
    model = make_model("resets")
    model.config.max_position_embeddings = 4
    start, ids = measure.encode(model, tokenizer, "abc")
    assert len(start) + len(ids) == 4
    with pytest.raises(UserError, match="4 tokens, but the model reads at most 3 "):
        measure.encode(model, tokenizer, "abcd")


def test_spelled_special_token_is_tokenized_as_text(tokenizer):
    start, ids = measure.encode(make_model("resets"), tokenizer, "<eos>")
    assert start == [START] and len(ids) == 5


def test_first_token_has_no_loss_without_a_start_token(byte_tokenizer):
    tokenizer = load_tokenizer(byte_tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    model = make_model("resets")
    inspection = measure.inspect_text(model, tokenizer, "abc", "x")
    assert (
        len(inspection.tokens) == 3
        and inspection.scored_count == 2
        and inspection.bits_per_byte is None
    )


def test_model_description_names_layers_and_sizes():
    description = measure.describe_model(make_model("hybrid"))
    assert "mamba', 'fp_mamba1'], mixer householder, layers 4, d_model 16, " in description
    description = measure.describe_model(make_model("fp_rnn"))
    assert description.startswith("fp_rnn, mixer dplr, layers 1, d_model")


def test_run_and_its_export_give_the_same_inspection(tiny_run, tiny_export):
    run, export = fprnn.load(tiny_run), fprnn.load(tiny_export)
    from_run, from_export = run.inspect("a list of (x)"), export.inspect("a list of (x)")
    assert torch.equal(from_run.loss[1:], from_export.loss[1:])
    assert torch.equal(from_run.layers.iterations, from_export.layers.iterations)
    assert run.name == "tiny" and export.name == "hf" and "layers 2" in repr(run)
    options = dict(max_new_tokens=5, seed=3)
    assert run.generate("The", **options) == export.generate("The", **options)


def test_command_replaces_only_pages_that_it_wrote(small_export, tmp_path, capsys):
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


def test_command_reads_standard_input(small_export, tmp_path, capsys, monkeypatch):
    out = ["--out", str(tmp_path / "p.html")]
    stdin = io.TextIOWrapper(io.BytesIO("é-x".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["inspect", str(small_export), *out, "-"]) == 0
    assert "<eos>⟨C3⟩⟨A9⟩-x" in capsys.readouterr().out
    assert main(["inspect", str(small_export), *out, "--", "-x"]) == 0
    assert "<eos>-x" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message", [([], "no text is given"), (["a", "--out", "."], "is a folder")]
)
def test_invalid_arguments_give_a_one_line_error(
    small_export, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(small_export), *arguments]) == FAILED
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_inspection_needs_only_the_base_dependencies(small_export, tmp_path):
    code = (
        "import sys\n"
        "for name in ('pydantic', 'rich', 'matplotlib', 'deepspeed', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import fprnn\n"
        "inspection = fprnn.load(sys.argv[1]).inspect('f(x)')\n"
        "print(inspection, inspection.to_html(sys.argv[2]))\n"
    )
    arguments = [small_export, tmp_path / "p.html"]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Inspection(small: 5 tokens, loss ")
    assert MADE_BY in (tmp_path / "p.html").read_text(encoding="utf-8")
