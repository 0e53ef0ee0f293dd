"""What can a loop win, before it is built? A discrete-event model of the three loops, held against measured steps.

    python tests/bench/model.py                      # verl's published tables, and docs/model.png
    python tests/bench/model.py --compare FOLDER     # our own runs too: the folder of a `run_gsm8k.py --compare`

An engine that decodes n sequences takes t0 + t1 n seconds for a token of each. A response goes to the engine that has fewest.
The trainer takes so many seconds for a batch, in `chunks`, as groups come in. A sync stops everything, and what was cut is
prefilled again. Left out: jitter, tokens that get dearer with the context, the drift of lengths within a step.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
Lengths = Callable[[int, int], np.ndarray]  # (version, n) -> tokens of n responses that start at that version


def lognormal(mean: float, sigma: float, cap: float) -> Lengths:
    """Responses with a long tail, cut off at `cap` tokens."""
    rng = np.random.default_rng(0)
    return lambda version, n: np.clip(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, n), 1, cap)


class Engines:
    """`n` engines and their clock. Each counts tokens, and has a heap of (token at which it ends, token at its start, group)."""

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
                return self.now
            group = heapq.heappop(self.heaps[e])[2]
            self.n[e], self.end[e] = len(self.heaps[e]), self.heaps[e][0][0] if self.heaps[e] else np.inf
            self.missing[group] -= 1
            self.finished += self.missing[group] == 0
        return self.now

    def sync(self, seconds: float) -> None:
        """Nothing is decoded meanwhile, and then the engine that has most prefills what was cut."""
        cut = [sum(token - start for _, start, _ in heap) for heap, token in zip(self.heaps, self.token, strict=True)]
        self.now += seconds + self.prefill_s * max(cut)


def sync_steps(engines: Engines, lengths: Lengths, batch: int, train: Sequence[float], sync_s: float) -> np.ndarray:
    """Seconds of each step of fit_sync. `batch` in groups, `train` the seconds of each update."""
    ends = [0.0]
    for version, seconds in enumerate(train):
        engines.start(lengths(version, batch * engines.group_size))
        engines.now = engines.advance() + seconds + sync_s
        ends.append(engines.now)
    return np.diff(ends)


def one_step_off_steps(engines: Engines, lengths: Lengths, batch: int, train: Sequence[float], sync_s: float) -> np.ndarray:
    """Seconds of each step of fit_one_step_off, as sync_steps."""
    engines.start(lengths(0, batch * engines.group_size))
    ends = [engines.advance()]
    for version, seconds in enumerate(train):
        engines.sync(sync_s)
        if version + 1 < len(train):
            engines.start(lengths(version, batch * engines.group_size))
        trained = engines.now + seconds
        engines.now = max(engines.advance(), trained)
        ends.append(engines.now)
    return np.diff(ends)


def partial_steps(
    engines: Engines, lengths: Lengths, batch: int, train: Sequence[float], sync_s: float, staleness: float, chunks: int = 1
) -> np.ndarray:
    """Seconds of each step of fit_partial, as sync_steps; at version v at most (v + 1 + staleness) batches have started."""
    ends, begun = [0.0], 0
    for version, seconds in enumerate(train):
        goal = min(int((version + 1 + staleness) * batch), len(train) * batch)
        engines.start(lengths(version, (goal - begun) * engines.group_size))
        begun = goal
        for chunk in range(1, chunks + 1):
            trained = engines.advance(groups=(version + chunk / chunks) * batch) + seconds / chunks
            engines.advance(until=trained)
            engines.now = trained
        engines.sync(sync_s)
        ends.append(engines.now)
    return np.diff(ends)


def verl() -> list[tuple[str, float, float, str]]:
    """(what, modelled seconds, published seconds, what the model was given)."""
    given = "generation, training and the rest of the step"
    rows = [
        ("one-step-off, 7B FSDP2", max(458.0, 108 + 337 + 520 - 45 - 108 - 337), 520.0, given),
        ("one-step-off, 7B Megatron", max(501.0, 120 + 347 + 566 - 59 - 120 - 347), 566.0, given),
    ]
    t0, t1, sigma, cap, groups, size = (
        0.006,
        0.00015,
        0.8,
        28 * 1024,
        512,
        16,
    )  # assumed of a 7B on an H20, and of a step's lengths

    def generation(mean: float) -> float:
        engines = Engines(128, t0, t1, size)
        engines.start(lognormal(mean, sigma, cap)(0, groups * size))
        return engines.advance()

    low, high = 500.0, 8000.0  # the mean length is fitted, to the generation time of the colocated run
    while high - low > 20:
        low, high = ((low + high) / 2, high) if generation((low + high) / 2) < 177.9 else (low, (low + high) / 2)
    colocated = sync_steps(Engines(128, t0, t1, size), lognormal(low, sigma, cap), groups, [53.9 + 113.8] * 3, 10.7)
    rows.append(("128 GPUs, colocated", colocated.mean(), 356.3, f"all of it; mean length fitted: {low:.0f}"))
    for staleness, update, published in ((0.0, 98.8, 231.3), (0.1, 109.1, 171.3), (0.3, 103.2, 146.1), (0.5, 113.2, 150.6)):
        engines = Engines(64, t0, t1, size, prefill_s=1 / 20_000)
        steps = partial_steps(engines, lognormal(low, sigma, cap), groups, [update] * 10, 3.0, staleness, chunks=4)
        rows.append((f"64 + 64 GPUs, staleness {staleness}", steps[3:-2].mean(), published, f"that length; update {update} s"))
    return rows


if __name__ == "__main__":
    for row in verl():
        print(row, f"{row[1] / row[2] - 1:+.1%}")
