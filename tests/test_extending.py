"""Custom mixers and tasks: the files of docs/extending.md are written, trained and exported."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import fprnn
from benchmarks.check_mixer import check_mixer
from lm.common.errors import ConfigError
from lm.config.load import build as build_config
from lm.config.schema import Config
from lm.export.export import ExportError, export, write_export
from lm.model import mixer_base
from lm.model.checksums import delete_sums
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import MIXERS
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.training import init_from
from lm.training.build import build_model
from synthetic import config as synthetic_config
from synthetic import tasks
from synthetic.evaluate import evaluate_run
from synthetic.train import train as train_synthetic
from tests import running
from tests.hf.test_hf_export import elsewhere
from tests.running import ROOT

MIXER = "my_mixer:PlaneRotation"
SIZES = {"vocab_size": 40, "d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8}


def page_files() -> dict[str, str]:
    """Return the text of each file in the page, whose blocks begin with the file name."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    return dict(re.findall(r"```\w+\n# ([\w.]+)\n(.*?)```", page, re.S))


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Working directory with the page's files; their registrations are removed afterwards."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in page_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loaded_modules = set(sys.modules)
    for register in (mixer_base.MIXERS, tasks.TASKS):
        for name, cls in list(register.items()):
            monkeypatch.setitem(register, name, cls)  # restored if a test replaces it
    yield folder
    for name in [n for n in set(sys.modules) - loaded_modules if n.startswith(("my_", "evil"))]:
        del sys.modules[name]
    for register, home in ((mixer_base.MIXERS, "lm."), (tasks.TASKS, "synthetic.")):
        for name in [n for n, cls in register.items() if not cls.__module__.startswith(home)]:
            del register[name]


def make_model(**fields):
    """Build the model of a YAML with these keys of `model`."""
    sizes = {"d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8}
    cfg = build_config({"model": {**sizes, **fields}, "data": {"seq_len": 16}})
    torch.manual_seed(0)
    return build_model(cfg, 40, 2, 0)


def write_variant(folder, name, old, new):
    """Write a copy of one of the page's files as NAME_2.py, with `old` replaced by `new`."""
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(old) >= 1
    # The registered name must differ as well: `@mixer("plane_rotation")`.
    (folder / f"{name}_2.py").write_text(text.replace(old, new).replace('("', '("other_'))


# Mixers.


def test_page_has_the_tested_files():
    assert page_files().keys() == {"my_mixer.py", "my_tasks.py", "lights.yaml"}


def test_config_accepts_exactly_the_built_in_mixers():
    built_in = [n for n, cls in mixer_base.MIXERS.items() if mixer_base.is_built_in(cls)]
    assert list(MIXERS) == built_in and len(built_in) == 7


def test_check_mixer_accepts_the_pages_mixer(page):
    """The checks include the gradient against finite differences of the loss in fp64."""
    findings = {f.name: f for f in check_mixer(MIXER)}
    assert all(f.holds is not False for f in findings.values()), findings
    required = ("gradient of all parameters", "gradient of the mixer's parameters", "causal")
    assert all(findings[name].holds for name in required), findings


def test_mixer_without_low_rank_is_iterated(page):
    write_variant(page, "my_mixer", "low_rank", "turned_plane")
    findings = {f.name: f for f in check_mixer("my_mixer_2:PlaneRotation", "fp_rnn")}
    assert all(f.holds is not False for f in findings.values()), findings
    assert "low_rank is I − Q" not in findings
    assert findings["gradient of the mixer's parameters"].holds


@pytest.mark.parametrize(
    "old, new, check",
    [
        (
            "sin = torch.cos(angle)",
            "sin = angle.detach().cos()",
            "gradient of the mixer's parameters",
        ),
        ("return 2 * torch.sin", "return torch.sin", "bound is at least ‖I − Q‖"),
        ("return v - (", "return v.relu() - (", "Q v is linear in v"),
        ("return v - (", "return v - 0.5 * (", "low_rank is I − Q"),
    ],
    ids=["gradient", "bound", "linear", "low rank"],
)
def test_check_mixer_finds_mistakes(page, old, new, check):
    write_variant(page, "my_mixer", old, new)
    results = {f.name: f.holds for f in check_mixer("my_mixer_2:PlaneRotation", "fp_rnn")}
    assert results[check] is False


def test_mixer_by_registered_name_and_in_a_single_layer(page):
    complete = make_model(mixer=MIXER)
    by_name = FPRNNForCausalLM(FPRNNConfig(**SIZES, mixer="plane_rotation"))
    assert by_name.state_dict().keys() == complete.state_dict().keys()
    layers = ["mamba", {"fp_mamba1": {"mixer": MIXER}}]
    blocks = make_model(layers=layers).fixed_point_blocks()
    assert [type(block.mixer).__name__ for block in blocks] == ["PlaneRotation"]
    assert complete.flops_per_token(1) != make_model().flops_per_token(1)


LOAD = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
ours = [name for name in sys.modules if name.startswith(("lm", "my_"))]
assert all(name.startswith("lm_") for name in ours)  # other packages, such as lm_eval
for path in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    mixer = type(model.fixed_point_blocks()[0].mixer)
    assert mixer.__module__.startswith("transformers_modules"), mixer.__module__
    ids = torch.tensor(json.loads(sys.argv[1]))
    logits = model(ids).logits
    generated = model.generate(ids[:1], max_new_tokens=2, do_sample=False)
    model.save_pretrained(path + "-again")
    again = AutoModelForCausalLM.from_pretrained(path + "-again", trust_remote_code=True).eval()
    assert torch.equal(again(ids).logits, logits)
print(json.dumps([logits.tolist(), generated.tolist(), mixer.__name__]))
"""


def test_export_contains_the_mixers_file(page, tmp_path):
    model = make_model(mixer=MIXER).eval()
    out = write_export(model, tmp_path / "out", None, "rotations", "A test.")
    assert "from .layers import WNLinear, affine_map" in (out / "my_mixer.py").read_text()
    assert "It has a custom mixer" in (out / "README.md").read_text()
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 4, 4, 11]])
    with torch.no_grad():
        expected = model(ids).logits
        generated = model.generate(ids[:1], max_new_tokens=2, do_sample=False)
    (logits, generated_ids, name), _ = elsewhere(LOAD, tmp_path, json.dumps(ids.tolist()), str(out))
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-5)
    assert generated_ids == generated.tolist() and name == "PlaneRotation"
    # In this process, which has our package: its own code runs only if it is trusted.
    from lm.runs.exported import LoadError, load_model

    with pytest.raises(LoadError, match=r"needs code of its own \(.*--trust"):
        load_model(out)
    again = load_model(out, trust=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected)
    assert type(again).__module__.startswith("transformers_modules")
    ours = FPRNNForCausalLM.from_pretrained(out).eval()  # this process has imported my_mixer
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, expected)


def test_loading_a_checkpoint_imports_no_module(page, tmp_path):
    """Neither config.json nor the checkpoint's code import a module unless it is trusted."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (page / "evil.py").write_text("raise SystemExit('it ran')\n")
    config = FPRNNConfig(**SIZES, mixer="evil:Mixer")
    with pytest.raises(ValueError, match="configuration of a model imports no module"):
        FPRNNForCausalLM(config)
    plain = write_export(FPRNNForCausalLM(FPRNNConfig(**SIZES)), tmp_path / "plain", None, "x", "")
    described = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**described, "mixer": "evil:Mixer"}))
    delete_sums(plain)  # an attacker can update the checksums
    with pytest.raises(ValueError, match="mixer `evil:Mixer` is not registered"):
        AutoModelForCausalLM.from_pretrained(plain)
    custom = write_export(make_model(mixer=MIXER), tmp_path / "custom", None, "x", "")
    for kind in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            kind.from_pretrained(custom, trust_remote_code=False)
    assert "evil" not in sys.modules


@pytest.fixture(scope="module")
def untrusted_run(tiny_run, tmp_path_factory):
    """Run directory whose config and manifest name a module inside the directory."""
    run = tmp_path_factory.mktemp("untrusted_run") / "tiny"
    shutil.copytree(tiny_run, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["mixer"] = "evil:Mixer"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for manifest in run.glob("checkpoints/step-*/manifest.json"):
        described = json.loads(manifest.read_text())
        described["config"]["model"]["mixer"] = "evil:Mixer"
        manifest.write_text(json.dumps(described))
    (run / "evil.py").write_text("raise SystemExit('it ran')\n")
    return run


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("command", ["export", "load", "init_from"])
def test_run_directory_does_not_run_its_own_code(page, untrusted_run, monkeypatch, command, trust):
    """Without trust no code runs; with trust the module is not searched in the run directory."""
    monkeypatch.chdir(untrusted_run)
    if command == "init_from":
        calls = [lambda: init_from.read_source("."), lambda: init_from.read_source(untrusted_run)]
        message = "the configuration that you pass must name it as well"
    else:
        calls = {
            "export": [lambda: export(".", "out", trust=trust)],
            "load": [lambda: fprnn.load(".", trust=trust)],
        }[command]
        message = "there is no module evil in" if trust else r"--trust \(in Python trust=True\)"
    for call in calls:
        with pytest.raises(ConfigError, match=rf"model\.mixer is evil:Mixer.*{message}"):
            call()
    assert "evil" not in sys.modules and str(untrusted_run) not in sys.path


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("def weights(", "def weighs(", "does not define weights(self, like): a mixer must define"),
        ("def forward(", "def apply(", "does not define forward(self, raw, v, weights)"),
        ("(Mixer):", "(torch.nn.Module):", "is not a mixer: it must be a subclass of"),
        ("d_inner, d_arg):\n", "d_inner):\n", "define __init__(self, d_inner, d_arg), or a"),
        ("self.d_inner = d_inner", "self.d = d_inner", "must set self.d_inner = d_inner, here 32"),
        ("self.out_features = 2 * d_inner + 1", "self.out_features = 3", "must be ((3, 64), (3,))"),
        ("if d_inner < 2", "if d_inner < 99", "mixer `my_mixer_2:PlaneRotation`: d_inner = expand"),
        ("import math", "import my_nothing", "cannot be imported: ModuleNotFoundError: No module"),
        ("import math", "import math)", "my_mixer_2.py:1)"),
        ("class PlaneRotation", "class PlaneRotations", "did you mean `my_mixer_2:Plane"),
    ],
)
def test_invalid_mixer_classes_are_refused(page, old, new, message):
    write_variant(page, "my_mixer", old, new)
    with pytest.raises(ConfigError) as e:
        make_model(mixer="my_mixer_2:PlaneRotation")
    assert message in str(e.value)


def test_unknown_and_duplicate_mixer_names_are_refused(page):
    with pytest.raises(ConfigError, match=r"there is no module my_mixr in .*mine or in Python"):
        make_model(mixer="my_mixr:PlaneRotation")
    with pytest.raises(ConfigError, match=r"unknown mixer `dprl`: .*; did you mean `dplr`\?"):
        make_model(mixer="dprl")
    with pytest.raises(ConfigError, match=r"model.layers, fp_mamba1: mixer is 'dprl'"):
        make_model(layers=[{"fp_mamba1": {"mixer": "dprl"}}])
    path = page / "my_mixer_2.py"
    path.write_text((page / "my_mixer.py").read_text().replace('"plane_rotation"', '"householder"'))
    with pytest.raises(ConfigError, match=r"mixer `householder` is already lm\.model\.mixers:"):
        make_model(mixer="my_mixer_2:PlaneRotation")
    assert mixer_base.class_path(mixer_base.MIXERS["householder"]) == "lm.model.mixers:Reflections"


@pytest.mark.parametrize(
    "name, line, message",
    [
        ("my_mixer_2", "import my_tasks", "imports my_tasks, which the export does not"),
        ("my_mixer_2", "import lm.model.layers", "write `from lm.model.FILE import NAME`"),
        ("my_mixer_2", "from lm.model import layers", "write `from lm.model.FILE import NAME`"),
        ("my_mixer_2", "from lm.common.errors import UserError", "write `from lm.model.FILE"),
        ("layers", "import math", "and the layers.py that every export has: rename the"),
    ],
)
def test_mixer_with_other_imports_is_not_exported(page, tmp_path, name, line, message):
    text = (page / "my_mixer.py").read_text().replace('"plane_rotation"', '"other"')
    (page / f"{name}.py").write_text(f"{line}\n{text}")
    try:
        model = make_model(mixer=f"{name}:PlaneRotation")
        with pytest.raises(ExportError) as e:
            write_export(model, tmp_path / "out", None, "x", "")
    finally:
        sys.modules.pop("layers", None)
    assert message in str(e.value) and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_language_model_trains_resumes_and_exports(page, tmp_path):
    environment = {**running.ENV, "PYTHONPATH": f"{ROOT}:{page}"}
    overrides = (
        f"model.mixer={MIXER}",
        "checkpoint.every=2",
        "optim.schedule=constant",
        "data.val_tokens=32",
    )
    for extra in (["train.steps=4"], ["train.steps=6", "resume=auto"]):
        train = running.command(tmp_path / "runs", *overrides, *extra)
        subprocess.run(train, env=environment, cwd=ROOT, check=True, timeout=300)
    records = running.read_losses(tmp_path / "runs/tiny")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(r["loss"]) for r in records)
    with pytest.raises(ConfigError, match=r"config\.yaml, and nothing here .* --trust"):
        export(tmp_path / "runs/tiny", tmp_path / "hf")
    out = export(tmp_path / "runs/tiny", tmp_path / "hf", trust=True)
    from lm.evaluation.language_model import load

    assert load(out, trust=True).generate("The", max_new_tokens=3, temperature=0)


# Tasks.


def load_lights(tmp_path, *overrides):
    small = ("model.d_model=16", "model.d_state=4", "train.batch_size=8", "train.length=10")
    small += ("model.contractive=0.5",)  # otherwise the probe of ℓ* takes most of the time
    scored = ("eval.lengths=4,10", "eval.examples=16", "eval.batch_size=8", "checkpoint.every=2")
    out_dir = f"out_dir={tmp_path}/runs"
    return synthetic_config.load("lights.yaml", (out_dir, *small, *scored, *overrides))


def test_pages_task_has_correct_labels_and_disjoint_splits(page, tmp_path):
    cfg = load_lights(tmp_path)
    assert yaml.safe_load((page / "lights.yaml").read_text())["task"]["name"] == cfg.task.name
    task = tasks.build_task(cfg.task)
    batches = {split: task.batch(0, split, 0, 64, (10, 10)) for split in tasks.SPLITS}
    for batch in batches.values():
        for ids, labels in zip(batch.input_ids, batch.labels):
            lights_on = [False, False]
            for token, label in zip(ids, labels):
                if token < 2:
                    lights_on[token] = not lights_on[token]
                assert label == lights_on[0] + 2 * lights_on[1]
    prefixes = [{tuple(r[: task.prefix_length]) for r in b.input_ids} for b in batches.values()]
    assert task.is_held_out(10) and not prefixes[0] & (prefixes[1] | prefixes[2])
    assert not task.is_held_out(4)


def test_task_with_mixer_trains_resumes_and_evaluates(page, tmp_path, monkeypatch):
    steps = (f"model.mixer={MIXER}", "optim.warmup=1")
    result = train_synthetic(load_lights(tmp_path, *steps, "train.steps=4", "name=whole"))
    train_synthetic(load_lights(tmp_path, *steps, "train.steps=2", "optim.schedule=constant"))
    resumed = train_synthetic(
        load_lights(tmp_path, *steps, "train.steps=4", "optim.schedule=constant")
    )
    assert resumed["updates"] == result["updates"] == 4
    assert [row["length"] for row in result["eval"]] == [4, 10]
    assert result["task"] == "my_tasks:Lights" and result["chance"] == 0.25
    assert result["eval"][1]["in_training"]["count"] == 0
    monkeypatch.delitem(sys.modules, "my_tasks")
    with pytest.raises(ConfigError, match=r"task\.name is my_tasks:Lights in .*--trust"):
        evaluate_run(f"{tmp_path}/runs/whole")
    rows = evaluate_run(f"{tmp_path}/runs/whole", trust=True)["eval"]
    assert [row["metrics"] for row in rows] == [row["metrics"] for row in result["eval"]]
    assert {"token_accuracy", "sequence_accuracy"} <= result["eval"][0]["metrics"].keys()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("def sample(", "def samples(", "no method sample(self, rng, batch_size, lengths, split)"),
        ("def count_contents(", "def count(", "has no method count_contents(self, width)"),
        ("(Task):", ":", "is no task: it must be derived from"),
        ("self.chance =", "self.luck =", "has no chance: its class, or its __init__, must set"),
        ("max(2**self.n, self.n + 1)", "2", "and vocab_size is 2: ids run from 0 to 1"),
        ("@ 2 **", "@ 2.0 **", "labels are float64 of shape (8, 10): both input_ids and labels"),
        ("class Lights", "class Light", "did you mean `my_tasks_2:Light`?"),
    ],
)
def test_invalid_task_classes_are_refused(page, tmp_path, old, new, message):
    from synthetic.preflight import check_lengths_and_thresholds

    write_variant(page, "my_tasks", old, new)
    with pytest.raises((tasks.TaskError, ConfigError)) as e:
        cfg = load_lights(tmp_path, "task.name=my_tasks_2:Lights")
        check_lengths_and_thresholds(cfg, tasks.build_task(cfg.task), [10])
    assert message in str(e.value)


def test_task_without_options_needs_no_init(monkeypatch):
    class Silence(tasks.Task):
        vocab_size, chance = 2, 1.0

        def sample(self, rng, batch_size, lengths, split):
            return tasks.Batch(*np.zeros((2, batch_size, lengths[0]), np.int64))

        def is_held_out(self, length):
            return False

    monkeypatch.setitem(tasks.TASKS, "silence", Silence)
    task = tasks.build_task(SimpleNamespace(name="silence"))
    assert task.batch(0, "train", 0, 3, (4, 4)).labels.shape == (3, 4)


def test_options_need_a_custom_task_and_names_are_checked(page, tmp_path):
    with pytest.raises(ConfigError, match=r"`options` is for a task of your own.*parity reads"):
        load_lights(tmp_path, "task.name=parity")
    with pytest.raises(ConfigError, match=r"unknown task `parrity`.*did you mean `parity`\?"):
        load_lights(tmp_path, "task.name=parrity")
    with pytest.raises(tasks.TaskError, match=r"task.options.n is 9"):
        tasks.build_task(load_lights(tmp_path, "task.options={n: 9}").task)
    assert Config().model.mixer == "householder"
