"""The training run, top to bottom: data, model, engine, resume, steps, validation, checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from pathlib import Path

from lm import checkpoint
from lm import engine as ds
from lm.build import build_model, check_section, missing_kernels, vocabulary
from lm.config import Config, ConfigError, check_warmup
from lm.console import Progress, say
from lm.data.sources import SUFFIXES, source_files
from lm.errors import require
from lm.kernels import asked
from lm.metrics import (
    FailureWatch,
    Throughput,
    Writer,
    adjoint_metrics,
    fixed_point_metrics,
    is_due,
    probe,
)

WANDB_MODES = ("online", "offline", "shared", "disabled", "run", "dryrun")


def environment(ranks) -> dict:
    """What the run ran on: versions and devices, and which accelerators were missing."""
    from importlib.metadata import version

    import torch

    from lm.kernels import available

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "deepspeed": version("deepspeed"),
        "device": gpu or f"CPU, {torch.get_num_threads()} threads",
        "world_size": ranks.world_size,
        "kernels": available("cuda" if gpu else "cpu"),
    }


def check_config(cfg: Config, world_size: int) -> None:
    """Refuse what cannot be trained, whatever is installed here; for a dry run as well.

    Raises:
        ConfigError: another number of processes than the config is meant for, a warm-up that cannot
            be, sizes that do not go together, a DeepSpeed JSON that cannot be used.
        CheckpointError: no checkpoint of the name that `resume` gives.
        BackendError: FPRNN_KERNELS names nothing that we have. DataError: no file at data.path.
    """
    wanted = cfg.train.world_size
    if wanted and wanted != world_size:
        raise ConfigError(
            f"train.world_size is {wanted} but {world_size} process(es) were asked for: launch"
            f" {wanted} (deepspeed --num_gpus {wanted} …), or set train.world_size and"
            " train.grad_accum_steps to keep the global batch"
        )
    asked()
    check_warmup(cfg)
    checkpoint.check_resume(cfg.resume)
    ds.check_contraction(cfg, ds.deepspeed_config(cfg, world_size))
    check_section(cfg.model, cfg.solver, cfg.data.seq_len, cfg.train.precision)
    if cfg.data.path is not None and cfg.data.source in SUFFIXES:
        source_files(cfg.data)


def check(cfg: Config, world_size: int) -> None:
    """Refuse what cannot be, before anything is read or written.

    Raises:
        ConfigError, CheckpointError, BackendError, DataError: as `check_config`; a WANDB_MODE that
            wandb does not know.
        MissingPackageError: something that the config asks for is not installed.
    """
    check_config(cfg, world_size)
    for package, key, wanted in [
        ("wandb", "log.wandb", cfg.log.wandb),
        ("tensorboard", "log.tensorboard", cfg.log.tensorboard),
        ("pyarrow", "data.source: parquet", cfg.data.source == "parquet"),
        ("datasets", "data.source: fineweb", cfg.data.source == "fineweb"),
    ]:
        if wanted:
            require(package, key)
    mode = os.environ.get("WANDB_MODE")
    if cfg.log.wandb and mode and mode not in WANDB_MODES:
        raise ConfigError(f"WANDB_MODE is {mode!r}: it must be one of {', '.join(WANDB_MODES)}")


def train(cfg: Config, overwrite: bool = False) -> Path:
    """Train (or continue) the run that `cfg` describes, and return its run directory.

    Raises:
        ConfigError, DataError, CheckpointError: something asked for cannot be had.
        TrainingError: the loss or gradient became NaN or infinite; the last checkpoint stands.
    """
    ranks = ds.start(cfg)
    say.enabled = ranks.is_main
    with contextlib.ExitStack() as on_exit:  # also on an error: what was logged is written out
        on_exit.callback(ds.stop)
        return _train(cfg, ranks, overwrite, on_exit)


def _train(cfg: Config, ranks, overwrite: bool, on_exit: contextlib.ExitStack) -> Path:
    from lm.data import loader, prepare
    from lm.data.ngram import ngram_baselines
    from lm.data.tokenizer import load_tokenizer

    check(cfg, ranks.world_size)
    run_dir = cfg.run_dir
    ranks.first(checkpoint.claim, cfg, overwrite, say)

    # Data. Rank 0 tokenises, the others open what it wrote.
    say(f"run      {run_dir} ({ranks.world_size} process{'es' * (ranks.world_size > 1)})")
    say(f"data     {cfg.data.source}; tokenizer {cfg.tokenizer.name}")
    ranks.first(lambda: bool(load_tokenizer(cfg, run_dir, say)))
    tokenizer = load_tokenizer(cfg, run_dir)
    vocab_size = vocabulary(cfg, len(tokenizer))
    with Progress("tokenised", unit="documents") as bar:
        ranks.first(
            lambda: bool(
                prepare.prepare(cfg, tokenizer, run_dir, lambda documents, _: bar.update(documents))
            )
        )
    batches, validation = loader.build(cfg, tokenizer, run_dir, ranks.rank, ranks.world_size)

    # Model and engine.
    model = build_model(cfg, vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id)
    parameters = sum(p.numel() for p in model.parameters())  # ZeRO-3 leaves none to count
    flops = _affine(getattr(model, "flops_per_token", None))
    engine = ds.Engine(cfg, model, ranks)
    env = environment(ranks)

    # Resume.
    done, seconds = 0, 0.0
    path = None
    if cfg.resume == "auto":
        path = ranks.first(checkpoint.newest, run_dir, say)
    elif cfg.resume != "never":
        path = Path(cfg.resume)
    if path is not None:
        done, state = checkpoint.load(engine, path, ranks.first(checkpoint.verify, path))
        batches.load_state_dict(state["loader"])
        seconds = state["seconds"]
        if path.resolve().parent == (run_dir / "checkpoints").resolve():
            ranks.first(checkpoint.drop_after, run_dir, done)
        say(f"resumed  {path} at update {done}")
    if ranks.is_main:
        checkpoint.write_json(run_dir / "deepspeed.json", engine.config)
        checkpoint.write_json(run_dir / "environment.json", env)
    writer = Writer(cfg, run_dir, resumed_at=done) if ranks.is_main else None
    if writer:
        on_exit.callback(writer.close)

    steps, per_step = cfg.train.steps, cfg.tokens_per_step(ranks.world_size)
    say(f"device   {env['device']}; kernels: {env['kernels']}")
    say(f"model    {cfg.model.name}, {parameters / 1e6:.2f} M parameters, {vocab_size} tokens")
    if warning := missing_kernels(cfg):
        say(warning)
    say(f"training {steps} updates of {per_step} tokens, ZeRO-{engine.zero_stage}")

    def save(step):
        state = {"loader": batches.state_dict(), "seconds": seconds + time.perf_counter() - began}
        return checkpoint.save(engine, run_dir, step, state, cfg.checkpoint.keep)

    solves = cfg.model.name == "fprnn"
    watch = FailureWatch(say, model.solver() if solves else "none")

    def probed():  # the same micro-batch each time: what changes is the model
        if not solves:
            return {}
        batch = validation[0]
        report = probe(engine.deepspeed, batch["input_ids"].to(ranks.device))
        rows = (batch["labels"] != -100).any(-1)
        return {"probe": fixed_point_metrics([report], ranks.gather, rows)}

    def validate(step, final=False):
        with Progress("validating", unit="batches") as bar:
            record = {"step": step, "validation": engine.validate(validation, bar.update)}
        record |= probed()
        if final and ranks.is_main:
            corpus = prepare.open_corpus(run_dir)
            targets = loader.validation_blocks(corpus.val, cfg.data, cfg.train.micro_batch_size)
            record["baselines"] = ngram_baselines(corpus.train, targets, vocab_size)
        if writer:
            writer.write(record)
        v = record["validation"]
        say(
            f"update {step:>6}  validation loss {v['loss']:.4f}  perplexity {v['perplexity']:.2f}"
            + _iterations(record)
        )
        if solves:
            watch.look(record["probe"]["failed"], f"validation after update {step}")
        return record

    # The loop.
    engine.stop_on_signals()
    began = time.perf_counter()
    speed = Throughput(flops, ranks.world_size)
    stream, stats = iter(batches), []
    saved_at = done
    with Progress("training", total=steps, start=done, unit="updates") as bar:
        for step in range(done + 1, steps + 1):
            lr = engine.lr
            try:
                micro = [next(stream) for _ in range(cfg.train.grad_accum_steps)]
                loss, norm, step_stats = engine.step(micro)
            except (ds.TrainingError, FloatingPointError) as e:
                kept = (
                    f"checkpoint of update {saved_at} stands" if saved_at else "nothing saved yet"
                )
                raise ds.TrainingError(f"stopped at update {step}: {e}; {kept}") from None
            stats += step_stats
            speed.tokens += per_step
            if step % cfg.log.every == 0 or step == steps:
                solver = fixed_point_metrics(stats, ranks.gather)
                record = {
                    "step": step,
                    "loss": loss,
                    "perplexity": math.exp(min(loss, 700.0)),
                    "lr": lr,
                    "grad_norm": norm,
                    "tokens": step * per_step,
                    **speed.read(_mean(solver.get("evaluations", []))),
                    **solver,
                    **adjoint_metrics(model, ranks.gather),
                    **(engine.contraction(micro[0]) if cfg.log.contraction else {}),
                }
                stats = []
                if writer:
                    writer.write(record)
                bar.update(step, steps, _describe(record))
                watch.look(record.get("failed", []), f"update {step}")
            else:
                bar.update(step, steps)
            validates = step % cfg.eval.every == 0 or step == steps  # which probes as well
            if solves and is_due(step, cfg.log.probe_every) and not validates:
                record = {"step": step, **probed()}
                if writer:
                    writer.write(record)
                say(f"update {step:>6}{_iterations(record)}")
                speed.restart()
            if step % cfg.checkpoint.every == 0 or step == steps or engine.stopping:
                save(step)
                saved_at = step
                speed.restart()
            if engine.stopping and step < steps:
                raise ds.Preempted(
                    f"stopped by a signal after update {step}, checkpoint saved: continue with"
                    " resume=auto"
                )
            if step % cfg.eval.every == 0 and step < steps:
                validate(step)
                speed.restart()
    seconds += time.perf_counter() - began
    if done >= steps:
        say(f"complete already: {done} of {steps} updates; --overwrite trains anew")
    if done < steps or not ranks.first((run_dir / "result.json").exists):
        final = validate(steps, final=True)
        result = {
            "updates": steps,
            "tokens": steps * per_step,
            "training_seconds": round(seconds, 1),
            "tokens_per_s": round(steps * per_step / max(seconds, 1e-9), 1),
            "parameters": parameters,
            "vocab_size": vocab_size,
            **{k: v for k, v in final.items() if k != "step"},
        }
        ranks.first(checkpoint.write_json, run_dir / "result.json", result)
    engine.close()
    return run_dir


def _affine(flops_per_token):
    """Evaluations a token → FLOPs, taken while the weights are whole; None for a model that cannot
    say."""
    if flops_per_token is None:
        return None
    at_zero, at_one = flops_per_token(0), flops_per_token(1)
    return lambda evaluations: at_zero + evaluations * (at_one - at_zero)


def _mean(values) -> float:
    return sum(values) / len(values) if values else 0.0


def _iterations(record: dict) -> str:
    """ℓ* of each layer, of a record that has a probe."""
    if "probe" not in record:
        return ""
    return "  ℓ* " + " ".join(f"{v:.1f}" for v in record["probe"]["num_iters"]["mean"])


def _describe(record: dict) -> str:
    """One log line: what a person watches."""
    text = f"loss {record['loss']:.3f}  lr {record['lr']:.1e}  |g| {record['grad_norm']:.2f}"
    if "evaluations" in record:
        text += "  evaluations " + " ".join(f"{v:.1f}" for v in record["evaluations"])
        failed = max(record["failed"])
        text += f"  failed {failed:.2%}" if failed else ""
    if "mfu" in record:
        text += f"  MFU {record['mfu']:.1%}"
    return f"{text}  {record['tokens_per_s']:,.0f} tok/s"


def result(run_dir: Path) -> dict:
    """`result.json` of a finished run.

    Raises:
        CheckpointError: the run has not finished, or the file is damaged.
    """
    path = Path(run_dir) / "result.json"
    if not path.exists():
        raise checkpoint.CheckpointError(f"{run_dir} has no result.json: training is unfinished")
    keys = ("updates", "tokens", "training_seconds", "tokens_per_s", "validation")
    value = checkpoint.read_json(path, keys)
    reached = value["validation"]
    if not isinstance(reached, dict) or not {"perplexity", "tokens"} <= reached.keys():
        raise checkpoint.CheckpointError(
            f"{path} is damaged: its validation must hold perplexity and tokens"
        )
    return value
