"""Config of synthetic runs: docs/config-synthetic.md, overrides, sweeps and refused values."""

import json
import re
from pathlib import Path

import pytest
import yaml

from lm.common.errors import ConfigError
from lm.config.model import Section
from lm.config.yaml_text import Loader
from synthetic import config, tasks
from synthetic.config import Config

ROOT = Path(__file__).parents[2]


def documented_defaults() -> dict[str, str]:
    """Return the default of each dotted key in the page's tables."""
    rows, section = {}, ""
    for line in (ROOT / "docs/config-synthetic.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            name = re.fullmatch(r"## `(\w+)`", line)
            section = f"{name[1]}." if name else ""
        row = re.match(r"\| `(\w+)` \| .+? \| `(.*?)` \| .+ \|$", line)
        if row:
            rows[section + row[1]] = row[2]
    return rows


def test_page_has_every_key_with_its_default():
    page = {k: yaml.load(v, Loader) for k, v in documented_defaults().items()}
    expected = {}
    for name, value in Config().model_dump(mode="json").items():
        if name in ("model", "solver", "log"):  # docs/config.md
            continue
        if isinstance(getattr(Config(), name), Section):
            expected |= {f"{name}.{key}": default for key, default in value.items()}
        else:
            expected[name] = value
    page["thresholds"] = [] if page["thresholds"] == "()" else page["thresholds"]
    assert page == expected


def test_files_named_by_the_page_exist():
    text = (ROOT / "docs/synthetic.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:configs|launch)/[\w./*-]+\w", text))
    paths = {path.replace("NAME", "fig4") for path in paths}
    assert len(paths) > 4 and all(list(ROOT.glob(path)) for path in paths), paths


def test_page_names_all_tasks():
    text = (ROOT / "docs/synthetic.md").read_text(encoding="utf-8")
    built_in = {
        name
        for name in tasks.registered_tasks()
        if tasks.TASKS[name].__module__.startswith("synthetic.")
    }
    assert len(built_in) == 16 and all(f"`{name}`" in text for name in built_in)


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_optional_section_accepts_dotted_overrides(tmp_path):
    cfg = config.load(write(tmp_path, "name: a"), ["train.curriculum.start=4"])
    assert cfg.train.curriculum.start == 4 and cfg.train.curriculum.grow == 2
    with pytest.raises(ConfigError, match=r"did you mean `train.curriculum.grow`"):
        config.load(tmp_path / "c.yaml", ["train.curriculum.growth=4"])


def test_sweep_over_mappings_updates_the_section(tmp_path):
    text = """
name: a
model: {d_model: 32}
sweep:
  model: [{name: fprnn}, {name: mamba, n_layer: 2}]
  task.group: [S3, A4]
"""
    path = write(tmp_path, text)
    points = [config.load(path, job_index=i) for i in range(4)]
    assert [(p.model.name, p.model.n_layer, p.model.d_model, p.task.group) for p in points] == [
        ("fprnn", 1, 32, "S3"),
        ("fprnn", 1, 32, "A4"),
        ("mamba", 2, 32, "S3"),
        ("mamba", 2, 32, "A4"),
    ]
    assert points[3].name == "a/003-model=mamba+2-group=A4"
    with pytest.raises(ConfigError, match=r"model\.n_layers"):
        config.load(write(tmp_path, "sweep: {model: [{n_layers: 2}]}"), job_index=0)


def test_misspelt_task_name_suggests_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean `catbabi`"):
        config.load(write(tmp_path, "task: {name: catbaby}"))


@pytest.mark.parametrize("text", ["2:48", "2:50:1", "16,32", "16"])
def test_lengths_need_no_quotes(tmp_path, text):
    """YAML 1.1 reads 2:48 as the number 168, in base 60."""
    assert config.load(write(tmp_path, f"eval: {{lengths: {text!r}}}")).eval.lengths == text
    path = write(tmp_path, f"eval:\n  lengths: {text}\n")
    assert config.load(path).eval.lengths == text
    assert config.load(path, [f"eval.lengths={text}"]).eval.lengths == text
    again = write(tmp_path, config.load(path).to_yaml())
    assert config.load(again).eval.lengths == text


@pytest.mark.parametrize(
    "text, key",
    [
        ("train: {max_iters: 4}", "`train.max_iters` is 4"),
        ("train: {max_iters: gamma}", "`train.max_iters` is gamma"),
        ("train: {max_iters: unlimited}\nsolver: {token: exact}", "is unlimited"),
        ("eval: {max_iters: 4}", "`eval.max_iters` is 4"),
        ("eval: {max_iters: 4}\nsolver: {schedule: parallel}", "`eval.max_iters` is 4"),
    ],
)
def test_iteration_limits_without_iterations_are_refused(tmp_path, text, key):
    with pytest.raises(ConfigError, match=r"solver.token: exact has no iterations") as e:
        config.load(write(tmp_path, text))
    assert key in str(e.value) and "set solver.token to iterate" in str(e.value)


@pytest.mark.parametrize("solver", ["{token: iterate}", "{stopping: paper}"])
def test_iteration_limits_are_accepted_with_iterations(tmp_path, solver):
    text = f"train: {{max_iters: 4}}\neval: {{max_iters: 2}}\nsolver: {solver}"
    cfg = config.load(write(tmp_path, text))
    assert (cfg.train.max_iters, cfg.eval.max_iters) == (4, 2)


def test_default_limits_are_accepted_without_iterations(tmp_path):
    text = "train: {max_iters: config}\neval: {max_iters: null}"
    assert config.load(write(tmp_path, text)).solver.token == "auto"


def test_removed_keys_are_accepted_only_with_defaults(tmp_path):
    automaton = {"table": None, "states": 5, "letters": 3, "kind": "unsolvable", "seed": 0}
    task = {"csv": None, "mode": "answers", "automaton": automaton}
    assert config.load(write(tmp_path, json.dumps({"task": task}))).task.automaton.table is None
    for other in ({"csv": "x.csv"}, {"mode": "lm"}, {"automaton": automaton | {"seed": 1}}):
        with pytest.raises(ConfigError, match=r"`task\.\S*` is .* the key was removed"):
            config.load(write(tmp_path, json.dumps({"task": task | other})))
