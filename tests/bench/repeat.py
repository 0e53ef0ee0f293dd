"""Is a run a function of its seed? Runs each mode twice with one seed and compares metrics.jsonl to the bit, times aside.

python tests/bench/repeat.py                      # sync and one-step-off: about 8 minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def metrics(mode: str, name: str, folder: Path, extra: list[str]) -> list[dict[str, float]]:
    """Runs and returns metrics.jsonl without the times."""
    argv = [sys.executable, str(ROOT / "run_gsm8k.py"), "--preset", "pocket", "--mode", mode, "--out", str(folder)]
    subprocess.run([*argv, "--name", name, *extra], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def main() -> int:
    """The command; exit status 1 where a run was not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["sync", "one-step-off"])
    args, extra = parser.parse_known_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            first, second = (metrics(mode, f"{mode}-{i}", Path(folder), extra) for i in (1, 2))
            same = first == second
            different += not same
            print(f"{mode}: {len(first)} steps, {'equal to the bit' if same else 'NOT EQUAL'}", flush=True)
            if not same:
                step = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
                keys = [key for key in first[step] if first[step][key] != second[step].get(key)]
                print(f"  first difference in step {step}: {', '.join(keys)}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
