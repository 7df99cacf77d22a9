"""The paper's procedure in benchmarks/paper.py against golden vectors of the authors' code.

The vectors are in tests/golden, and in ../shared/golden if it exists.
"""

from pathlib import Path

import pytest
import torch

from benchmarks import paper
from tests.golden import HERE, SETTINGS, Case, relative_error
from tests.golden.reference import reference_name
from tests.golden.test_golden import SHARED
from tests.test_layers import find_imports

NAMES = ("m1_hh1", "m1_hh1_symm", "m1_hh4_lmcfg", "lm_hh1_default")
PATHS = [path for folder in (HERE, SHARED) for path in sorted(folder.glob("*.json"))]
CASES = {path.stem: path for path in reversed(PATHS) if path.stem in NAMES}
MODES = {"train": paper.TRAINING_RULE, "eval": paper.EVALUATION_RULE}


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request):
    case = Case(CASES[request.param])
    case.module.double().load_state_dict({k: v.double() for k, v in case.state.items()})
    return case


def read_gradients(case, tag):
    """Return {our name: the authors' gradient} for the parameters."""
    stored, _ = case.gradients(tag)
    return {
        reference_name(name.removeprefix("grad/")): value
        for name, value in stored.items()
        if name.startswith("grad/")
    }


def run_case(case, rule):
    """Run a case.

    Returns:
        The output or logits, the scalar that the golden gradients differentiate, the number of
        iterations and, for a block, the iterate.
    """
    if case.is_lm:
        model = paper.LanguageModel(case.module)
        model.rule = rule
        ids, labels = (case.tensors[f"input/{name}"] for name in ("input_ids", "labels"))
        out = model(ids, shift_labels=labels)
        return out.logits, out.loss, out.fixed_point.evaluations.int().tolist(), None
    block = paper.Block(dict(case.module.named_parameters()), case.module.config)
    u = case.tensors["input/hidden_states"].double()
    out, solution = block.forward(u, rule)
    scalar = (out * case.tensors["input/cotangent"].double()).sum()
    return out, scalar, solution.iterations, solution.y_bld


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["tight_f64", "default_f64"])
def test_procedure_matches_the_authors_code(case, precision, mode):
    tag = f"{precision}_{mode}"
    setting = SETTINGS[precision]
    case.module.zero_grad()
    max_iters = setting.max_iters if mode == "train" else 1000
    out, scalar, iterations, y = run_case(
        case, MODES[mode]._replace(tol=setting.tol, max_iters=max_iters)
    )

    # The authors count one more than they evaluate.
    theirs = case.record["iters"][tag]
    assert iterations == ([n - 1 for n in theirs] if case.is_lm else theirs - 1)
    name = "logits" if case.is_lm else "output"
    assert relative_error(out.detach(), case.tensors[f"{tag}/{name}"]) <= setting.values
    if y is not None and f"{tag}/y_star" in case.tensors:
        assert relative_error(y, case.tensors[f"{tag}/y_star"]) <= setting.values

    expected = read_gradients(case, tag)
    assert bool(expected) == (tag == "tight_f64_train")
    if expected:
        scalar.backward()
        ours = {n: p.grad for n, p in case.module.named_parameters() if p.grad is not None}
        assert ours.keys() == expected.keys()
        for name, gradient in expected.items():
            assert relative_error(ours[name], gradient) <= setting.gradients, name


def test_cases_of_the_repository_are_included():
    assert {"m1_hh1", "lm_hh1_default"} <= CASES.keys()


def test_procedure_imports_nothing_of_ours():
    imported = find_imports(Path(paper.__file__).read_text(encoding="utf-8"), "benchmarks.paper")
    assert imported == {"__future__", "collections.abc", "typing", "torch", "torch.nn.functional"}


def test_unsupported_mixer_is_refused():
    case = Case(HERE / "m1_dplr2.json")
    with pytest.raises(ValueError, match="mixer 'householder', not 'dplr'"):
        paper.Block(case.state, case.module.config)


def test_greedy_decoding_chooses_the_most_likely_token():
    torch.manual_seed(0)
    case = Case(CASES["lm_hh1_default"])
    case.module.float().load_state_dict({k: v.float() for k, v in case.state.items()})
    model = paper.LanguageModel(case.module).eval()
    prompt = case.tensors["input/input_ids"][:1, :4]
    new = model.greedy(prompt, 3)
    text = torch.cat([prompt, new], 1)
    for position in range(3):
        logits = model(text[:, : 4 + position]).logits[:, -1]
        assert new[:, position].equal(logits.argmax(-1))
