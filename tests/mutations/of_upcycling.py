"""Mutations of what a run starts from: names and configurations of others, equal outputs."""

from tests.mutations import Mutation

FOREIGN, UPCYCLE, INIT_FROM = (
    "lm/training/foreign.py",
    "lm/training/upcycle.py",
    "lm/training/init_from.py",
)
LOGITS = ("tests/lm/training/test_foreign.py::test_an_import_has_their_logits",)
BIASES = ("tests/lm/training/test_foreign.py::test_biases_and_heads_of_their_own_are_kept",)
DAMAGED = ("tests/lm/training/test_foreign.py::test_a_damaged_folder_is_a_sentence",)
STARTING = "tests/lm/training/test_init_from.py::"
INSERTED = (STARTING + "test_an_inserted_layer_adds_nothing_and_learns",)
BECOMES = (STARTING + "test_a_mamba2_becomes_a_fixed_point_layer",)
PART = (STARTING + "test_a_part_is_counted", STARTING + "test_a_part_of_the_layers")
NAMED = (STARTING + "test_what_does_not_match_is_named",)


def of(path, *rows):
    return [Mutation(f"upcycling: {what}", path, *row) for what, *row in rows]


MUTATIONS = [
    *of(
        FOREIGN,
        ("the rank of Δ is forgotten", '"mamba": (("time_step_rank", "dt_rank"),),',
         '"mamba": (),', LOGITS),
        ("a convolution without a bias gets ones", "torch.zeros(expected[name])",
         "torch.ones(expected[name])", BIASES),
        ("what is NaN is taken", "if not torch.isfinite(t).all()", "if False", DAMAGED),
        ("a head that is not the embedding is dropped", "if not shapes_only and not torch.equal",
         "if shapes_only and not torch.equal", DAMAGED),
    ),
    *of(
        UPCYCLE,
        ("a new layer adds something", "p.zero_()\n", "p.mul_(0.1)\n", INSERTED),
        ("the gate is open", "_shut(part.alpha_proj, GATE -", "_shut(part.alpha_proj, -GATE -",
         BECOMES),
        ("the rank widens the gate", "GATE - math.log(part.size)", "GATE + math.log(part.size)",
         BECOMES),
        ("B and C read the token before", "getattr(block, name).gain.zero_()",
         "getattr(block, name).gain", BECOMES),
        ("Q is what it was", "part.q_proj.base.copy_(part.q_proj.base.new_ones(part.d_inner)"
         ".diag())", "pass", BECOMES),
        ("a layer's options are not compared", "if value != wanted:", "if False:",
         (*NAMED, STARTING + "test_what_does_not_start_as_a_mamba2_is_refused")),
        ("an equal name of another kind is taken",
         "if here != there and (there, here) not in RELATED:  # an",
         "if False:  # an", PART),
        ("a layer twice is no matter", "if not partial and numbers !=", "if partial and numbers !=",
         NAMED),
    ),
    *of(
        INIT_FROM,
        ("another tokenizer is no matter", "if ours.get(token) != number",
         "if token not in ours", (STARTING + "test_another_tokenizer_is_refused",)),
        ("a checkpoint of another run is no matter", "resolve().parent != own.resolve()",
         "resolve().parent == own.resolve()",
         (STARTING + "test_a_plan_says_what_is_taken_and_refuses_what_does_not_fit",)),
    ),
]  # fmt: skip
