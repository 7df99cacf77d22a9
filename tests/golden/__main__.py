"""Compare every golden case of a folder with our code: `python -m tests.golden DIR`.

It prints one line per setting.
Exits 0 if every setting of every case passed, 1 if one failed, 2 if there is no case.
"""

import argparse
import sys
from pathlib import Path

from tests.golden import HERE, run_case


def line(name, result):
    """Return a setting's worst error as a share of its limit, and its iteration counts."""
    shares = {k: v / result.limits[k] for k, v in result.errors.items()}
    worst = max(shares, key=shares.get, default=None)
    error = f"{worst} {result.errors[worst]:.1e}, limit {result.limits[worst]:.1e}" if worst else ""
    iterations = f"{result.iterations} / {result.expected_iterations}"
    return f"{name + ' ' + result.tag:<34} worst: {error}; iterations, ours / theirs: {iterations}"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("dir", nargs="?", type=Path, default=HERE, help="folder of golden cases")
    directory = parser.parse_args(argv).dir
    cases = sorted(directory.glob("*.json"))
    if not cases:
        print(f"no golden case (*.json) in {directory}", file=sys.stderr)
        return 2
    failed, passed = [], 0
    for path in cases:
        try:
            results = run_case(path)
        except Exception as e:  # continue with the other cases
            failed.append(path.stem)
            print(f"{path.stem}\n    FAILED: {type(e).__name__}: {e}")
            continue
        for result in results:
            print(line(path.stem, result))
            if result.failures:
                failed.append(f"{path.stem} {result.tag}")
                print("    FAILED: " + "; ".join(result.failures))
            else:
                passed += 1
    print(f"\n{len(cases)} cases: {passed} settings passed, {len(failed)} failed")
    for name in failed:
        print(f"FAILED {name}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
