"""A few minutes of storm on vLLM: kills, pauses, cancels and syncs at random under fit_partial. Is anything lost?

    python tests/bench/storm.py                      # about 2 minutes on two cores
    python tests/bench/storm.py --seed 7 --steps 60

At the end every prompt must have been trained exactly once, in a complete group, at most `max_staleness` versions after the
first of its tokens, with as many mask entries, log-probabilities and span lengths as tokens, of versions that never decrease.
The seed is printed; it gives the same faults in the same order again, though a real engine takes them at other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import run_gsm8k  # noqa: E402
from processes import processes  # noqa: E402

STALENESS = 2


class Watched(run_gsm8k.Run):
    """A run that looks at what is trained."""

    def log(self, t: int, metrics: dict[str, float], rollouts: Any) -> None:
        """What must hold of every sample, at every step."""
        super().log(t, metrics, rollouts)
        groups = rollouts["group"].tolist()
        assert all(groups.count(group) == self.config.group_size for group in groups), "complete groups only"
        for sample in rollouts:
            n, versions = len(sample["response_ids"]), sample["span_versions"].tolist()
            lengths = len(sample["response_mask"]), len(sample["response_logprobs"]), int(sample["span_lengths"].sum())
            assert lengths == (n, n, n) and 0 < n <= self.config.response_length
            assert versions == sorted(set(versions)) and 0 <= t - versions[0] <= STALENESS, (t, versions)
            assert sample["stop_reason"] in ("stop", "length") and np.isfinite(sample["response_logprobs"]).all()
            self.trained.append(str(sample["uid"]))
        self.partial += int((rollouts["span_lengths"].lengths > 1).sum())


async def disturb(run: Watched, rng: random.Random, mark: str, happened: dict[str, int]) -> None:
    """One thing after the other, for ever."""
    kills = {"engine killed": "EngineCore", "server killed": "ray::VLLMServer", "worker killed": "ray::AgentLoopWorker"}
    left = dict.fromkeys(("EngineCore", "ray::VLLMServer"), 1) | {"ray::AgentLoopWorker": 2}  # Ray starts an actor 3 times
    while True:
        await asyncio.sleep(rng.expovariate(1 / 3))
        what = rng.choice(["pause", "cancel and resume", "sync", *kills])
        if what in kills:
            found = list(processes(mark, kills[what]))
            if not found or not left[kills[what]]:
                continue
            left[kills[what]] -= 1
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(found).kill()
        elif what == "pause":
            await run.manager.cancel()
            await asyncio.sleep(rng.uniform(0, 2))
            await run.manager.resume()
        elif what == "cancel and resume":
            await run.manager.cancel()
            await run.manager.resume()
        else:  # the weights that the servers have, once more
            servers = run.servers
            async with servers.updating:
                await asyncio.gather(*[s.update_weights.remote(servers.weights, servers.version) for s in servers.actors])
        happened[what] = happened.get(what, 0) + 1


def main() -> int:
    """The command; exit status 1 where something is lost, or another error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    run_gsm8k.quiet_libraries(verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RUN_MARK"] = folder
        argv = ["--preset", "pocket", "--mode", "partial", "--max-staleness", str(STALENESS), "--batch-size", "6"]
        argv += ["--group-size", "4", "--eval-problems", "0", "--save-every", "0", "--workers", "2"]
        config, _ = run_gsm8k.parse_config([*argv, "--steps", str(args.steps), "--out", folder, "--name", "storm"])
        run, rng, happened = Watched(config), random.Random(args.seed), {}
        run.trained, run.partial, start = [], 0, time.monotonic()
        try:
            run.start()

            async def storm() -> None:
                disturbing = asyncio.ensure_future(disturb(run, rng, folder, happened))
                fitting = asyncio.ensure_future(run.fit())
                await asyncio.wait([fitting, disturbing], return_when=asyncio.FIRST_COMPLETED)
                disturbing.cancel()  # it goes on for ever, unless it fails
                (ended,) = await asyncio.gather(disturbing, return_exceptions=True)
                if not isinstance(ended, asyncio.CancelledError):
                    fitting.cancel()
                    raise ended
                await fitting

            start = time.monotonic()
            asyncio.run(storm())
        finally:
            run.close()
        places = itertools.product(range(config.steps), range(config.batch_size), range(config.group_size))
        once = sorted(run.trained) == sorted(f"step{t}-{i}-{k}" for t, i, k in places)
        seconds = time.monotonic() - start
        print(f"{seconds:.0f} s, {config.steps} steps, {len(run.trained)} responses, {run.partial} of several versions")
        print(", ".join(f"{what}: {n}" for what, n in sorted(happened.items())))
        print("every prompt was trained exactly once" if once else "LOST OR DOUBLED")
        calm = {"engine killed", "server killed", "worker killed", "pause", "cancel and resume", "sync"} - happened.keys()
        if calm:
            print(f"no storm: {', '.join(sorted(calm))} did not happen; more --steps, or another --seed")
    return int(not once or bool(calm))


if __name__ == "__main__":
    sys.exit(main())
