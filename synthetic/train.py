"""The one trainer of all tasks and models: data, model, steps, evaluation, result; one process."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch
import torch.nn.functional as F

from lm.build import missing_kernels
from lm.checkpoint import CheckpointError, claim, write_json
from lm.console import Progress, say
from lm.engine import TrainingError, lr_factor, parameter_groups
from lm.errors import require
from lm.kernels import available
from lm.metrics import FailureWatch, Writer, adjoint_metrics, fixed_point_metrics, is_due
from lm.model.noise import Adversary
from synthetic import tasks
from synthetic.build import build, read_checkpoint
from synthetic.config import Config
from synthetic.evaluate import (
    answer,
    as_tensors,
    check_seeds,
    evaluate_all,
    measure,
    parse_lengths,
    probe_first,
    sequences_that_fit,
    solver_of,
    solving,
)
from synthetic.results import passes, solver_text

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # save and stop


class Stopped(TrainingError):
    """A signal asked for it; the checkpoint is saved."""


class Batches(torch.utils.data.Dataset):
    """Training batches by number; each is made from (seed, number) alone."""

    def __init__(self, task, cfg: Config, lengths: tuple[int, int], first: int):
        self.task, self.cfg, self.lengths, self.first = task, cfg, lengths, first

    def __len__(self):
        return self.cfg.train.steps - self.first

    def __getitem__(self, i):
        cfg = self.cfg
        return self.task.batch(
            cfg.seed, "train", self.first + i, cfg.train.batch_size, self.lengths
        )


def loader(task, cfg: Config, lengths: tuple[int, int], first: int):
    """Training batches from number `first` on."""
    return iter(
        torch.utils.data.DataLoader(
            Batches(task, cfg, lengths, first), batch_size=None, collate_fn=lambda batch: batch,
            num_workers=cfg.train.workers, generator=torch.Generator(),  # leaves the global one be
        )
    )  # fmt: skip


class MaxIters:
    """ℓmax of every training step: fixed, none, or drawn from ⌈Γ(shape, 1)⌉ (paper, Fig. 6)."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def at(self, step: int) -> int:
        """ℓmax of an update."""
        t = self.cfg.train
        if t.max_iters == "config":
            return self.cfg.solver.max_iters
        if t.max_iters == "unlimited":
            return 10**9  # the solver's own damping gives up long before
        if t.max_iters == "gamma":
            rng = np.random.default_rng([self.cfg.seed, len(tasks.SPLITS), step])
            return int(np.ceil(rng.gamma(t.gamma_shape)))
        return t.max_iters


def loss_of(model, ids, mask, labels, state, carries, autocast):
    """The mean loss over the labels that count, and what `answer` returns."""
    with autocast():
        logits, solved, state = answer(model, ids, mask, state, carries, False)
    count = (labels != tasks.IGNORE).sum()
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=tasks.IGNORE, reduction="sum"
    ) / count.clamp_min(1)  # a segment of a stream may hold no answer
    if solved[0] is not None:
        loss = loss + solved[0].penalty.mean()
    return loss, logits, solved, state


def backward(one_pass, adversary: Adversary | None):
    """The gradient of one pass over a batch, or of the mean of it and one against an adversary.

    Args: one_pass: () → what `loss_of` returns.
    Returns: what the first pass returned, and the second's loss or None.
    """
    if adversary is None:
        passed = one_pass()
        passed[0].backward()
        return passed, None
    with adversary.first_pass():
        passed = one_pass()
    (passed[0] / 2).backward()
    with adversary.second_pass():
        worse = one_pass()[0]
    (worse / 2).backward()
    return passed, worse


def train(cfg: Config, overwrite: bool = False) -> dict:
    """Train (or continue) the run that `cfg` describes, evaluate it, and return its result.

    Raises:
        ConfigError, TaskError, CheckpointError: something asked for cannot be had.
        TrainingError: the loss became NaN or infinite. Stopped: a signal asked for a stop.
    """
    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    task = tasks.build(cfg.task)
    lo, hi = cfg.train.lengths
    lengths = parse_lengths(cfg.eval.lengths, task)
    during = parse_lengths(cfg.eval.during, task) if cfg.eval.during else []
    _check(cfg, task, lengths)
    check_seeds(cfg.eval.seeds, task)
    for package, wanted in (("wandb", cfg.log.wandb), ("tensorboard", cfg.log.tensorboard)):
        if wanted:
            require(package, f"log.{package}")
    model, device, precision = build(cfg, task, max(hi, *lengths))
    if not getattr(task, "streams", False):  # whose segments are as long as in training
        sequences_that_fit(model, max([*lengths, *during]), 1, device)
    parameters = sum(p.numel() for p in model.parameters())
    streams = getattr(task, "streams", False)
    carries_state = getattr(model, "carries_state", False)
    carries = streams and carries_state
    if cfg.eval.sequential and not carries_state:
        raise tasks.TaskError(
            f"eval.sequential: {cfg.model.name} carries no state, it cannot go token by token"
        )
    run_dir = cfg.run_dir
    claim(cfg, overwrite, say)  # now that nothing is left to refuse
    o = cfg.optim
    optimizer = torch.optim.AdamW(
        parameter_groups(model, o.weight_decay), lr=o.lr, betas=tuple(o.betas), eps=o.eps
    )
    say(f"run      {run_dir}")
    say(f"task     {_task_line(cfg, task)}")
    size = f"{parameters / 1e6:.3f} M parameters"
    say(f"model    {cfg.model.name}, {size}, on {device} in {precision}")
    if cfg.model.name == "fprnn":
        say(f"kernels  {available(device.type)}")
    say(f"solver   {_solver_line(model, cfg)}")
    if streams and not carries:
        say(f"note: {cfg.model.name} carries no state: every segment starts from an empty one")
    if warning := missing_kernels(cfg):
        say(warning)

    done, seconds, solved_at, state = 0, 0.0, None, None
    seen: set[int] | None = set()  # of training's samples those that are not held apart
    longest = min(hi, cfg.train.curriculum.start) if cfg.train.curriculum else hi
    path = run_dir / "checkpoints" / "last.pt"
    if cfg.resume == "auto" and path.exists():
        saved = read_checkpoint(path, device)
        if saved["step"] > cfg.train.steps:
            raise CheckpointError(
                f"{run_dir} has made {saved['step']} updates, and train.steps is only"
                f" {cfg.train.steps}: raise it, or train anew with --overwrite"
            )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done, seconds, longest = saved["step"], saved["seconds"], saved["longest"]
        solved_at, state = saved["solved_at"], saved["state"]
        kept = saved.get("seen")  # not of runs that began before it was kept
        seen = None if kept is None else set(kept.tolist())
        torch.set_rng_state(saved["rng"].cpu())
        say(f"resumed  at update {done}")
    if done < cfg.train.steps and solved_at is None:  # what is there is of fewer updates
        (run_dir / "result.json").unlink(missing_ok=True)
    writer = Writer(cfg, run_dir, resumed_at=done)
    kappa = cfg.train.adversary
    adversary = Adversary(model.fixed_point_blocks(), kappa) if kappa else None

    def save():
        saved = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
            "seconds": seconds + time.perf_counter() - began, "longest": longest,
            "solved_at": solved_at, "state": state, "rng": torch.get_rng_state(),
            "seen": None if seen is None else torch.tensor(sorted(seen), dtype=torch.uint64),
        }  # fmt: skip
        tmp = path.with_name(path.name + ".tmp")
        torch.save(saved, tmp)
        os.replace(tmp, path)

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")

    def try_out(length):
        return measure(model, task, cfg, length, "valid", cfg.seed, precision, seen=seen)

    stop = []
    handlers = {n: signal.signal(n, lambda *_: stop.append(1)) for n in SIGNALS}
    steps, step = cfg.train.steps, done
    solver = solver_of(model.train())
    watch = FailureWatch(say, solver)
    max_iters, began = MaxIters(cfg), time.perf_counter()
    since, tokens, stats, right, due = began, 0, [], 0, 0
    batches = loader(task, cfg, (min(lo, longest), longest), done)
    try:
        with Progress("training", total=steps, start=done, unit="updates") as bar:
            for step in range(done + 1, steps + 1):
                if solved_at is not None:
                    step -= 1
                    break
                lr = o.lr * lr_factor(o, steps, step)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                batch = next(batches)
                if seen is not None and batch.shared is not None:
                    seen.update(np.unique(batch.shared).tolist())
                ids, labels, mask = as_tensors(batch, device)
                scored = labels != tasks.IGNORE
                count = scored.sum()
                limit = None if cfg.train.max_iters == "config" else max_iters.at(step)
                model.train()
                optimizer.zero_grad(set_to_none=True)
                before = state if batch.carry else None
                tensors = ids, mask, labels, before
                with solving(model, max_iters=limit):
                    passed, worse = backward(
                        lambda: loss_of(model, *tensors, carries, autocast),  # noqa: B023
                        adversary if longest == hi else None,
                    )
                loss, logits, solved, state = passed
                if solved[0] is not None:
                    stats += solved
                clip = o.grad_clip or float("inf")
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                if not torch.isfinite(norm + loss.detach()):
                    raise TrainingError(
                        f"stopped at update {step}: the loss is {loss.item()}, the gradient norm"
                        f" {norm.item()}"
                    )
                optimizer.step()
                right += ((logits.argmax(-1) == labels) & scored).sum()
                due += count
                tokens += ids.numel()
                if step % cfg.log.every == 0 or step == steps:
                    now = time.perf_counter()
                    record = {
                        "step": step, "loss": loss.item(), "accuracy": float(right / max(1, due)),
                        "lr": lr, "grad_norm": norm.item(), "longest": longest,
                        **({} if worse is None else {"adversarial_loss": worse.item()}),
                        "tokens_per_s": round(tokens / (now - since), 1),
                        "seconds": round(seconds + now - began, 1), **fixed_point_metrics(stats),
                        **adjoint_metrics(model),
                    }  # fmt: skip
                    writer.write(record)
                    watch.look(record.get("failed", []), f"update {step}")
                    bar.update(step, steps, _describe(record))
                    since, tokens, stats, right, due = now, 0, [], 0, 0
                else:
                    bar.update(step, steps)
                tries = step % cfg.eval.every == 0 and step < steps  # which probes as well
                if solver != "none" and is_due(step, cfg.log.probe_every) and not tries:
                    paused = time.perf_counter()
                    with autocast():
                        measured = fixed_point_metrics([probe_first(model, ids, mask)])
                    writer.write({"step": step, "probe": measured})
                    began += time.perf_counter() - paused
                    since += time.perf_counter() - paused
                if tries:
                    paused = time.perf_counter()
                    tried = try_out(longest)
                    score = tried["metrics"][task.headline]
                    spent = seconds + paused - began
                    record = {"step": step, "valid": tried, "seconds": round(spent, 1)}
                    if during:
                        record["over_lengths"] = {n: try_out(n) for n in during}
                    writer.write(record)
                    say(f"update {step:>6}  length {longest}: {_scores(tried)}")
                    if longest < hi and score >= cfg.train.curriculum.at:
                        longest = min(hi, longest + cfg.train.curriculum.grow)
                        batches, state = loader(task, cfg, (min(lo, longest), longest), step), None
                    elif longest == hi and score >= (cfg.train.stop_at or float("inf")):
                        solved_at = step
                    began += time.perf_counter() - paused  # seconds are those of training
                    since, tokens = time.perf_counter(), 0
                if stop or step % cfg.checkpoint.every == 0 or step == steps or solved_at:
                    save()
                if stop:
                    raise Stopped(
                        f"stopped by a signal after update {step}, checkpoint saved: the same"
                        " command continues"
                    )
        seconds += time.perf_counter() - began
    finally:
        writer.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)

    results = evaluate_all(model, task, cfg, lengths, cfg.eval.seeds, precision, seen)
    result = {
        "task": cfg.task.name, "model": cfg.model.name, "parameters": parameters,
        "updates": step, "solved_at": solved_at, "training_seconds": round(seconds, 1),
        "headline": task.headline, "chance": task.chance,
        "eval": results, "bars": passes(cfg.bars, results),
    }  # fmt: skip
    write_json(run_dir / "result.json", result)
    return result


def _check(cfg: Config, task, lengths: list[int]) -> None:
    """Say now what would otherwise stop the run, or fail a bar, hours later."""
    lo, hi = cfg.train.lengths
    curriculum = cfg.train.curriculum
    for length in (*(range(curriculum.start, hi, curriculum.grow) if curriculum else ()), hi):
        task.check_length(length)
    # It fits its context, its data.
    batch = task.batch(cfg.seed, "train", 0, cfg.train.batch_size, (lo, hi))
    metrics = list(task.score(batch.labels, batch))
    tested = [hi] if getattr(task, "streams", False) else lengths
    for bar in cfg.bars:
        if bar.metric not in metrics:
            raise tasks.TaskError(
                f"a bar is on `{bar.metric}`: {cfg.task.name} has {', '.join(metrics)}"
            )
        if bar.length not in (None, *tested):
            raise tasks.TaskError(
                f"a bar is at length {bar.length}, which eval.lengths does not try"
                f" ({', '.join(map(str, tested))})"
            )


def _task_line(cfg: Config, task) -> str:
    what = f"{cfg.task.name} {cfg.task.group}" if cfg.task.name == "word_problem" else cfg.task.name
    lo, hi = cfg.train.lengths
    at = f"{lo} to {hi}" if lo < hi else f"{hi}"
    return f"{what}, {task.vocab_size} ids, training length {at} (chance {task.chance:.3g})"


def _solver_line(model, cfg: Config) -> str:
    """How the model solves in training and in evaluation."""
    training, evaluation = (solver_of(model.train(mode)) for mode in (True, False))
    if training == "none":
        return training
    if training["max_iters"] is not None:
        training["max_iters"] = MaxIters(cfg).at(0)
        if cfg.train.max_iters == "gamma":
            training["max_iters"] = f"⌈Γ({cfg.train.gamma_shape:g}, 1)⌉"
    if evaluation["max_iters"] is not None:
        evaluation["max_iters"] = cfg.eval.max_iters or evaluation["max_iters"]
    return (
        f"training: {solver_text(training)}, gradient {training['gradient']};"
        f" evaluation: {solver_text(evaluation)}"
    )


def _scores(tried: dict) -> str:
    text = "  ".join(f"{k} {v:.3f}" for k, v in tried["metrics"].items() if not k.startswith("qa"))
    iters = tried.get("num_iters")
    return text + ("  ℓ* " + " ".join(f"{v:.1f}" for v in iters["mean"]) if iters else "")


def _describe(record: dict) -> str:
    text = f"loss {record['loss']:.3f}  acc {record['accuracy']:.3f}  |g| {record['grad_norm']:.2f}"
    if "evaluations" in record:
        text += "  evaluations " + " ".join(f"{v:.1f}" for v in record["evaluations"])
        failed = max(record["failed"])
        text += f"  failed {failed:.2%}" if failed else ""
    return f"{text}  {record['tokens_per_s']:,.0f} tok/s"
