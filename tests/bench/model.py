"""What can a loop win, before it is built? A discrete-event model of the three loops, held against measured steps.

    python tests/bench/model.py                      # verl's published tables; model_picture.py draws what follows
    python tests/bench/model.py --compare FOLDER     # our own runs too: the folder of a `run_gsm8k.py --compare`

An engine that decodes n sequences takes t0 + t1 n seconds for a token of each; a response goes to the engine that has fewest.
The loops differ in two things: how many batches may start ahead of the one in training, and whether a sync waits for
what is in flight or cuts it. Left out: what Ray and Python take, and tokens that get dearer with the context.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Lengths = Callable[[int, int], np.ndarray]  # (version, n) -> tokens of n responses that start at that version
LOOPS = {"sync": {}, "one-step-off": {"ahead": 1}, "partial": {"ahead": 1, "cut": True}}  # with --max-staleness 1


def lognormal(mean: float, sigma: float, cap: float = math.inf) -> Lengths:
    """Responses with a long tail, cut off at `cap` tokens."""
    rng = np.random.default_rng(0)
    return lambda version, n: np.clip(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, n), 1, cap)


class Engines:
    """`n` engines and their clock. Each counts tokens; its heap has (token at end, at start, group) of each response."""

    def __init__(self, n: int, t0: float, t1: float, group_size: int, prefill_s: float = 0.0) -> None:
        self.t0, self.t1, self.group_size, self.prefill_s = t0, t1, group_size, prefill_s
        self.now, self.heaps, self.missing, self.finished = 0.0, [[] for _ in range(n)], [], 0
        self.token, self.end, self.n = np.zeros(n), np.full(n, np.inf), np.zeros(n, int)  # `end`: of the first in the heap

    def start(self, lengths: np.ndarray) -> None:
        """Groups of responses, in order."""
        for i, length in enumerate(lengths):
            if i % self.group_size == 0:
                self.missing.append(self.group_size)
            e = int(self.n.argmin())
            heapq.heappush(self.heaps[e], (self.token[e] + length, self.token[e], len(self.missing) - 1))
            self.n[e], self.end[e] = len(self.heaps[e]), self.heaps[e][0][0]

    def advance(self, until: float = math.inf, groups: float = math.inf) -> float:
        """Decodes until that moment, or until so many groups are finished, or nothing is left; returns the moment."""
        while self.finished < groups and self.n.any():
            pace = self.t0 + self.t1 * self.n
            ends = (self.end - self.token) * pace
            e = int(ends.argmin())
            step = min(ends[e], until - self.now)
            self.now, self.token = self.now + step, self.token + step / pace
            if step < ends[e]:
                break
            group = heapq.heappop(self.heaps[e])[2]
            self.n[e], self.end[e] = len(self.heaps[e]), self.heaps[e][0][0] if self.heaps[e] else np.inf
            self.missing[group] -= 1
            self.finished += self.missing[group] == 0
        return self.now

    def sync(self, seconds: float) -> None:
        """Nothing is decoded meanwhile, and then the engine that has most prefills what was cut."""
        cut = [sum(token - start for _, start, _ in heap) for heap, token in zip(self.heaps, self.token, strict=True)]
        self.now += seconds + self.prefill_s * max(cut)


def step_times(
    engines: Engines, lengths: Lengths, batch: int, train: Sequence[float], sync_s: float, ahead=0.0, cut=False, chunks=1
) -> np.ndarray:
    """Seconds of each step. `batch` in groups; `train`: seconds of each update, which takes its batch in `chunks`."""
    ends, begun = [0.0], 0
    for version, seconds in enumerate(train):
        goal = min(int((version + 1 + ahead) * batch), len(train) * batch)
        engines.start(lengths(version, (goal - begun) * engines.group_size))
        begun = goal
        for chunk in range(1, chunks + 1):
            trained = engines.advance(groups=(version + chunk / chunks) * batch) + seconds / chunks
            engines.advance(until=trained)
            engines.now = trained
        if not cut:
            engines.now = max(engines.now, engines.advance())
        engines.sync(sync_s)
        ends.append(engines.now)
    return np.diff(ends)


def verl() -> list[tuple[str, float, float]]:
    """(what, modelled, published seconds a step) of verl's one_step_off.md and fully_async.md at b178a3c."""
    rows = []
    for name, generate, train, other, published in (("FSDP2", 458, 445, 30, 520), ("Megatron", 501, 467, 40, 566)):
        rng = np.random.default_rng(0)  # one constant for both: generation varies by a quarter from step to step
        batch = lambda version, n, rng=rng, mean=generate: np.full(n, mean * max(0.2, rng.normal(1, 0.25)))  # noqa: E731
        steps = step_times(Engines(1, 1.0, 0.0, 1), batch, 1, [train] * 400, other, ahead=1)
        rows.append((f"one-step-off, 7B {name}", steps[1:-1].mean(), published))
    # Assumed of a 7B on an H20: an engine's t0 and t1, 6,000 tokens prefilled a second; lengths lognormal 0.8, at most 28k.
    engine = {"t0": 0.006, "t1": 0.00015, "group_size": 16}
    colocated = lambda mean: step_times(Engines(128, **engine), lognormal(mean, 0.8, 28672), 512, [167.7] * 4, 10.7).mean()  # noqa: E731
    low, high = 1000.0, 4000.0  # their mean is fitted to the colocated run, the rest follows from it
    while high - low > 10:
        low, high = ((low + high) / 2, high) if colocated((low + high) / 2) < 356.3 else (low, (low + high) / 2)
    rows.append((f"128 GPUs, colocated (fitted: {low:.0f} tokens)", colocated(low), 356.3))
    for ahead, update, published in ((0, 98.8, 231.3), (0.1, 109.1, 171.3), (0.3, 103.2, 146.1), (0.5, 113.2, 150.6)):
        engines, lengths = Engines(64, **engine, prefill_s=1 / 6_000), lognormal(low, 0.8, 28672)
        steps = step_times(engines, lengths, 512, [update] * 12, 3.0, ahead=ahead, cut=True, chunks=4)
        rows.append((f"64 + 64 GPUs, staleness {ahead}", steps[3:-2].mean(), published))
    return rows


def ours(folder: Path, batch: int = 16, size: int = 8) -> list[tuple[str, float, float]]:
    """(what, modelled, measured seconds a step). What the model knows is the run in mode sync, and the lengths of each."""
    rows = []
    for seed in sorted(path.name.removeprefix("sync-") for path in folder.glob("sync-*")):
        for mode, knobs in LOOPS.items():
            run = [json.loads(line) for line in (folder / f"{mode}-{seed}" / "metrics.jsonl").read_text().splitlines()]
            mean, longest, seconds = (
                np.array([row[k] for row in run]) for k in ("response_length/mean", "response_length/max", "time/step_s")
            )
            if mode == "sync":  # a batch takes c + t0 x (longest) + t1 x (all tokens)
                known, columns = run, np.stack([np.ones(len(run)), longest, batch * size * mean], 1)
                c, t0, t1 = np.linalg.lstsq(columns, [row["time/generate_s"] for row in run], rcond=None)[0]
            sigma = 2.42 - np.sqrt(np.maximum(0, 2.42**2 - 2 * np.log(longest / mean)))  # so that the longest of 128 is as long
            rng = np.random.default_rng(0)
            lengths = lambda v, n, m=mean, s=sigma, rng=rng: rng.lognormal(np.log(m[v]) - s[v] ** 2 / 2, s[v], n)  # noqa: E731
            train, sync_s = ([row[f"time/{k}_s"] for row in known] for k in ("train", "sync"))
            steps = step_times(Engines(1, t0, t1, size), lengths, batch, train, c + np.mean(sync_s), **knobs)
            rows.append((f"{mode}, seed {seed}", steps[1:].mean(), seconds[1:].mean()))
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, help="folder of a --compare run")
    args = parser.parse_args()
    rows = [*(ours(args.compare) if args.compare else ()), *verl()]
    print("| a step of | modelled, s | measured, s | off by |\n|---|---|---|---|")
    for what, modelled, measured in rows:
        print(f"| {what} | {modelled:.3g} | {measured:.4g} | {modelled / measured - 1:+.1%} |")


if __name__ == "__main__":
    main()
