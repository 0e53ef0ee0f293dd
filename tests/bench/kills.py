"""Does a run that is killed give the same curve? 20 times kill -9 at a random moment, each followed by --resume.

    python tests/bench/kills.py                       # sync and one-step-off: about 20 minutes on two cores

The curve must equal the uninterrupted run's to the bit, times aside. Half of the kills wait for a save, or the sync after
it, to be going on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--preset", "pocket", "--batch-size", "4", "--group-size", "4", "--eval-problems", "8", "--response-length", "96"]
SMALL += ["--save-every", "1"]


def start(folder: Path, name: str, *argv: str) -> subprocess.Popen:
    """The command, in a process group of its own."""
    command = [sys.executable, str(ROOT / "run_gsm8k.py"), *SMALL, "--out", str(folder), "--name", name, *argv]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)


def metrics(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without the times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def wait_for(condition: object, process: subprocess.Popen, limit_s: float = 120) -> bool:
    """Whether the condition came true while the process ran."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.001)
    return False


def wait_for_a_moment(run: Path, process: subprocess.Popen, rng: random.Random) -> str:
    """Waits until the run trains, then for a random while; says what the moment is."""
    lines = run / "metrics.jsonl"
    before = lines.stat().st_size if lines.exists() else 0
    # Larger, not different: a resumed run first takes out the lines that it will write again.
    if not wait_for(lambda: lines.exists() and lines.stat().st_size > before, process):
        return "start-up"
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 2.5))
        return "training"
    saving = wait_for(lambda: any((run / "checkpoints").glob(".writing_*")), process, 5)
    time.sleep(rng.uniform(0, 0.2))
    return "a save or sync" if saving else "training"


def main() -> int:
    """The command; exit status 1 where a curve differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["sync", "one-step-off"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    rng, different = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(prefix="k-") as tmp:
        folder = Path(tmp)
        os.environ["TMPDIR"] = tmp  # who is killed cannot take its own away
        for mode in args.modes:
            argv = ["--mode", mode, "--steps", str(args.steps)]
            whole = start(folder, f"{mode}-whole", *argv)
            _, err = whole.communicate()
            if whole.returncode:
                sys.exit(err)
            run, during = folder / f"{mode}-killed", {"training": 0, "a save or sync": 0, "start-up": 0}
            for _ in range(args.kills):
                resume = ["--resume"] if (run / "config.json").exists() else []
                process = start(folder, run.name, *argv, *resume)
                moment = wait_for_a_moment(run, process, rng)
                if process.poll() == 0:
                    break  # it reached its end first
                if process.poll() is not None:
                    sys.exit(process.communicate()[1])
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                during[moment] += 1
            last = start(folder, run.name, *argv, "--resume")
            _, err = last.communicate()
            if last.returncode:
                sys.exit(err)
            same = metrics(run) == metrics(folder / f"{mode}-whole")
            different += not same
            where = ", ".join(f"{n} in {moment}" for moment, n in during.items())
            different += sum(during.values()) < args.kills  # more --steps, then
            verdict = "equal to the bit" if same else "NOT EQUAL"
            print(f"{mode}: {sum(during.values())} kills ({where}), {args.steps} steps: {verdict}", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
