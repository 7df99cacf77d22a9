"""Mutations of schedules, optimizers, warm-ups, z-loss, skipped updates, averaged weights."""

from tests.mutations import Mutation

MUON = "lm/training/muon.py"
OPTIM = "lm/training/optim.py"
LOSS = "lm/model/loss.py"
METRICS = "lm/runs/metrics.py"
EMA = "lm/training/ema.py"
ENGINE = "lm/training/engine.py"
TRAIN = "lm/training/train.py"
WARMUPS = "lm/config/warmups.py"
RECIPES = "tests/lm/training/test_recipes.py::"
STABILITY = "tests/lm/training/test_stability.py::"
ACTIVE = (RECIPES + "test_muon_is_active_in_every_stage_that_may_have_it",)
WSD = (RECIPES + "test_wsd_is_flat_and_then_linear",)
RATES = (RECIPES + "test_each_parameter_has_the_rate_of_its_pattern",)
UPDATES = (STABILITY + "test_updates_with_z_loss_and_skipped_ones",)
LOG_Z = (STABILITY + "test_log_z_is_that_of_the_softmax_and_no_part_of_the_loss",)
OUTLIERS = (
    STABILITY + "test_an_outlier_is_above_the_mean_by_so_many_deviations",
    STABILITY + "test_no_update_is_an_outlier_before_the_window_is_full_and_a_new_level_is_taken",
)
OF_WARMUPS = "tests/lm/training/test_warmups.py::"
FORMULAS = (OF_WARMUPS + "test_every_update_is_the_formulas",)
CUT = (OF_WARMUPS + "test_an_update_sees_the_next_sequences_cut_to_its_length",)
AVERAGE = (STABILITY + "test_the_average_of_the_weights_is_the_recursion",)


MUTATIONS = [
    Mutation(
        "recipes: a warm-up's line does not begin at its start",
        WARMUPS,
        "warmup.updates * (value - warmup.start)",
        "warmup.updates * value",
        FORMULAS,
    ),
    Mutation(
        "recipes: the batch grows an update early",
        WARMUPS,
        "for size, begin in self.batches.items() if begin < update",
        "for size, begin in self.batches.items() if begin <= update",
        FORMULAS,
    ),
    Mutation(
        "recipes: every growth of the batch counts its tokens whole",
        WARMUPS,
        "total += (size - before) * max(0, updates - begin)",
        "total += size * max(0, updates - begin)",
        FORMULAS,
    ),
    Mutation(
        "recipes: rows are cut across each other",
        WARMUPS,
        "v.reshape(-1, length)",
        "v.reshape(length, -1).t()",
        (OF_WARMUPS + "test_cut_rows_keep_every_token_and_target",),
    ),
    Mutation(
        "recipes: an update's rows are as long as those before",
        TRAIN,
        "return self.growth.cut(micro, self.step + 1)",
        "return self.growth.cut(micro, self.step or 1)",
        CUT,
    ),
    Mutation(
        "recipes: an update has as many forward passes as that before",
        TRAIN,
        "self.growth.micro_batches(self.step + 1)",
        "self.growth.micro_batches(self.step or 1)",
        CUT,
    ),
    Mutation(
        "recipes: DeepSpeed counts micro-batches on from those of another accumulation",
        ENGINE,
        "            engine.micro_steps = 0\n",
        "",
        (OF_WARMUPS + "test_updates_of_growing_batches_are_those_of_plain_torch",),
    ),
    Mutation(
        "recipes: DeepSpeed's mean is over the micro-batches of the whole batch",
        ENGINE,
        "engine.set_train_batch_size(count * at_once)",
        "pass",
        (OF_WARMUPS + "test_updates_of_growing_batches_are_those_of_plain_torch",),
    ),
    Mutation(
        "recipes: the sign of Muon's step over flat pieces",
        MUON,
        'p[piece.place].add_(step, alpha=group["lr"])',
        'p[piece.place].add_(step, alpha=-group["lr"])',
        ACTIVE,
    ),
    Mutation(
        "recipes: a matrix of another rank's piece",
        MUON,
        "start = self.rank * p.numel() + piece.place.start - piece.part.start",
        "start = self.rank * p.numel() + piece.place.start + piece.part.start",
        ACTIVE,
    ),
    Mutation(
        "recipes: Nesterov's momentum is plain over flat pieces",
        MUON,
        'p.grad.lerp(momentum, group["momentum"])',
        "momentum.clone()",
        ACTIVE,
    ),
    Mutation(
        "recipes: Muon's decay grows over flat pieces",
        MUON,
        'p.mul_(1 - group["lr"] * group["weight_decay"])',
        'p.mul_(1 + group["lr"] * group["weight_decay"])',
        ACTIVE,
    ),
    Mutation(
        "recipes: Muon takes the head",
        OPTIM,
        "        if id(p) not in of_ends\n",
        "",
        (RECIPES + "test_matrices_are_hidden_weights",),
    ),
    Mutation(
        "recipes: wsd decays from the warm-up on",
        OPTIM,
        "begin = max(warmup, steps - decay)",
        "begin = warmup",
        WSD,
    ),
    Mutation(
        "recipes: a factor divides the rate",
        OPTIM,
        "peaks[group.method] * group.factor",
        "peaks[group.method] / group.factor",
        RATES,
    ),
    Mutation(
        "recipes: log Z is not squared",
        LOSS,
        "log_z.square().masked_fill",
        "log_z.masked_fill",
        LOG_Z,
    ),
    Mutation(
        "recipes: z-loss of what is no target",
        LOSS,
        ".masked_fill(targets == IGNORED, 0.0).sum()",
        ".sum()",
        LOG_Z,
    ),
    Mutation(
        "recipes: z-loss is taken off the loss",
        ENGINE,
        "loss = loss + z_loss",
        "loss = loss - z_loss",
        UPDATES,
    ),
    Mutation(
        "recipes: a skipped update steps",
        ENGINE,
        "if self._judge() is None:",
        "if self._judge() is None or True:",
        UPDATES,
    ),
    Mutation(
        "recipes: each rank decides for itself",
        ENGINE,
        '(why or "another rank found it so") if votes else None',
        "why",
        UPDATES,
    ),
    Mutation(
        "recipes: outliers are below the mean, too",
        METRICS,
        "if value > mean + self.sigma * deviation:",
        "if abs(value - mean) > self.sigma * deviation:",
        OUTLIERS,
    ),
    Mutation(
        "recipes: outliers are forgotten",
        METRICS,
        "            before.append(value)\n",
        "            if not wrong:\n                before.append(value)\n",
        OUTLIERS,
    ),
    Mutation(
        "recipes: the average forgets as it should remember",
        EMA,
        "lerp_(p, 1 - self.decay)",
        "lerp_(p, self.decay)",
        AVERAGE,
    ),
    Mutation(
        "recipes: the average stays in the place of the weights",
        EMA,
        "        finally:\n            self._swap()\n",
        "        finally:\n            pass\n",
        AVERAGE,
    ),
]
