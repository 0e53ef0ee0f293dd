"""Does the main job teach, on every seed? Runs `run_gsm8k.py` for each mode and seed and prints a table.

    python tests/bench/seeds.py                       # sync and one-step-off, seeds 0 1 2: about 20 minutes on two cores
    python tests/bench/seeds.py --modes partial --seeds 0 1 2

Must reach: before at most 0.55, after at least 0.85, first step within 30 s, 6 minutes in all. Peak memory is the sum of the
proportional set sizes of all processes of the run, sampled every two seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from processes import processes  # noqa: E402


def memory_mb(mark: str) -> float:
    """Proportional set size, MB, of every process whose environment has RUN_MARK=mark."""
    total = 0
    for process in processes(mark):
        with contextlib.suppress(psutil.Error):  # it has ended
            total += process.memory_full_info().pss
    return total / 2**20


def run(mode: str, seed: int, folder: Path, extra: list[str]) -> dict[str, object]:
    """One run; its row of the table."""
    name = f"{mode}-{seed}"
    argv = [sys.executable, str(ROOT / "run_gsm8k.py"), "--preset", "pocket", "--mode", mode, "--seed", str(seed)]
    argv += ["--out", str(folder), "--name", name, *extra]
    start, peak, printed = time.monotonic(), 0.0, folder / f"{name}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    with printed.open("w") as file:
        process = subprocess.Popen(argv, stdout=file, env={**os.environ, "RUN_MARK": str(folder / name)})
        while process.poll() is None:
            peak = max(peak, memory_mb(str(folder / name)))
            time.sleep(2)
    out = printed.read_text()
    if process.returncode:
        sys.exit(f"{name} failed:\n{out}")
    before, after = map(float, re.search(r"accuracy\s+([\d.]+) before, ([\d.]+) after", out).groups())
    first = re.search(r"of which (\d+) before the first step", out)[1]
    efficiency = re.search(r"overlap efficiency ([\d.]+)", out)[1]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    staleness = sorted({row["staleness/mean"] for row in rows[1:]})
    return {
        "mode": mode,
        "seed": seed,
        "before": before,
        "after": after,
        "staleness": f"{rows[0]['staleness/mean']:.0f}, then {', '.join(f'{s:.2f}' for s in staleness[:3])}",
        "partial": f"{sum(row['partial_fraction'] for row in rows) / len(rows):.2f}",
        "first step s": first,
        "seconds": f"{time.monotonic() - start:.0f}",
        "overlap": efficiency,
        "peak MB": f"{peak:.0f}",
    }


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["sync", "one-step-off"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=None, help="keep the runs here")
    args, extra = parser.parse_known_args()
    header, missed = None, False
    with tempfile.TemporaryDirectory() as temporary:
        for seed in args.seeds:
            for mode in args.modes:  # interleaved, so that a slow minute of the machine hits both
                row = run(mode, seed, args.out or Path(temporary), extra)
                if header is None:
                    header = list(row)
                    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
                print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
                missed |= row["before"] > 0.55 or row["after"] < 0.85
                missed |= float(row["first step s"]) > 30 or float(row["seconds"]) > 360
    print(f"\nload average {os.getloadavg()[0]:.1f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
