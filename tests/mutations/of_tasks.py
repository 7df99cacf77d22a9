"""Mistakes in the suite's tasks, and in traces, the text that asks for a state."""

from tests.mutations import Mutation

RECALL = "synthetic/tasks/recall.py"
MEMORY = "synthetic/tasks/memory.py"
SWAPS = "synthetic/tasks/swaps.py"
AUTOMATON = "synthetic/tasks/automaton.py"
DYCK = "synthetic/tasks/dyck.py"
DRAWN = "synthetic/tasks/drawn.py"
TRACES = "lm/data/sources/traces.py"
OF_RECALL = ("tests/synthetic/test_recall.py",)
OF_MEMORY = ("tests/synthetic/test_memory.py",)
OF_SWAPS = ("tests/synthetic/test_swaps.py",)
OF_AUTOMATON = ("tests/synthetic/test_automaton.py",)
OF_DYCK = ("tests/synthetic/test_dyck.py",)
OF_DRAWN = ("tests/synthetic/test_splits.py",)
OF_TRACES = ("tests/lm/data/test_traces.py",)
INIT_FROM = "tests/synthetic/test_synthetic_init_from.py"

MUTATIONS = [
    Mutation(
        "tasks: MQAR answers the next key's value",
        RECALL,
        "np.put_along_axis(labels, asked_at, values, 1)",
        "np.put_along_axis(labels, asked_at, np.roll(values, 1, 1), 1)",
        OF_RECALL,
    ),
    Mutation(
        "tasks: MQAR's keys come again anywhere as often",
        RECALL,
        "(self.power - 1) * np.log",
        "0 * np.log",
        OF_RECALL,
    ),
    Mutation(
        "tasks: recall asks for keys that did not come before",
        RECALL,
        "< np.arange(pairs)",
        "<= np.arange(pairs)",
        OF_RECALL,
    ),
    Mutation(
        "tasks: the last key of recall is a new one",
        RECALL,
        "keys[rows, before] = keys[rows, again]",
        "pass",
        OF_RECALL,
    ),
    Mutation(
        "tasks: fuzzy recall is tested on short keys",
        RECALL,
        '1 if split == "train" else longest',
        "1",
        OF_RECALL,
    ),
    Mutation(
        "tasks: selective copying loses the order",
        MEMORY,
        "places = np.sort(rng.random((count, room)).argsort(1)[:, : self.content], 1)",
        "places = rng.random((count, room)).argsort(1)[:, : self.content]",
        OF_MEMORY,
    ),
    Mutation(
        "tasks: every seed has a dictionary of its own",
        MEMORY,
        "np.random.default_rng(0).permutation",
        "np.random.default_rng().permutation",
        OF_MEMORY,
    ),
    Mutation(
        "tasks: a swap changes one variable alone",
        SWAPS,
        "values[rows, left], values[rows, right] = values[rows, right], values[rows, left]",
        "values[rows, left] = values[rows, right]",
        OF_SWAPS,
    ),
    Mutation(
        "tasks: an automaton's letters act on the letter",
        AUTOMATON,
        "state = self.table[ids[:, place], state]",
        "state = self.table[ids[:, place], 0 * state]",
        OF_AUTOMATON,
    ),
    Mutation(
        "tasks: brackets nest one deeper than is said",
        DYCK,
        "(depth < self.depth) & (rng",
        "(depth < self.depth + 1) & (rng",
        OF_DYCK,
    ),
    Mutation(
        "tasks: a closed bracket is still the innermost",
        DYCK,
        "            answers[:, place] = stack[rows, depth]",
        "            answers[:, place] = stack[rows, np.minimum(depth + 1, self.depth)]",
        OF_DYCK,
    ),
    Mutation(
        "tasks: rows drawn whole are of any split",
        DRAWN,
        "        if self.held_apart(length):",
        "        if not self.held_apart(length):",
        OF_DRAWN,
    ),
    Mutation(
        "tasks: gaps up to a number are all as likely",
        TRACES,
        "[q**gap for gap in traces.lengths]",
        "[1 for gap in traces.lengths]",
        OF_TRACES,
    ),
    Mutation(
        "tasks: long gaps are rarer than said",
        TRACES,
        "traces.gaps / (traces.gaps + 2)",
        "traces.gaps / (traces.gaps + 4)",
        OF_TRACES,
    ),
    Mutation(
        "tasks: a session is never asked before a swap",
        "lm/config/data.py",
        'return 0 if self.form == "repl" else 1',
        "return 1",
        OF_TRACES,
    ),
    Mutation(
        "tasks: the product of a word is taken from the wrong side",
        TRACES,
        "self.group.table[state, element]",
        "self.group.table[element, state]",
        OF_TRACES,
    ),
    Mutation(
        "tasks: words of few letters have those of high order",
        TRACES,
        "simplest_first()[: traces.letters]",
        "simplest_first()[::-1][: traces.letters]",
        OF_TRACES,
    ),
    Mutation(
        "tasks: a source of few letters is asked about all",
        "lm/data/batches/questions.py",
        "traces.questions(source, gap, COUNT)",
        'traces.questions(source.model_copy(update={"letters": None}), gap, COUNT)',
        OF_TRACES,
    ),
    Mutation(
        "centroids: the mean of an answer is of the states before it",
        "synthetic/centroids.py",
        ".index_add(0, number, exact)",
        ".index_add(0, number, exact.roll(1, 0))",
        (INIT_FROM,),
    ),
    Mutation(
        "results: a curriculum that ended early is not said",
        "synthetic/results.py",
        "if length == full_length:",
        "if length <= full_length:",
        ("tests/synthetic/test_synthetic_train.py -k ends_early",),
    ),
    Mutation(
        "training: train.length loses its lower end",
        "synthetic/train.py",
        "lengths = min(self.shortest, self.longest), self.longest",
        "lengths = self.longest, self.longest",
        ("tests/synthetic/test_synthetic_train.py -k as_short_and_as_long",),
    ),
    Mutation(
        "centroids: pairs of a few states have means",
        "synthetic/centroids.py",
        "MIN_STATES = 30",
        "MIN_STATES = 1",
        (INIT_FROM,),
    ),
    Mutation(
        "centroids: the last token is of the longest sequence",
        "synthetic/centroids.py",
        "ids.gather(1, at_ends)",
        "ids[:, -1:]",
        (INIT_FROM,),
    ),
    Mutation(
        "centroids: sequences that end in no answer count",
        "synthetic/centroids.py",
        "pairs.append(last[asked].cpu())",
        "pairs.append(last.cpu())",
        (INIT_FROM,),
    ),
    Mutation(
        "D4: the mirror images are missing",
        "lm/data/sources/groups.py",
        "np.concatenate([turned, turned[:, ::-1]])",
        "np.concatenate([turned, turned])",
        ("tests/synthetic/test_word_problem.py -k symmetries",),
    ),
]
