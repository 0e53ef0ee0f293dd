"""What does interrupting save? fit_partial beside waiting for the whole batch, on an engine in simulated time.

    python tests/bench/interrupt.py                  # about a minute

The loops, the pool, the agent loop and the server manager are the real ones. The engine has as many slots as a batch has
responses; a step with n of them busy takes t0 + t1 n seconds, and a = t0 / (t0 + t1 slots) is the share that many sequences do
not make dearer: near 1 on a GPU that waits for memory, near 0 where computing bounds it. Training takes a tenth of a batch's
generation, so that generation bounds a step, and a response may be 8 versions old, since the longest is 8 times the mean.

limit   of waiting for all: 1 + a (E[Lmax] / E[L] - 1) times an engine whose slots are always full
won     of what can be won: (waiting - partial) / (waiting - always full); with constant lengths the gain itself
again   tokens prefilled a second time, in percent of those generated

Must reach: slots 95 % busy and 80 % won where there is a tail; with constant lengths a loss of at most 3 %.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_storm import FakeClockLoop, Numbers  # noqa: E402

from one_step_off import AgentLoopWorker, RolloutBatch  # noqa: E402
from partial_rollout import LLMServerManager, PartialSingleTurnAgentLoop  # noqa: E402
from trainer import Parts, fit_partial, fit_sync  # noqa: E402

BATCH, GROUP, MEAN, STEPS, STALENESS = 16, 8, 256, 40, 8
SLOTS, PREFILL_S = BATCH * GROUP, 1e-5


class Engine:
    """Continuous batching: what waits gets a slot when one is free, and each step gives every busy slot a token."""

    def __init__(self, t0: float, t1: float, lengths: dict[int, int]) -> None:
        self.t0, self.t1, self.lengths = t0, t1, lengths
        self.waiting: list[list] = []  # (tokens so far, tokens in all, tokens of this call, future)
        self.running: list[list] = []
        self.closed, self.busy, self.tokens, self.again = False, 0.0, 0, 0
        self.work = asyncio.Event()

    async def generate_for_partial(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        """As the servers': until the length that the prompt has, or until a cancel."""
        if self.closed:
            return [], [], True
        done = len(prompt_ids) - 1
        self.again += done
        future = asyncio.get_running_loop().create_future()
        self.waiting.append([done, self.lengths[prompt_ids[0]], 0, future])
        self.work.set()
        n, cancelled = await future
        return [1] * (n - 1) + [1 if cancelled else 0] if n else [], [-1.0] * n, cancelled

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.work.wait()
            while self.running or self.waiting:
                started = self.waiting[: SLOTS - len(self.running)]
                self.waiting = self.waiting[len(started) :]
                self.running += started
                seconds = self.t0 + self.t1 * len(self.running) + PREFILL_S * sum(request[0] for request in started)
                await asyncio.sleep(seconds)
                self.busy += seconds * len(self.running) / SLOTS
                for request in self.running:
                    request[2] += 1
                self.tokens += len(self.running)
                for request in [request for request in self.running if request[0] + request[2] == request[1]]:
                    self.running.remove(request)
                    request[3].set_result((request[2], False))
            self.work.clear()

    async def cancel(self) -> None:
        """Everything comes back with the tokens it has."""
        self.closed = True
        for _, _, n, future in self.running + self.waiting:
            future.set_result((n, True))
        self.running, self.waiting = [], []

    async def resume(self) -> None:
        """Takes requests again."""
        self.closed = False


class Trainer:
    """Counts."""

    param_version = 0

    def update(self, rollouts: RolloutBatch) -> dict[str, float]:
        """Nothing but the next version."""
        self.param_version += 1
        return {}


class SimulatedParts(Parts):
    """Training takes simulated time, so it gets no thread."""

    async def train(self, t: int, rollouts: Any) -> tuple[dict[str, float], Any, float]:
        """As the real one."""
        await asyncio.sleep(self.train_s)
        return self.trainer.update(rollouts), rollouts, self.train_s


async def run(loop: str, t0: float, t1: float, lengths: dict[int, int]) -> tuple[float, Engine]:
    """(seconds in the steady middle, over those of an engine that has all its slots full for as many tokens; the engine)."""
    engine, trainer, ends = Engine(t0, t1, lengths), Trainer(), []
    limits = {"response_length": 10**6, "max_model_len": 10**7, "eos_token_ids": [0]}
    worker = AgentLoopWorker(lambda: PartialSingleTurnAgentLoop(LLMServerManager([engine]), Numbers(), **limits))
    clock = asyncio.get_running_loop()

    def group(number: int) -> RolloutBatch:
        samples = range(number * GROUP, (number + 1) * GROUP)
        columns = {"uid": [str(i) for i in samples], "raw_prompt": [[{"content": i}] for i in samples]}
        return RolloutBatch(columns | {"group": [number] * GROUP})

    async def one(chunk: RolloutBatch) -> RolloutBatch:
        rollouts = await worker.generate_sequences(RolloutBatch(chunk.columns, {"param_version": trainer.param_version}))
        rollouts.meta_info = {"timing": {"generate_s": 0.0}}
        return rollouts

    def generate_groups(groups: list[RolloutBatch]) -> list[Awaitable[RolloutBatch]]:
        return [asyncio.ensure_future(one(chunk)) for chunk in groups]

    async def sync() -> None:
        await asyncio.sleep(0)

    parts = SimulatedParts(
        score=lambda rollouts: rollouts,
        sync=sync,
        trainer=trainer,
        steps=STEPS,
        generate=lambda t: asyncio.ensure_future(one(RolloutBatch.concat([group(t * BATCH + i) for i in range(BATCH)]))),
        group=group,
        generate_groups=generate_groups,
        concat=lambda groups: RolloutBatch.concat([RolloutBatch(chunk.columns) for chunk in groups]),
        cancel=engine.cancel,
        resume=engine.resume,
        log=lambda t, metrics, rollouts: ends.append((clock.time(), engine.busy, engine.tokens)),
    )
    parts.train_s = MEAN * (t0 + t1 * SLOTS) / 10
    running = asyncio.ensure_future(engine.run())
    await (fit_sync(parts) if loop == "sync" else fit_partial(parts, batch_size=BATCH, max_staleness=STALENESS))
    running.cancel()
    # The first steps fill the pool and the last ones drain it.
    seconds, busy, tokens = np.subtract(ends[-STALENESS - 3], ends[STALENESS + 1])
    engine.share = busy / seconds
    return seconds / (tokens / SLOTS * (t0 + t1 * SLOTS)), engine


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    rng, missed, n = np.random.default_rng(0), False, STEPS * SLOTS
    kinds = {
        "constant": np.full(n, MEAN),
        "exponential": rng.exponential(MEAN, n),
        "lognormal 0.8": rng.lognormal(np.log(MEAN) - 0.32, 0.8, n),
        "as the pocket run": rng.lognormal(np.log(MEAN) - 0.5 * 0.55**2, 0.55, n),
    }
    print(
        "| lengths | a | limit of waiting | waiting | partial | won | slots busy | again |\n|---|---|---|---|---|---|---|---|"
    )
    for name, drawn in kinds.items():
        drawn = np.clip(np.ceil(drawn), 1, 8 * MEAN).astype(int)
        longest = drawn.reshape(STEPS, SLOTS).max(1).mean() / drawn.mean()
        for a in (0.9, 0.5, 0.1):
            t0, t1 = 0.02 * a, 0.02 * (1 - a) / SLOTS
            results = {}
            for loop in ("sync", "partial"):
                with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
                    results[loop] = runner.run(run(loop, t0, t1, dict(enumerate(drawn.tolist()))))
            waiting, partial, engine = results["sync"][0] - 0.1, *results["partial"]  # fit_sync also waits for training
            won = (waiting - partial) / (waiting - 1) if waiting > 1.01 else float("nan")
            shown = f"{1 + a * (longest - 1):.2f} | {waiting:.2f} | {partial:.2f} | "
            shown += f"{won:.0%}" if won == won else f"{waiting / partial - 1:+.1%}"
            print(f"| {name} | {a} | {shown} | {engine.share:.0%} | {engine.again / engine.tokens:.0%} |", flush=True)
            missed |= won < 0.8 or engine.share < 0.95 if won == won else partial > 1.03 * waiting
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
