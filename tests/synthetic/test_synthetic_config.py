"""The page docs/config-synthetic.md against the schema, and nested and optional sections."""

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


def documented() -> dict[str, str]:
    """Dotted key → default, from the page's tables."""
    rows, section = {}, ""
    for line in (ROOT / "docs/config-synthetic.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            name = re.fullmatch(r"## `(\w+)`", line)
            section = f"{name[1]}." if name else ""
        row = re.match(r"\| `(\w+)` \| .+? \| `(.*?)` \| .+ \|$", line)
        if row:
            rows[section + row[1]] = row[2]
    return rows


def test_the_page_has_every_key_with_its_default():
    page = {k: yaml.load(v, Loader) for k, v in documented().items()}
    expected = {}
    for name, value in Config().model_dump(mode="json").items():
        if name in ("model", "solver", "log"):  # docs/config.md
            continue
        below = value if isinstance(getattr(Config(), name), Section) else None
        for key, default in below.items() if below is not None else [(None, value)]:
            expected[name if key is None else f"{name}.{key}"] = default
    page["thresholds"] = [] if page["thresholds"] == "()" else page["thresholds"]
    assert page == expected


def test_the_files_the_page_names_are_there():
    text = (ROOT / "docs/synthetic.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:configs|launch)/[\w./*-]+\w", text))
    named = {name.replace("NAME", "fig4") for name in named}
    assert len(named) > 4 and all(list(ROOT.glob(name)) for name in named), named


def test_the_tasks_are_those_that_the_page_names():
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


def test_an_optional_section_takes_dotted_overrides(tmp_path):
    cfg = config.load(write(tmp_path, "name: a"), ["train.curriculum.start=4"])
    assert cfg.train.curriculum.start == 4 and cfg.train.curriculum.grow == 2
    with pytest.raises(ConfigError, match=r"did you mean `train.curriculum.grow`"):
        config.load(tmp_path / "c.yaml", ["train.curriculum.growth=4"])


def test_a_sweep_over_mappings_goes_over_the_section(tmp_path):
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


def test_a_task_of_a_misspelt_name_is_refused_with_the_nearest(tmp_path):
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
def test_limits_of_iterations_are_refused_where_nothing_is_iterated(tmp_path, text, key):
    with pytest.raises(ConfigError, match=r"which solver.token: exact has not") as e:
        config.load(write(tmp_path, text))
    assert key in str(e.value) and "set solver.token to iterate" in str(e.value)


@pytest.mark.parametrize("solver", ["{token: iterate}", "{stopping: paper}"])
def test_limits_of_iterations_are_for_what_iterates(tmp_path, solver):
    text = f"train: {{max_iters: 4}}\neval: {{max_iters: 2}}\nsolver: {solver}"
    cfg = config.load(write(tmp_path, text))
    assert (cfg.train.max_iters, cfg.eval.max_iters) == (4, 2)


def test_the_default_of_either_limit_is_for_both(tmp_path):
    text = "train: {max_iters: config}\neval: {max_iters: null}"
    assert config.load(write(tmp_path, text)).solver.token == "auto"


def test_removed_keys_of_tasks_are_read_with_their_defaults_only(tmp_path):
    drawn = {"table": None, "states": 5, "letters": 3, "kind": "unsolvable", "seed": 0}
    task = {"csv": None, "mode": "answers", "automaton": drawn}
    assert config.load(write(tmp_path, json.dumps({"task": task}))).task.automaton.table is None
    for other in ({"csv": "x.csv"}, {"mode": "lm"}, {"automaton": drawn | {"seed": 1}}):
        with pytest.raises(ConfigError, match=r"`task\.\S*` is .* the key was removed"):
            config.load(write(tmp_path, json.dumps({"task": task | other})))
