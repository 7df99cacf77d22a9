"""Mutations of schedules, optimizers, z-loss."""

from tests.mutations import Mutation

MUON = "lm/training/muon.py"
OPTIM = "lm/training/optim.py"
LOSS = "lm/model/batch.py"
METRICS = "lm/runs/metrics.py"
ENGINE = "lm/training/engine.py"
RECIPES = "tests/lm/training/test_recipes.py::"
STABILITY = "tests/lm/training/test_stability.py::"
ACTIVE = (RECIPES + "test_muon_is_active_in_every_stage_that_may_have_it",)
WSD = (RECIPES + "test_wsd_is_flat_and_then_linear",)
RATES = (RECIPES + "test_each_parameter_has_the_rate_of_its_pattern",)
UPDATES = (STABILITY + "test_updates_with_z_loss",)
LOG_Z = (STABILITY + "test_log_z_is_that_of_the_softmax_and_no_part_of_the_loss",)
AGAINST = (
    STABILITY + "test_an_update_against_the_adversary_is_both_passes_by_hand",
    STABILITY + "test_the_adversary_waits_for_the_end_of_the_curriculum",
)
CURRICULUM = (
    "tests/lm/training/test_curriculum.py::test_the_answers_of_a_stage_that_waits_end_it",
)
LIKELY = ("tests/lm/data/test_traces.py::test_how_likely_answers_of_several_tokens_are",)
ENDED = (
    "tests/lm/data/test_mixture.py"
    "::test_a_stage_that_is_learned_ends_at_once_and_stays_so_on_other_ranks",
)


MUTATIONS = [
    Mutation(
        "recipes: the first of two passes counts whole",
        ENGINE,
        "self._backward(loss / 2, False)",
        "self._backward(loss, False)",
        AGAINST,
    ),
    Mutation(
        "recipes: the pass against the adversary counts whole",
        ENGINE,
        "return (loss + z_loss) / 2",
        "return loss + z_loss",
        AGAINST,
    ),
    Mutation(
        "recipes: the second pass meets no adversary",
        ENGINE,
        "with adversary.second_pass():",
        "with adversary.first_pass():",
        AGAINST,
    ),
    Mutation(
        "recipes: every rank draws the same noise",
        ENGINE,
        "first = (number * self.ranks.world_size + self.ranks.rank) * size",
        "first = number * self.ranks.world_size * size",
        ("tests/lm/training/test_elastic.py::test_2_1_2_ranks_and_stages_1_3_0",),
    ),
    Mutation(
        "recipes: the noise of an update depends on its micro-batches' size",
        ENGINE,
        "first = (number * self.ranks.world_size + self.ranks.rank) * size",
        "first = number * self.ranks.world_size + self.ranks.rank",
        ("tests/lm/training/test_elastic.py::test_2_1_2_ranks_and_stages_1_3_0",),
    ),
    Mutation(
        "recipes: a stage, and with it the adversary, begins an update late",
        "lm/data/batches/mixture_loader.py",
        "return bisect.bisect_right(self._ends, self._next)",
        "return bisect.bisect_left(self._ends, self._next)",
        AGAINST,
    ),
    Mutation(
        "recipes: the adversary's pass is not counted in MFU",
        METRICS,
        "self.passed += passes * tokens",
        "self.passed += tokens",
        ("tests/lm/runs/test_metrics.py::test_throughput_and_mfu",),
    ),
    Mutation(
        "recipes: the plan has the adversary's pass before the curriculum is over, too",
        "lm/config/schema.py",
        "return max(0, self.train.steps - learned)",
        "return self.train.steps",
        ("tests/lm/report/test_plan.py::test_an_update_against_the_adversary_is_two_passes",),
    ),
    Mutation(
        "recipes: a stage that is learned goes on",
        "lm/training/curriculum.py",
        "            self._batches.end_stage()",
        "            pass",
        CURRICULUM,
    ),
    Mutation(
        "recipes: after a rollback a stage that was not learned is over",
        "lm/training/train.py",
        'after["ends"] = restored["ends"]',
        "pass",
        (
            "tests/lm/training/test_curriculum.py::test_a_rollback_is_to_the_stage_of_its_checkpoint",
        ),
    ),
    Mutation(
        "recipes: answers of NaN end the run",
        "lm/training/train.py",
        "        self.check_finite()\n        likely",
        "        likely",
        ("tests/lm/training/test_curriculum.py::test_nan_is_found_before_answers_are_looked_at",),
    ),
    Mutation(
        "recipes: a stage waits for the likeliest of its sources",
        "lm/training/validation.py",
        "return math.exp(-max(losses, key=_worse))",
        "return math.exp(-min(losses, key=_worse))",
        LIKELY,
    ),
    Mutation(
        "recipes: an answer of two tokens is as likely as one of them",
        "lm/training/validation.py",
        "losses.append(of_token * targets / questions)",
        "losses.append(of_token)",
        LIKELY,
    ),
    Mutation(
        "recipes: where a stage has ended is forgotten",
        "lm/data/batches/mixture_loader.py",
        'self._ends = list(state.get("ends", configured))',
        "self._ends = configured",
        ENDED,
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
        "optim.lr * group.factor",
        "optim.lr / group.factor",
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
]
