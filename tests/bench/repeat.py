"""Is a run a function of its seed? Runs each mode twice with one seed and compares metrics.jsonl to the bit, times aside.

python tests/bench/repeat.py                      # sync and one-step-off: about 10 minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


PAIRS = {
    "sync, twice": (["--mode", "sync"], ["--mode", "sync"]),
    "one-step-off, twice": (["--mode", "one-step-off"], ["--mode", "one-step-off"]),
    "sync and partial with --max-staleness 0": (["--mode", "sync"], ["--mode", "partial", "--max-staleness", "0"]),
    "one-step-off with and without --eval-every": (
        ["--mode", "one-step-off"],
        ["--mode", "one-step-off", "--eval-every", "2"],
    ),
}


def metrics(name: str, folder: Path, argv: list[str]) -> list[dict[str, float]]:
    """Runs, unless it did before, and returns metrics.jsonl without times and evaluations."""
    if not (folder / name).exists():
        command = [sys.executable, str(ROOT / "run_gsm8k.py"), "--preset", "pocket", "--out", str(folder), "--name", name]
        subprocess.run([*command, *argv], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(("time/", "eval/"))} for row in rows]


def main() -> int:
    """The command; exit status 1 where a pair differs. What it does not know it hands on to run_gsm8k.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, extra = parser.parse_known_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, (one, other)) in enumerate(PAIRS.items()):
            first = metrics(one[1], Path(folder), [*one, *extra])  # one run serves two pairs
            second = metrics(f"other-{i}", Path(folder), [*other, *extra])
            same = first == second
            different += not same
            print(f"{name}: {len(first)} steps, {'equal to the bit' if same else 'NOT EQUAL'}", flush=True)
            if not same:
                step = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
                keys = [key for key in first[step] if first[step][key] != second[step].get(key)]
                print(f"  first difference in step {step}: {', '.join(keys)}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
