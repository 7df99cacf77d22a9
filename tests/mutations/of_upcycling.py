"""Mutations of what a run starts from: names and configurations of others, equal outputs."""

from tests.mutations import Mutation

FOREIGN, UPCYCLE, INIT_FROM = (
    "lm/training/foreign.py",
    "lm/training/upcycle.py",
    "lm/training/init_from.py",
)
LOGITS = ("tests/lm/training/test_foreign.py::test_a_source_has_their_logits",)
BIASES = ("tests/lm/training/test_foreign.py::test_biases_and_heads_of_their_own_are_kept",)
DAMAGED = ("tests/lm/training/test_foreign.py::test_a_damaged_folder_is_a_sentence",)
STARTING = "tests/lm/training/test_init_from.py::"
INSERTED = (STARTING + "test_an_inserted_layer_adds_nothing_and_learns",)
PART = (STARTING + "test_a_part_is_counted", STARTING + "test_a_part_of_the_layers")
NAMED = (STARTING + "test_what_does_not_match_is_named",)


def of(path, *rows):
    return [Mutation(f"upcycling: {what}", path, *row) for what, *row in rows]


MUTATIONS = [
    *of(
        FOREIGN,
        ("the rank of Δ is forgotten", '"mamba": (("time_step_rank", "dt_rank"),),',
         '"mamba": (),', LOGITS),
        ("a convolution without a bias gets ones", "torch.zeros(channels",
         "torch.ones(channels", BIASES),
        ("a head that is not the embedding is dropped", "if not on_meta and not torch.equal",
         "if on_meta and not torch.equal", DAMAGED),
    ),
    *of(
        UPCYCLE,
        ("a new layer adds something", "p.zero_()\n", "p.mul_(0.1)\n", INSERTED),
        ("a layer's options are not compared", "if here != there and name not in START_FIELDS:",
         "if False:", NAMED),
        ("another epsilon is no difference", 'for name in ("rms_norm", "norm_epsilon")',
         'for name in ("rms_norm",)', NAMED),
        ("an equal name of another kind is taken", "if layer.kind == other.kind:", "if True:",
         PART),
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
