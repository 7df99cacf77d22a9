"""Golden vectors of the paper's own code, run against ours (docs/model.md)."""

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from lm.model import fixed_point, solver
from lm.model.blocks import build_block
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.reference import ReferenceCheckpointError, reference_config, reference_name

HERE = Path(__file__).parent
# tag without its mode → (tolerance of the solve, ℓmax, largest relative error allowed). In fp32 at
# tol 0.1 the iterate has not converged and rounding is still amplified: the counts are the check.
SETTINGS = {
    "exact_f64": (1e-12, 1000, 1e-9),
    "tight_f64": (1e-6, 1000, 1e-9),
    "tight_f32": (1e-5, 1000, 2e-4),
    "default_f64": (0.1, 100, 1e-9),
    "default_f32": (0.1, 100, 1e-2),
}


class NotYet(Exception):
    """A case whose block or mixer is not built yet."""


@dataclass
class Result:
    """What one setting (tag) of one case gave."""

    tag: str
    errors: dict[str, float] = field(default_factory=dict)  # quantity → largest relative error
    iterations: list[int] = field(default_factory=list)  # per layer, loop iterations + 1
    expected_iterations: list[int] = field(default_factory=list)
    limit: float = 0.0
    exact_count: bool = False  # the iteration counts must be equal

    @property
    def failures(self):
        found = [f"{k} {v:.1e} > {self.limit:g}" for k, v in self.errors.items()
                 if not v <= self.limit]  # fmt: skip
        if self.exact_count and self.iterations != self.expected_iterations:
            found.append(f"iterations {self.iterations}, not {self.expected_iterations}")
        return found


def relative_error(ours, theirs):
    """‖ours − theirs‖∞ / ‖theirs‖∞."""
    if ours.shape != theirs.shape:
        return float("inf")
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300)).item()


@contextmanager
def recorded():
    """Inside, every solve appends (y_star, trace) to the list yielded."""
    solves = []

    def recording(f, y, rule):
        trace = []
        solution = solver.solve_paper(f, y, rule, trace=trace)
        solves.append((solution.y, trace))
        return solution

    fixed_point.solve_paper = recording
    try:
        yield solves
    finally:
        fixed_point.solve_paper = solver.solve_paper


def build(case):
    """The module of a case, with parameters still to be loaded.

    Raises:
        NotYet: its class or mixer is not built yet.
    """
    try:
        config = reference_config(case)
    except ReferenceCheckpointError as e:
        raise NotYet(str(e)) from None
    if case["cls"] == "FPLMHeadModel":
        return FPRNNForCausalLM(config)
    block = build_block(config)
    if case.get("fixed_point_only"):  # the case ends before the output gate
        block.finish = lambda s, y: y
    return block


def run_tag(case, tag, module, tensors, grads):
    """One setting of one case → Result."""
    tol, max_iters, limit = SETTINGS[tag.rsplit("_", 1)[0]]
    dtype = torch.float64 if "f64" in tag else torch.float32
    state = {reference_name(k[6:]): v.to(dtype)
             for k, v in tensors.items() if k.startswith("param/")}  # fmt: skip
    is_lm = case["cls"] == "FPLMHeadModel"
    if is_lm:
        state["lm_head.weight"] = state["backbone.embeddings.weight"]
    module = module.to(dtype)
    module.load_state_dict(state, strict=True)
    if is_lm:
        module.tie_weights()
    module.zero_grad()
    module.train(tag.endswith("train"))
    module.config.tol, module.config.max_iters = tol, max_iters
    expected = case["iters"][tag]
    result = Result(tag, limit=limit, exact_count=tag.startswith("default"))
    result.expected_iterations = expected if isinstance(expected, list) else [expected]

    def compare(name, ours, key, source=tensors):
        if f"{tag}/{key}" in source:
            result.errors[name] = relative_error(ours.detach(), source[f"{tag}/{key}"])

    with recorded() as solves:
        if is_lm:
            out = module(tensors["input/input_ids"], shift_labels=tensors["input/labels"])
            scalar = out.loss
            compare("logits", out.logits, "logits")
            compare("loss", out.loss.reshape(1), "loss")
        else:
            u = tensors["input/hidden_states"].to(dtype).requires_grad_()
            out, _ = module(u)
            scalar = (out * tensors["input/cotangent"].to(dtype)).sum()
            compare("output", out, "y_final" if case.get("fixed_point_only") else "output")
    for i, (y_star, _) in enumerate(solves):
        compare(f"y_star{i}" if is_lm else "y_star", y_star,
                f"layer{i}/y_star" if is_lm else "y_star")  # fmt: skip
    result.iterations = [len(trace) + 1 for _, trace in solves]
    wanted = {reference_name(k.split("/grad/")[1]): k.split("/", 1)[1]
              for k in grads if k.startswith(f"{tag}/grad/")}  # fmt: skip
    if wanted and not case.get("fixed_point_only"):
        scalar.backward()
        parameters = dict(module.named_parameters())
        assert set(wanted) == set(parameters), set(wanted) ^ set(parameters)
        for name, key in wanted.items():
            grad = parameters[name].grad
            compare(f"grad {name}", grad, key, grads)
        if not is_lm:
            compare("grad input", u.grad, "grad_input", grads)
    return result


def run_solver(case, tensors):
    """The solver alone on y → a y + c: final y, every trace and the iteration counts."""
    results, a, c = [], tensors["a"][:, None, None], tensors["c"]
    for name, expected in case.items():
        mode, setting, rest = name.split(".", 2)  # e.g. train.m1_q25.th0.1.mi100
        tol, limit = re.fullmatch(r"th(.+)\.mi(\d+)", rest).groups()
        quantile = int(re.search(r"_q(\d+)", setting)[1]) / 100
        undamped = setting.endswith("nodamp")
        rule = solver.Rule(
            tol=float(tol),
            max_iters=int(limit) if mode == "train" else 1000,
            quantile=1 - quantile if mode == "train" else 1.0,
            stepsize=1.0 if undamped else 0.99,
            stepsize_decay=1.0 if undamped else 0.9,
        )
        trace = []
        y = solver.solve_paper(lambda y: a * y + c, torch.zeros_like(c), rule, trace).y
        result = Result(name, limit=1e-9, exact_count=True)
        result.iterations = [len(trace) + 1]
        result.expected_iterations = [expected["recorded_fixed_point_iter"]]
        result.errors["y_star"] = relative_error(y, tensors[f"{name}/y"])
        for i, key in enumerate(["residual", "min_residual", "stepsize"]):
            if f"{name}/{key}" in tensors and len(tensors[f"{name}/{key}"]) == len(trace):
                ours = torch.stack([row[i] for row in trace])
                result.errors[key] = relative_error(ours, tensors[f"{name}/{key}"])
        results.append(result)
    return results


def run_case(path):
    """Every setting of the case at `path` (its .json) → list of Result."""
    path = Path(path)
    case = json.loads(path.read_text())
    if "cls" not in case:
        return run_solver(case, load_file(path.with_suffix(".safetensors")))
    module = build(case)
    tensors = load_file(path.with_suffix(".safetensors"))
    grads = {}
    for kind in ("exact", "train"):
        file = path.with_suffix(f".grads_{kind}.safetensors")
        if file.exists():
            grads.update(load_file(file))
    tags = [t for t in case["iters"] if any(k.startswith(f"{t}/") for k in tensors)]
    return [run_tag(case, tag, module, tensors, grads) for tag in tags]
