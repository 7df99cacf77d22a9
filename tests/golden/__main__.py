"""`python -m tests.golden DIR`: every golden case of a folder against ours, one line a setting."""

import argparse
import sys
from pathlib import Path

from tests.golden import HERE, NotYet, run_case


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("dir", nargs="?", type=Path, default=HERE, help="folder of golden cases")
    directory = parser.parse_args(argv).dir
    cases = sorted(directory.glob("*.json"))
    if not cases:
        print(f"no golden case (*.json) in {directory}", file=sys.stderr)
        return 2
    not_yet, failed, passed = [], [], 0
    header = ["case / setting", "y_star", "output", "loss", "gradients", "(worst of)", "iterations"]
    row = "{:<34} {:>9} {:>9} {:>9} {:>9}  {:<44} {}".format
    print(row(*header))
    for path in cases:
        try:
            results = run_case(path)
        except NotYet as e:
            not_yet.append(f"{path.stem} ({e})")
            continue
        for r in results:

            def worst(*names, r=r):
                found = [v for k, v in r.errors.items() if k.rstrip("0123456789") in names]
                return f"{max(found):.1e}" if found else "-"

            grads = {k: v for k, v in r.errors.items() if k.startswith("grad ")}
            name = max(grads, key=grads.get, default="")
            iterations = f"{r.iterations} / {r.expected_iterations}"
            print(
                row(f"{path.stem} {r.tag}", worst("y_star"), worst("output", "logits"),
                    worst("loss"), f"{grads[name]:.1e}" if name else "-", name[5:][-44:],
                    iterations)
            )  # fmt: skip
            if r.failures:
                failed.append(f"{path.stem} {r.tag}")
                print("    FAILED: " + "; ".join(r.failures))
            else:
                passed += 1
    print(f"\n{passed} settings passed, {len(failed)} failed", end="")
    print(f"; cases that cannot run yet: {', '.join(not_yet)}" if not_yet else "")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
