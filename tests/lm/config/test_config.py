"""The YAML schema: what is refused and how, overrides, sweeps, shipped YAMLs, docs/config.md."""

import datetime
import inspect
import itertools
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import synthetic.config
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config import old_keys
from lm.config.messages import is_key
from lm.config.model import Model, Solver
from lm.config.resuming import FIXED_ON_RESUME, FREE_ON_RESUME, NOTED_ON_RESUME, resume_rule
from lm.config.schema import INVISIBLE_CHARACTERS, Config
from lm.config.yaml_text import Loader, parse
from lm.model.fields import FIELDS, FIELDS_BY_KIND, LAYER_OPTIONS
from lm.training.build import build_model, check_section
from tests import config_page

ROOT = Path(__file__).parents[3]
YAMLS = sorted((ROOT / "configs").rglob("*.yaml"))


def load(folder: Path, text: str, *overrides: str, job_index: int | None = None) -> Config:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return config.load(path, overrides, job_index)


def refusal_message(tree: dict) -> str:
    with pytest.raises(ConfigError) as e:
        config.build(tree)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_defaults_are_a_config():
    cfg = config.build({})
    assert cfg == Config()
    # Defaults are not validated by pydantic: read them back as if they had been written out.
    assert config.build(cfg.model_dump(mode="json")) == cfg
    assert str(cfg.run_dir) == "runs/run"


@pytest.mark.parametrize(
    "tree, key, suggestion",
    [
        ({"optm": {}}, "optm", "optim"),
        ({"sed": 1}, "sed", "seed"),
        ({"train": {"micro_batch": 3}}, "train.micro_batch", "train.micro_batch_size"),
        ({"lr": 1e-3}, "lr", "optim.lr"),
        ({"train": {"seq_len": 3}}, "train.seq_len", "data.seq_len"),
        ({"data": {"mixer_rnk": 3}}, "data.mixer_rnk", "model.mixer_rank"),
        ({"train": {"tol": 3}}, "train.tol", "solver.tol"),
        ({"model": {"token": "exact"}}, "model.token", "solver.token"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tree, key, suggestion):
    assert refusal_message(tree) == f"config: unknown key `{key}`; did you mean `{suggestion}`?"


def test_an_unknown_key_that_resembles_none_lists_what_is_known_there():
    message = refusal_message({"checkpoint": {"zzzz": 1}})
    assert message == (
        "config: unknown key `checkpoint.zzzz`; the keys there are every, keep, keep_every"
    )


@pytest.mark.parametrize("key", old_keys.REMOVED)
def test_a_removed_key_is_accepted_only_with_its_default(key):
    schema = synthetic.config.Config if key.startswith("task.") else Config
    assert not is_key(key, schema)
    tree = {}
    config.set_key(tree, key, old_keys.REMOVED[key])
    assert key.rpartition(".")[2] not in str(old_keys.drop_removed(tree, "config"))
    with pytest.raises(ConfigError, match=r"was removed: (leave it out|give it to layers)"):
        config.parse_override(f"{key}=1")
    config.set_key(tree, key, "another")
    if key.removeprefix("model.") in FIELDS_BY_KIND["fp_mamba1"]:
        option = {"fp_mamba1": {key.removeprefix("model."): "another"}}
        assert old_keys.drop_removed(tree, "config") == {"model": {"layers": [option]}}
        tree["model"]["layers"] = "fp_mamba1"  # then the key is not moved, but refused below
    if key in old_keys.WITHOUT_EFFECT:
        assert "another" not in str(old_keys.drop_removed(tree, "config"))
        return
    with pytest.raises(ConfigError, match=rf"`{re.escape(key)}` is 'another'"):
        old_keys.drop_removed(tree, "config")
    has_effect_on_outputs = key.startswith(old_keys.MODEL_SECTIONS)
    with pytest.raises(ConfigError) if has_effect_on_outputs else nullcontext():
        old_keys.drop_removed(tree, "config", trained=True)


def test_a_message_names_all_invalid_keys():
    message = refusal_message({"optim": {"lr": -1}, "train": {"steps": "many", "stps": 3}})
    assert all(key in message for key in ("`optim.lr`", "`train.steps`", "`train.stps`"))


@pytest.mark.parametrize(
    "tree, words",
    [
        # Wrong types.
        ({"train": {"steps": "many"}}, ["`train.steps` is 'many'", "must be a valid integer"]),
        ({"train": {"steps": True}}, ["`train.steps`: true and false are only for keys"]),
        ({"optim": {"betas": [0.9]}}, ["`optim.betas[1]` is missing"]),
        ({"optim": {"betas": [True, 0.9]}}, ["`optim.betas`: true and false"]),
        ({"name": datetime.date(2020, 1, 2)}, ["`name` is 2020-01-02", "must be a valid string"]),
        ({"engine": {"deepspeed": 3}}, ["`engine.deepspeed` is 3", "or it must be a valid string"]),
        ({1: 2}, ["`[1]`: Keys should be strings"]),
        # Wrong choices.
        ({"model": {"mixer": "houshold"}}, ["householder, dplr, kronecker", "mean `householder`"]),
        ({"model": {"mixer": "a b:C"}}, ["`a b:C` does not have the form module:Class"]),
        ({"model": "mmaba"}, ["`model` is 'mmaba'", "did you mean `mamba`"]),
        ({"train": {"precision": "fp16"}}, ["must be 'fp32' or 'bf16'"]),
        (
            {"solver": {"schedule": "windows:4"}},
            ["`solver.schedule`: schedule is `windows:4`", "window:W (W tokens at once"],
        ),
        ({"solver": {"schedule": "window:0"}}, ["is `window:0`; W is at least 1"]),
        ({"solver": {"token": "exakt"}}, ["is 'exakt'", "did you mean `exact`?"]),
        ({"solver": {"gradient": "one-step"}}, ["is 'one-step'", "did you mean `one_step`"]),
        # Out of range.
        ({"train": {"steps": 0}}, ["`train.steps` is 0", "greater than 0"]),
        ({"model": {"vocab_size": -8}}, ["`model.vocab_size` is -8", "0 or it must be 'auto'"]),
        ({"model": {"d_ff": 0}}, ["`model.d_ff` is 0", "from 1 to 65,536, or auto"]),
        ({"optim": {"lr": float("nan")}}, ["`optim.lr` is nan", "finite"]),
        ({"seed": -1}, ["`seed` is -1", "greater than or equal to 0"]),
        ({"out_dir": "~nobody_of_this_name/x"}, ["`out_dir`", "begins with ~"]),
        *(
            ({"name": name}, [f"`name`: `{name}` is not the name of a folder inside out_dir"])
            for name in ("../../x", "/x", ".", "a//b", "a/")
        ),
        ({"name": "a\\b"}, ["`name`: 'a\\\\b' contains a character"]),
        ({"name": "a\0b"}, ["`name`: 'a\\x00b' contains the character NUL"]),
        # Keys that contradict each other.
        ({"data": {"source": "jsonl"}}, ["`data`", "source `jsonl` needs `path`"]),
        ({"optim": {"lr": 1e-6}}, ["`optim`", "min_lr 1e-05 is above the peak lr 1e-06"]),
    ],
)
def test_a_bad_value_is_refused_in_a_sentence(tree, words):
    message = refusal_message(tree)
    assert [w for w in words if w not in message] == [], message


def test_out_dir_may_lie_in_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(config.build({"out_dir": "~/x"}).run_dir) == "/somewhere/x/run"


def test_model_may_be_a_name(tmp_path):
    assert load(tmp_path, "model: mamba").model == Model(name="mamba")


def test_overriding_the_model_by_name_keeps_its_sizes(tmp_path):
    cfg = load(tmp_path, "model: {d_model: 64}", "model=mamba", "model.n_layer=3")
    assert cfg.model == Model(name="mamba", d_model=64, n_layer=3)


def test_an_empty_section_takes_overrides(tmp_path):
    text = "model:\nengine: {deepspeed: null}\n"
    cfg = load(tmp_path, text, "model.d_model=8", "engine.deepspeed.a.b=1")
    assert cfg.model.d_model == 8
    assert cfg.engine.deepspeed == {"a": {"b": 1}}


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", ".001", "0.001", "+1e-3", "10e-4"])
def test_numbers_are_numbers(tmp_path, text):
    assert load(tmp_path, f"optim: {{lr: {text}}}").optim.lr == 1e-3
    assert load(tmp_path, "", f"optim.lr={text}").optim.lr == 1e-3


def test_a_leading_zero_is_not_octal(tmp_path):
    """YAML 1.1 reads 010 as 8. Here it is a text, which pydantic converts for a number."""
    assert load(tmp_path, "train: {steps: 010}").train.steps == 10
    assert load(tmp_path, "", "name=007").name == "007"


def test_a_whole_number_may_be_written_with_an_exponent(tmp_path):
    assert load(tmp_path, "train: {steps: 1e4}").train.steps == 10_000
    assert load(tmp_path, "", "train.steps=2e3").train.steps == 2000


@pytest.mark.parametrize(
    "text, value",
    [
        ("train.steps=12", 12),
        ("optim.lr=2.5e-4", 2.5e-4),
        ("model.glu_in_loop=true", True),
        ("data.val_tokens=null", None),
        ("data.val_tokens=", None),
        ("optim.betas=[0.8, 1e-1]", [0.8, 0.1]),
        ("engine.deepspeed={a: {b: 1}}", {"a": {"b": 1}}),
        ("name=a long name", "a long name"),
        ("data.path=a=b", "a=b"),
        ("name=nan", "nan"),
        ("name='007'", "007"),
        ('name="1e-3"', "1e-3"),
    ],
)
def test_override(text, value):
    key, parsed = config.parse_override(text)
    assert key == text.partition("=")[0]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("optim.lr", "override `optim.lr` must have the form key=value"),
        ("=3", "override `=3` must have the form key=value"),
        ("train.lr=3", "unknown key `train.lr`; did you mean `optim.lr`?"),
        ("sweep.optim.lr=[1]", "unknown key `sweep.optim.lr`"),
        ("name=[1", "override `name=[1`: the value is not valid YAML"),
        ("optim.lr=abc", "`optim.lr` is 'abc'"),
        ("optim.lr=!!int _", "not valid YAML: a number, date or tag cannot be read"),
        ("train.steps=-1", "`train.steps` is -1"),
    ],
)
def test_a_bad_override_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError) as e:
        load(tmp_path, "", text)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_an_override_below_a_value_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`deepspeed` is a value, not a section"):
        load(tmp_path, "engine: {deepspeed: ds.json}", "engine.deepspeed.a=1")


def test_an_empty_file_is_the_defaults(tmp_path):
    assert load(tmp_path, "# nothing\n") == Config()


# Sweeps.

SWEEP = "name: s\nsweep:\n  model.mixer: [householder, dplr]\n  optim.lr: [1e-3, 2e-3, 4e-3]\n"


def test_the_last_key_of_a_sweep_varies_fastest():
    points = config.sweep_points(yaml.load(SWEEP, Loader))
    expected = [(m, lr) for m in ("householder", "dplr") for lr in (1e-3, 2e-3, 4e-3)]
    assert [(p["model.mixer"], p["optim.lr"]) for p in points] == expected


def test_job_index_picks_a_point_and_overrides_come_last(tmp_path):
    cfg = load(tmp_path, SWEEP, job_index=4)
    assert (cfg.model.mixer, cfg.optim.lr) == ("dplr", 2e-3)
    assert cfg.name == "s/004-mixer=dplr-lr=0.002"
    cfg = load(tmp_path, SWEEP, "optim.warmup=1", "name=mine", job_index=4)
    assert (cfg.model.mixer, cfg.optim.warmup) == ("dplr", 1.0)
    assert cfg.name == "mine/004-mixer=dplr-lr=0.002"


@pytest.mark.parametrize("override", ["optim.lr=1", "optim={lr: 1}", "model.mixer=kronecker"])
def test_an_override_of_an_axis_is_refused(tmp_path, override):
    key = "model.mixer" if "mixer" in override else "optim.lr"
    with pytest.raises(ConfigError, match=f"an override changes `{key}`, which is an axis"):
        load(tmp_path, SWEEP, override, job_index=4)


def test_variants_set_several_keys_under_a_name(tmp_path):
    text = (
        "name: s\nsweep:\n  models:\n    plain: {}\n"
        "    one_step: {model.n_layer: 3, solver.gradient: one_step}\n  seed: [0, 1]\n"
    )
    cfg = load(tmp_path, text, job_index=3)
    assert (cfg.model.n_layer, cfg.solver.gradient, cfg.seed) == (3, "one_step", 1)
    assert (cfg.name, cfg.sweep) == ("s/003-one_step-seed=1", {})
    assert load(tmp_path, text, job_index=0).name == "s/000-plain-seed=0"


def test_a_loaded_sweep_has_the_configs_of_its_indices(tmp_path):
    overrides = ("seed=3", "name=mine")
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    points, configs = config.load_sweep(path, overrides)
    assert points == config.sweep_points(config.load_tree(path))
    assert configs == [config.load(path, overrides, i) for i in range(6)]
    assert configs[4].seed == 3 and configs[4].name == "mine/004-mixer=dplr-lr=0.002"


def test_points_do_not_change_each_other(tmp_path):
    """A variant and an override set keys inside a mapping that another key of the point has set."""
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "sweep:\n  optim: [{lr_factors: {'*.D': 2.0}}]\n"
        "  speed: {plain: {}, fast: {optim.lr_factors: {'*.D': 4.0}}}\n"
        "  data: [{mixture: {a: {source: builtin, weight: 1.0}}}]\n"
    )
    points, configs = config.load_sweep(path, ["data.mixture.a.weight=3"])
    assert [cfg.optim.lr_factors for cfg in configs] == [{"*.D": 2.0}, {"*.D": 4.0}]
    assert [cfg.data.mixture["a"].weight for cfg in configs] == [3, 3]
    assert [point["data"]["mixture"]["a"]["weight"] for point in points] == [1, 1]


def test_an_override_of_the_sweep_of_a_point_is_refused(tmp_path):
    for override in ("sweep={seed: [1, 2]}", "sweep=5"):
        with pytest.raises(ConfigError, match="an override sets `sweep`"):
            load(tmp_path, SWEEP, override, job_index=0)
    assert load(tmp_path, SWEEP, "sweep={}", job_index=4).optim.lr == 2e-3


@pytest.mark.parametrize("index", [-1, 6])
def test_a_job_index_outside_the_grid_is_refused(tmp_path, index):
    with pytest.raises(ConfigError, match=f"--job-index {index} is outside the sweep: 0 to 5"):
        load(tmp_path, SWEEP, job_index=index)


@pytest.mark.parametrize(
    "text, words",
    [
        ("seed: 1", "has no `sweep:` section"),
        ("sweep: {train.lr: [1]}", "sweep over unknown key `train.lr`; did you mean `optim.lr`?"),
        ("sweep: {1: [1]}", "sweep over unknown key `1`"),
        ("sweep: {optim.lr: 1}", "sweep.optim.lr must be a non-empty list"),
        ("sweep: {optim.lr: []}", "sweep.optim.lr must be a non-empty list"),
        ("sweep: {optim.lr: {a: 1}}", "sweep.optim.lr must be a non-empty list"),
        ("sweep: {models: {a: 1}}", "sweep.models.a must be a mapping of dotted keys"),
        ("sweep: {models: {a: {model.width: 1}}}", "unknown key `model.width`"),
        # Job 0 also finds the bad values of job 1.
        ("sweep: {optim.lr: [1, -1]}", "`optim.lr` is -1"),
        ("sweep: {model.mixer: [dplr, dprl]}", "did you mean `dplr`"),
    ],
)
def test_a_bad_sweep_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError) as e:
        load(tmp_path, text, job_index=0)
    assert words in str(e.value)


# Written and read back.

# YAML would read them as another type, or as syntax, unless `to_yaml` quotes them.
TEXTS = [
    "1e-3",
    ".1e1",
    "off",
    "007",
    "2024-01-01",
    "null",
    "a: b",
    "- é",
    '"',
    "\x85",
    "a\u2028 b\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_to_yaml_reads_back_as_the_same_config(tmp_path, text):
    trees = [{"engine": {"deepspeed": {text: text}}}, {"engine": {"deepspeed": text}}]
    if INVISIBLE_CHARACTERS.search(text) is None:
        trees.append({"name": text, "out_dir": text})
    for tree in trees:
        cfg = config.build({"seed": 2**64 - 1, "optim": {"lr": 1e-300, "min_lr": 0}, **tree})
        assert load(tmp_path, cfg.to_yaml()) == cfg


# The model section and FPRNNConfig.


def test_the_defaults_of_the_sections_are_those_of_fprnn_config():
    from lm.model.configuration_fprnn import FPRNNConfig

    model = Model().model_dump(exclude={"name", "gradient_checkpointing", "vocab_size"})
    solver = Solver().model_dump()
    assert {*model, *solver, "vocab_size"} == FIELDS.keys() - LAYER_OPTIONS
    assert FPRNNConfig(**model, **solver).to_dict() == FPRNNConfig().to_dict()
    parameters = inspect.signature(FPRNNConfig).parameters
    assert parameters.keys() > FIELDS.keys() and parameters["d_model"].default == 768
    assert "d_model (768): Width of the residual stream." in FPRNNConfig.__doc__


SOLVER_CHOICES = {
    "token": ("auto", "exact", "iterate"),
    "schedule": ("auto", "parallel", "sequential"),
    "stopping": ("auto", "causal", "paper"),
    "gradient": ("auto", "exact", "one_step", "implicit"),
}


@pytest.mark.parametrize("values", itertools.product(*SOLVER_CHOICES.values()))
def test_solver_and_fprnn_config_resolve_auto_alike(values):
    """Runs are compared by `Solver.resolve_auto`, and a model is built from FPRNNConfig."""
    from lm.model.configuration_fprnn import FPRNNConfig

    solver = Solver(**dict(zip(SOLVER_CHOICES, values)))
    try:
        model_config = FPRNNConfig(**solver.model_dump())
    except ValueError:
        return  # values that contradict each other
    resolved = solver.resolve_auto()
    for name in SOLVER_CHOICES:
        assert resolved[name] == getattr(model_config, name)
    assert solver.iterates == (model_config.token == "iterate")


def test_an_error_of_fprnn_config_names_the_section():
    cfg = config.build({"solver": {"token": "exact", "stopping": "paper"}})
    with pytest.raises(ConfigError, match=r"^solver: stopping `paper`"):
        build_model(cfg, vocab_size=16)
    cfg = config.build({"model": {"block": "fp_mamba2", "headdim": 50}})
    with pytest.raises(ConfigError, match=r"^model: headdim is 50"):
        build_model(cfg, vocab_size=16)


def test_a_baseline_ignores_the_section_solver():
    tree = {"model": {"name": "lstm", "d_model": 16, "n_layer": 1}}
    default = config.build(tree)
    cfg = config.build({**tree, "solver": {"token": "iterate", "stopping": "paper"}})
    models = [build_model(c, vocab_size=16) for c in (cfg, default)]
    assert models[0].config.to_dict() == models[1].config.to_dict()


# The shipped YAMLs.


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_every_shipped_yaml_parses(path):
    schema = synthetic.config.Config if "synthetic" in path.parts else Config
    tree = config.load_tree(path)
    cfg = config.load(path, schema=schema)
    assert cfg.name == tree["name"]
    assert config.build(parse(cfg.to_yaml(), "written"), "written", schema) == cfg
    point_configs = [cfg]
    if "sweep" in tree:
        points, point_configs = config.load_sweep(path, (), schema)
        assert len({point.name for point in point_configs}) == len(points)
    if schema is Config:
        distinct = {f"{point.model} {point.solver}": point for point in point_configs}
        for point in distinct.values():
            check_section(point.model, point.solver, point.data.seq_len)


PAPER_CONFIG = ROOT / "configs/lm/fpmamba_160m_fineweb2b_paper.yaml"


def test_the_papers_language_model_has_the_papers_constants():
    """The table 'Constants of the paper's experiments', row 'language model', written out."""
    cfg = config.load(PAPER_CONFIG)
    m, d, o, t, s = cfg.model, cfg.data, cfg.optim, cfg.train, cfg.solver
    assert (d.source, d.dataset, d.val_tokens) == ("fineweb", "HuggingFaceFW/fineweb", 200_000)
    assert (cfg.tokenizer.name, d.leading_eos) == ("gpt2", True)  # EOS text EOS
    assert (m.name, m.block, m.mixer, m.mixer_rank) == ("fprnn", "fp_mamba1", "householder", 1)
    assert (m.n_layer, m.d_model, m.d_state, m.expand, d.seq_len) == (12, 768, 16, 2, 2048)
    assert m.vocab_size == 50264  # the 50,257 tokens of gpt2, rounded up to a multiple of 8
    assert (t.global_batch_size, t.micro_batch_size) == (256, 8)
    assert [t.accumulation(ranks) for ranks in (1, 4, 16)] == [32, 8, 2]
    assert cfg.tokens_per_step(4) == cfg.tokens_per_step(16) == 256 * 2048
    assert (t.steps, t.precision) == (4800, "bf16")
    # The paper names a set of 2 B tokens; its own updates train on more.
    assert cfg.tokens_per_step(4) * t.steps == 2_516_582_400
    assert (o.lr, o.min_lr, o.betas) == (4e-3, 1e-5, (0.9, 0.95))
    assert (o.weight_decay, o.grad_clip) == (0.1, 1.0)
    assert (o.warmup, o.schedule) == (0.1, "cosine")
    # The paper's solver (App. B.4).
    assert (s.token, s.schedule, s.stopping) == ("iterate", "parallel", "paper")
    assert (s.tol, s.stepsize, s.stepsize_decay) == (0.1, 0.99, 0.9)
    assert (s.quantile, s.eval_max_iters) == (0.75, 1000)
    assert (s.gradient, s.n_backwards) == ("one_step", 1)


def test_the_baseline_differs_from_the_papers_model_only_in_the_model_and_its_solver():
    paper = config.load(PAPER_CONFIG)
    baseline = config.load(ROOT / "configs/lm/mamba_160m_fineweb2b.yaml")
    changes = {"name": paper.name, "model": paper.model, "solver": paper.solver}
    assert baseline.model.name == "mamba"
    assert baseline.model_copy(update=changes) == paper
    for field in ("vocab_size", "d_model", "n_layer", "d_state"):
        assert getattr(baseline.model, field) == getattr(paper.model, field)


def test_the_exact_config_differs_from_the_papers_only_in_solver_and_micro_batch():
    paper = config.load(PAPER_CONFIG)
    exact = config.load(ROOT / "configs/lm/fpmamba_160m_fineweb2b.yaml")
    assert exact.solver == Config().solver
    assert exact.train.micro_batch_size == 32
    exact.name, exact.solver = paper.name, paper.solver
    exact.train.micro_batch_size = paper.train.micro_batch_size
    assert exact == paper


def test_the_matched_baseline_differs_from_the_papers_only_in_layers_and_micro_batch():
    paper = config.load(ROOT / "configs/lm/mamba_160m_fineweb2b.yaml")
    matched = config.load(ROOT / "configs/lm/mamba_169m_fineweb2b.yaml")
    matched.name, matched.model.n_layer = paper.name, paper.model.n_layer
    matched.train.micro_batch_size = paper.train.micro_batch_size
    assert matched == paper


# docs/config.md.


def test_the_page_lists_the_keys_that_a_resumed_run_may_change():
    """A key is listed under its rule, unless it has the rule of its section (at the top: free)."""
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    part = text.partition("## Resuming")[2].partition("\n## ")[0]
    items = [
        set(re.findall(r"`([\w.]+)`", item)) for item in re.split(r"^- ", part, flags=re.M)[1:]
    ]
    listed_keys = dict(zip((FIXED_ON_RESUME, NOTED_ON_RESUME, FREE_ON_RESUME), items))
    listed_keys[FREE_ON_RESUME] -= {"train.steps"}
    top_rules = {name: resume_rule(Config, name) for name in Config.model_fields}
    keys = [
        f"{prefix}.{name}"
        for prefix, section in config_page.collect_sections(Config()).items()
        for name in type(section).model_fields
        if prefix
    ]
    rules = {key: resume_rule(Config, key) for key in keys} | top_rules
    for key, rule in rules.items():
        inherited_rule = FREE_ON_RESUME if key in top_rules else top_rules[key.partition(".")[0]]
        listed_rules = [listed_rule for listed_rule, keys in listed_keys.items() if key in keys]
        assert listed_rules == ([] if rule is inherited_rule else [rule]), key
