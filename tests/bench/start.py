"""How long until something happens? From `python run_gsm8k.py` to the first step, with warm caches.

    python tests/bench/start.py                      # about 4 minutes on two cores

Beside it: the import of vLLM alone, which such a run makes twice, one after the other (in the server's actor, and in the
engine's process, which vLLM starts from there), and Ray alone. Must reach: below 30 s, the evaluation before included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def first_step_s() -> float:
    """Seconds from the launch to the moment when the first step begins, as the run itself counts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "run_gsm8k.py"), "--preset", "pocket", "--steps", "1", "--save-every", "0"]
        subprocess.run([*command, "--out", folder, "--name", "run"], capture_output=True, check=True)
        return json.loads((Path(folder) / "run" / "summary.json").read_text())["first_step_s"]


def seconds(code: str) -> float:
    """Of a fresh Python."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> int:
    """The command; exit status 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0"}
    figures: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        figures.setdefault("to the first step", []).append(first_step_s())
        figures.setdefault("import vllm", []).append(seconds("from vllm.v1.engine.async_llm import AsyncLLM"))
        figures.setdefault("ray.init", []).append(seconds("import ray; ray.init(include_dashboard=False)"))
    print("| | seconds, median (lowest, highest) |\n|---|---|")
    for name, values in figures.items():
        print(f"| {name} | {statistics.median(values):.1f} ({min(values):.1f}, {max(values):.1f}) |")
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(statistics.median(figures["to the first step"]) >= 30)


if __name__ == "__main__":
    sys.exit(main())
