"""What a run will cost, before it starts: parameters, tokens, FLOPs, hours, memory per GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm.common.cards import GIB, GPUS_A_HOST, INFINIBAND, PCIE, Card, card, here
from lm.common.errors import ConfigError
from lm.config import load
from lm.config.schema import Config
from lm.kernels.cell import fits_a_gpu
from lm.model.fields import AUTO_WINDOW
from lm.report import estimate
from lm.report.estimate import Sizes, flops_of, on_the_meta_device, sizes
from lm.runs.run_dir import RunDir
from lm.training import init_from
from lm.training.build import vocabulary, with_built_in_mixers
from lm.training.deepspeed_json import (
    deepspeed_config,
    highest_stage,
    low_precision_modules,
)
from lm.training.optim import described as described_optimizer

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from lm.report.measure import Measured

UTILISATION = 0.25  # of the card's peak, in matrix products: assumed
EVALUATIONS = 10.0  # of a token and layer, where a solve iterates: assumed

# Tokens of hub datasets, by their own cards (in GPT-2's): about so many.
HUB_TOKENS = {
    ("HuggingFaceFW/fineweb", "sample-10BT"): 10e9,
    ("HuggingFaceFW/fineweb", "sample-100BT"): 100e9,
    ("HuggingFaceFW/fineweb", "sample-350BT"): 350e9,
}


def is_gpt2(tokenizer: str) -> bool:
    """Whether a tokenizer of this name or folder calls itself GPT-2's."""
    return tokenizer.rstrip("/").rpartition("/")[2] == "gpt2"


def training_data(cfg: Config, name: str = "") -> tuple[float | None, str]:
    """Tokens that the run can be trained on before any comes again, and where the number is from;
    None where nothing says before the source is tokenised: what the run directory holds counts only
    if it was made of this source with this tokenizer. Reads no text.

    Args:
        name: of a source of a mixture, whose config `cfg` is; "": the run has a single source.
    """
    d = cfg.data
    if d.source == "fineweb":
        name = f"{d.dataset} {d.name}"
        if (total := HUB_TOKENS.get((d.dataset, d.name))) is None:
            return None, f"how many {name} has is not known here"
        whose = "GPT-2's tokens"
        if not is_gpt2(cfg.tokenizer.name):
            whose += f", those of `{cfg.tokenizer.name}` will be more or fewer"
        return total * (1 - d.val_fraction), f"about, of {name}, less validation's share; {whose}"
    unknown = None, f"known once `{d.source}` is tokenised, when the run starts"
    if not RunDir(cfg.run_dir).tokenizer.is_dir():
        return unknown
    from lm.data.corpus.prepare import training_tokens
    from lm.data.corpus.tokenizer import load_tokenizer
    from lm.data.sources.errors import DataError

    try:
        counted = training_tokens(cfg, load_tokenizer(cfg, cfg.run_dir), cfg.run_dir, name)
    except DataError:  # not there, or of another tokenizer
        return unknown
    if counted is None:
        return unknown
    tokens, folder = counted
    return tokens, f"as tokenised in {folder}"


def mixed_data(cfg: Config, tokens: int) -> dict[str, dict]:
    """Of each source of a mixture its share of what is trained on (None: known once all are
    tokenised), its tokens, where that number is from, and its passes; {} of a single source.

    Args:
        tokens: that are trained on, of all sources.
    """
    if cfg.data.mixture is None:
        return {}
    from lm.data.sources.mixture import parts, shares

    counted = {name: training_data(part, name) for name, part in parts(cfg).items()}
    known = {name: count for name, (count, _) in counted.items() if count is not None}
    of_each: dict[str, float | None] = dict.fromkeys(counted)
    if cfg.data.temperature is None or len(known) == len(counted):
        of_each.update(shares(cfg.data, known))
    sources = {}
    for name, (count, where) in counted.items():
        share = of_each[name]
        passes = None if share is None or count is None else share * tokens / count
        sources[name] = {"share": share, "tokens": count, "where": where, "passes": passes}
    return sources


def _mixed(p: dict) -> list[tuple[str, str]]:
    """Rows of the sources of a mixture."""
    rows = []
    for name, source in p["sources"].items():
        text = "share known once all are tokenised"
        if source["share"] is not None:
            text = f"{source['share']:.2%} of the sequences"
        text += f"; {_tokens(source['tokens'], source['where'])}"
        if source["passes"] is not None:
            again = ": its blocks come again in a new order" * (source["passes"] > 1)
            text += f"; {source['passes']:.2f} passes{again}"
        rows.append((f"source {name}", text))
    return rows


def _passes(p: dict, cfg: Config) -> str:
    """How often the run goes over its data, and what happens when they are at an end."""
    again = "the documents come again, their row groups in a new order"
    if cfg.data.source != "fineweb":
        again = "its blocks come again in a new order"
    if p["passes"] is None:
        return f"not known; after each {again}"
    count = f"{p['passes']:.2f}"
    if cfg.data.source == "fineweb" and not is_gpt2(cfg.tokenizer.name):
        count = f"about {count} (in GPT-2's tokens)"
    if p["passes"] <= 1:
        return f"{count}: nothing is read twice"
    return f"{count}: data repeats; after each pass {again}"


def fprnn_parameters(cfg: Config, vocab_size: int) -> int | None:
    """Of the fixed-point model with a baseline's sizes (d_model, n_layer, …); None for fprnn."""
    if cfg.model.name == "fprnn":
        return None
    same = cfg.model_copy(deep=True)
    same.model.name = "fprnn"
    return sum(p.numel() for p in on_the_meta_device(same, vocab_size).parameters())


@dataclass(frozen=True)
class Where:
    """What a run is planned for."""

    world_size: int  # GPUs in all
    card: Card
    nodes: int  # hosts they are in
    utilisation: float = UTILISATION
    evaluations: float | None = None  # a token and layer; None: see `Layers.evaluations`


def where(
    cfg: Config,
    world_size: int,
    gpu: str | None = None,
    nodes: int | None = None,
    utilisation: float | None = None,
    evaluations: float | None = None,
) -> Where:
    """What the options of `fprnn plan` mean; None is what they are by default.

    Raises:
        ConfigError: no such card, GPUs that the hosts cannot share evenly, a utilisation above 1,
            evaluations of a model that iterates nothing.
    """
    hosts = nodes or -(-world_size // GPUS_A_HOST)
    if world_size % hosts:
        even = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"{world_size} GPUs do not divide evenly among {hosts} hosts: give --nodes one of"
            f" {', '.join(map(str, even))}, or --gpus a multiple of {hosts}"
        )
    if utilisation is not None and utilisation > 1:
        raise ConfigError(
            f"--utilisation is {utilisation:g}: it is the share of the card's peak that is reached,"
            " above 0 and at most 1"
        )
    if evaluations is not None and not cfg.model.has_fixed_point:
        raise ConfigError(
            "--evaluations is of model.name fprnn:"
            f" {cfg.model.layers or cfg.model.name} iterates nothing"
        )
    if utilisation is None:
        utilisation = UTILISATION
    return Where(world_size, card(gpu or here()), hosts, utilisation, evaluations)


@dataclass(frozen=True)
class Layers:
    """The fixed-point layers of a model, by how each is solved."""

    kernel: int  # token by token, by a GPU's kernel
    loop: int  # token by token otherwise
    iterated: int
    at_once: int = 0  # of those, the ones whose equations one kernel solves

    @property
    def by_token(self) -> int:
        return self.kernel + self.loop

    def evaluations(self, at: Where) -> float | None:
        """A token's evaluations of a layer: as asked for; else the mean of 1 where a token is
        solved once, and of EVALUATIONS, an assumption (the paper reports fewer than 10 in
        training). None: the model iterates nothing."""
        if not (count := self.by_token + self.iterated):
            return None
        if at.evaluations is not None:
            return at.evaluations
        return (self.by_token + self.iterated * EVALUATIONS) / count


def layers_of(cfg: Config, model: PreTrainedModel, on_gpu: bool) -> Layers:
    """The layers of a model, which may lie on the meta device, where it trains: `auto` on a GPU is
    token by token where its kernel can (lm/model/fixed_point.py, `width`)."""
    blocks, solver = model.fixed_point_blocks(), cfg.solver.settled()
    known = [block for block in blocks if block.centroids is None]
    fitting = [b for b in known if (r := b.kernel_rank()) and fits_a_gpu(r, b.config.d_inner)]
    by_token = []
    if solver["token"] == "exact" and solver["schedule"] == "sequential":
        by_token = blocks
    elif solver["token"] == "exact" and solver["schedule"] == "auto":
        by_token = fitting if on_gpu else [b for b in blocks if b.mixer.has_low_rank]
    kernel = [b for b in by_token if b in fitting and on_gpu]
    iterated = [b for b in blocks if b not in by_token]
    reflecting = ((b, b.mixer.reflections()) for b in iterated)
    at_once = [b for b, r in reflecting if r is not None and fits_a_gpu(r[0], b.config.d_inner)]
    loop = len(by_token) - len(kernel)
    return Layers(len(kernel), loop, len(iterated), len(at_once))


def settled_schedule(cfg: Config, layers: Layers) -> Config:
    """The config with the schedule that `auto` is. Where layers differ, that of most memory."""
    solver = cfg.solver.settled()
    if not cfg.model.has_fixed_point or (solver["token"], solver["schedule"]) != ("exact", "auto"):
        return cfg
    copy = cfg.model_copy(deep=True)
    copy.solver.schedule = f"window:{AUTO_WINDOW}" if layers.iterated else "sequential"
    return copy


def plan(cfg: Config, at: Where | int) -> dict:
    """Numbers of a run, by the formulas of `lm.report.estimate`. Builds the model on the meta
    device; downloads nothing.

    Args:
        at: what for; a number is that of GPUs of the default card.
    Raises:
        ConfigError: as `build_model`, `vocabulary` and `deepspeed_config`.
    """
    if isinstance(at, int):
        at = where(cfg, at)
    cfg, own_mixers = with_built_in_mixers(cfg)
    vocab_size = vocabulary(cfg)
    model = on_the_meta_device(cfg, vocab_size)
    layers = layers_of(cfg, model, at.card.on_gpu)
    solved = settled_schedule(cfg, layers)
    if solved is not cfg:
        model = on_the_meta_device(solved, vocab_size)
    low_precision = low_precision_modules(deepspeed_config(cfg, at.world_size))
    counted = sizes(model, low_precision, cfg.optim)
    return {
        "at": at,
        "world_size": at.world_size,
        "vocab_size": vocab_size,
        "own_mixers": own_mixers,
        "init_from": init_from.check(cfg, model),
        "optimizer": described_optimizer(model, cfg.optim),
        "parameters": counted.parameters,
        "parameters_without_embedding": counted.parameters - counted.embedding,
        "parameters_of_fprnn": fprnn_parameters(cfg, vocab_size),
        **_planned_data(cfg, at),
        **_planned_work(solved, at, model, layers),
        **_planned_memory(solved, at, counted, vocab_size),
    }


def _planned_data(cfg: Config, at: Where) -> dict:
    """What is read, and how often."""
    tokens = cfg.train.steps * cfg.tokens_per_step(at.world_size)
    sources = mixed_data(cfg, tokens)
    dataset_tokens, dataset = (None, "") if sources else training_data(cfg)
    return {
        "sequences_per_step": cfg.train.sequences(at.world_size),
        "tokens_per_step": cfg.tokens_per_step(at.world_size),
        "tokens": tokens,
        "dataset_tokens": dataset_tokens,
        "dataset": dataset,
        "sources": sources,
        "passes": tokens / dataset_tokens if dataset_tokens else None,
    }


def _planned_work(cfg: Config, at: Where, model: PreTrainedModel, layers: Layers) -> dict:
    """FLOPs and hours of all passes."""
    passes = cfg.train.steps + cfg.updates_against
    passed = passes * cfg.tokens_per_step(at.world_size)  # tokens
    flops_per_token = flops_of(cfg, model)
    flops_in_all = {name: flops * passed for name, flops in flops_per_token.items()}
    evaluations = layers.evaluations(at)
    work = once = next(iter(flops_in_all.values()))
    if evaluations is not None:
        work = model.flops_per_token(evaluations, length=cfg.data.seq_len) * passed
    # Computing is that of one evaluation; the others move memory.
    hours = estimate.hours(once, at.world_size, at.card, cfg.train.precision, at.utilisation)
    of_moving = 0.0
    each = EVALUATIONS if at.evaluations is None else at.evaluations
    for count, at_once in ((layers.at_once, True), (layers.iterated - layers.at_once, False)):
        channels, solver = model.config.d_inner, cfg.solver.settled()
        of_moving += estimate.moving_hours(
            passed * count, channels, solver, at_once, each, at.world_size, at.card
        )
    # A layer that goes token by token on a GPU waits for launches, of the kernel or of PyTorch.
    micro_batches = passes * cfg.train.accumulation(at.world_size)
    length, sequences = cfg.data.seq_len, cfg.train.micro_batch_size
    of_launches = estimate.launch_hours(layers.kernel, length, micro_batches, sequences)
    if at.card.on_gpu and layers.loop:
        hours = None
    return {
        "flops_per_token": flops_per_token,
        "flops_in_all": flops_in_all,
        "evaluations": evaluations,
        "layers": layers,
        "flops": work,
        "launch_hours": of_launches,
        "moving_hours": of_moving,
        "hours": None if hours is None else hours + of_launches + of_moving,
    }


def _planned_memory(cfg: Config, at: Where, counted: Sizes, vocab_size: int) -> dict:
    """Bytes on a GPU, between GPUs and on the disk. counted: the model's sizes."""
    stage = deepspeed_config(cfg, at.world_size)["zero_optimization"]["stage"]
    passes = cfg.train.accumulation(at.world_size) * (2 if cfg.train.adversary else 1)
    sent = estimate.communication(counted, at.world_size, stage, passes)
    link, bytes_per_second = _link(at.card, at.nodes)
    known = at.world_size, at.card, counted, vocab_size
    stages = {s: estimate.memory(cfg, *known, stage=s) for s in range(highest_stage(cfg) + 1)}
    needed, limit = estimate.memory(cfg, *known), estimate.limit(at.card, at.world_size)
    fits = needed.total <= limit
    return {
        "zero_stage": stage,
        "memory": needed,
        "limit": limit,
        "fits": fits,
        "change": None if fits else smaller_batch(cfg, *known),
        "stages": stages,
        "communication": sent,
        "communication_seconds": sum(sent.values()) / bytes_per_second,
        "link": link,
        "checkpoint_bytes": estimate.checkpoint_bytes(counted, stage),
    }


def smaller_batch(
    cfg: Config, world_size: int, card: Card, of: Sizes, vocab_size: int
) -> tuple[dict[str, int | bool], estimate.Memory] | None:
    """The largest micro-batch that fits, with the same global batch, as dotted keys, and its
    memory; with gradient checkpointing where none fits without; None: nothing of this does."""
    t = cfg.train
    for extra in ({}, {"model.gradient_checkpointing": True}):
        for part in range(1, t.micro_batch_size + 1):
            if t.micro_batch_size % part:
                continue
            keys: dict[str, int | bool] = dict(extra)
            if part > 1:
                keys["train.micro_batch_size"] = t.micro_batch_size // part
                if t.global_batch_size is None:  # else accumulation follows
                    keys["train.grad_accum_steps"] = t.accumulation(world_size) * part
            tree = cfg.model_dump(mode="json")
            for key, value in keys.items():
                load.set_key(tree, key, value)
            needed = estimate.memory(load.build(tree), world_size, card, of, vocab_size)
            if needed.total <= estimate.limit(card, world_size):
                return keys, needed
    return None


def _link(card: Card, nodes: int) -> tuple[str, float]:
    """Name and bytes a second that a GPU sends over the slowest link of so many hosts."""
    if nodes > 1:
        return "InfiniBand", INFINIBAND
    return ("NVLink", card.nvlink) if card.nvlink else ("PCIe", PCIE)


def _tokens(count: float | None, where: str) -> str:
    if count is None:
        return where
    return f"{_amount(count)} ({where})"


def _amount(count: float) -> str:
    """2.517 B; smaller numbers in full."""
    return f"{count / 1e9:,.3f} B" if count >= 1e8 else f"{count:,.0f}"


def describe(p: dict, cfg: Config, measured: Measured | None = None) -> Table:
    """The plan as a rich table of one screen, with what was measured here."""
    from rich.table import Table

    table = Table(title=f"Plan of {cfg.name}", show_header=False, title_justify="left")
    seen = []
    if measured is not None:
        updates = cfg.train.steps
        seen = measured.rows(updates * cfg.train.accumulation(p["world_size"]))
    for rows in (_what(p, cfg), _work(p, cfg), _memory(p), seen):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _what(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Model and data."""
    of_all = f"{p['parameters'] / 1e6:,.1f} M"
    rows = [("parameters", of_all)]
    if beside := p["parameters_of_fprnn"]:
        m = cfg.model
        share = f"{p['parameters'] / beside:.2f} of its {beside / 1e6:,.1f} M"
        sizes = f"{m.n_layer} layers, d_model {m.d_model}, as here"
        rows.append(("… beside fprnn", f"{share} ({sizes})"))
    return [
        *rows,
        ("… without embedding", f"{p['parameters_without_embedding'] / 1e6:,.1f} M"),
        ("vocabulary", f"{p['vocab_size']:,}"),
        *(
            ("mixer", f"{name} is not imported by a plan: counted as a householder")
            for name in p["own_mixers"]
        ),
        *(("init from", line) for line in p["init_from"]),
        ("ranks (GPUs)", _ranks(p["at"])),
        ("sequences per update", f"{p['sequences_per_step']:,} of {cfg.data.seq_len:,} tokens"),
        ("tokens per update", f"{p['tokens_per_step']:,}"),
        ("tokens trained on", f"{_amount(p['tokens'])} in {cfg.train.steps:,} updates"),
        *(_mixed(p) or _single(p, cfg)),
        *(("optimizer", line) for line in p["optimizer"]),
    ]


def _single(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Rows of a single source."""
    return [
        ("tokens in the data", _tokens(p["dataset_tokens"], p["dataset"])),
        ("passes over the data", _passes(p, cfg)),
    ]


def _ranks(at: Where) -> str:
    if not at.card.on_gpu:
        return f"{at.world_size} (on this CPU)"
    return f"{at.world_size} × {at.card.name} in {at.nodes} host{'s' * (at.nodes > 1)}"


def _work(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """FLOPs, hours, what is sent and saved."""
    rows = []
    for name, flops in p["flops_per_token"].items():
        total = f"{p['flops_in_all'][name]:.2e} in all"
        rows.append((f"FLOPs per token, {name}", f"{flops / 1e9:,.3f} G  ({total})"))
    at = p["at"]
    if p["hours"] is None and at.card.on_gpu:
        count = f"{p['layers'].loop} layer{'s' * (p['layers'].loop > 1)}"
        rows.append(("hours", f"not known: no kernel solves {count} token by token on a GPU"))
    elif p["hours"] is None:
        rows.append(("hours", "not known of a CPU: a short run says its tokens/s"))
    else:
        rows += _hours(p, cfg)
    if at.world_size > 1:
        sent, link = sum(p["communication"].values()), p["link"]
        how = f"{p['communication_seconds']:.2g} s over {link} where nothing overlaps"
        rows.append(("sent per update", f"{_size(sent)} a GPU, {how}"))
    rows.append(("checkpoint", f"{p['checkpoint_bytes'] / GIB:,.2f} GiB"))
    return rows


def _hours(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of the hours: their sum, each part, and the option that changes it."""
    at, computing = p["at"], p["hours"] - p["launch_hours"] - p["moving_hours"]
    peak = at.card.peak[cfg.train.precision] / 1e12
    passes = ""
    if cfg.train.adversary:
        least = "at least " * cfg.waits
        passes = f", two passes in {least}{cfg.updates_against:,} updates"
    parts = [
        (
            "… matrix products",
            f"{computing:,.2f} at {at.utilisation:.0%} of {peak:g} TFLOP/s, assumed: changed by"
            " --utilisation",
        )
    ]
    if p["launch_hours"]:
        text = f"{p['launch_hours']:,.2f} in layers solved one token after the other: seconds of"
        text += " untrained layers, measured on an H100; no option or card changes it"
        parts.append(("… token after token", text))
    if p["moving_hours"]:
        text = f"{p['moving_hours']:,.2f} to move what is iterated, by {p['evaluations']:g}"
        text += " evaluations a token, assumed: changed by --evaluations"
        parts.append(("… memory traffic", text))
    total = "the sum of these" if len(parts) > 1 else "of these"
    return [("hours", f"{p['hours']:,.2f}, {total}{passes}"), *parts]


PARTS = {
    "weights": "weights",
    "master": "DeepSpeed's copy of them",
    "gradients": "gradients",
    "optimizer": "optimizer's moments",
    "buffers": "DeepSpeed's buffers",
    "runtime": "CUDA, NCCL (assumed)",
    "activations": "activations",
    "working": "a layer's solve, backward",
    "loss": "logits and loss",
}


def _memory(p: dict) -> list[tuple[str, str]]:
    """Memory by part and by ZeRO stage against the card, and what would make it fit."""
    needed, at = p["memory"], p["at"]
    smaller = "working" if needed.working < needed.loss else "loss"
    rows = []
    for name, said in PARTS.items():
        if size := getattr(needed, name):
            apart = " (not at the same time)" if name == smaller else ""
            rows.append((f"memory: {said}", f"{_size(size)}{apart}"))
    for stage, of_stage in p["stages"].items():
        left = p["limit"] - of_stage.total
        verdict = "fits" if left >= 0 else f"{_size(-left)} too much"
        verdict += ", as configured" if stage == p["zero_stage"] else ""
        row = f"{_size(of_stage.total)} (estimate): {verdict}"
        rows.append((f"memory per GPU, ZeRO-{stage}", row))
    card = f"{_size(p['limit'])} of {_size(at.card.memory)} ({at.card.name})"
    rows.append(("memory there is", card if at.card.on_gpu else f"{_size(p['limit'])} a rank"))
    if not p["fits"]:
        rows.append(("to make it fit", _change(p)))
    return rows


def _change(p: dict) -> str:
    if p["change"] is None:
        return "no micro-batch does, checkpointed or not: a ZeRO stage, more GPUs, a smaller model"
    keys, needed = p["change"]
    texts = [f"{key}={str(value).lower()}" for key, value in keys.items()]
    return f"{' '.join(texts)} (then {_size(needed.total)})"


def _size(count: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.2f} MiB"
