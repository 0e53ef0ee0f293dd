"""What does interrupting save? fit_partial beside waiting for the whole batch, on an engine in simulated time, and on vLLM.

    python tests/bench/interrupt.py                  # about a minute
    python tests/bench/interrupt.py --real           # vLLM with the pocket policy: about half an hour
    python tests/bench/interrupt.py --real --lengths constant --rounds 7

The loops, the pool, the agent loop and the server manager are the real ones. The engine has as many slots as a batch has
responses; a step with n of them busy takes t0 + t1 n seconds, and a = t0 / (t0 + t1 slots) is the share that many sequences do
not make dearer: near 1 on a GPU that waits for memory, near 0 where computing bounds it. Training takes a tenth of a batch's
generation, so that generation bounds a step. A response may be as many versions old (--max-staleness) as the longest is times
the mean: 8, but 1 where lengths are constant; more is more requests in the engine, each of which a cut takes out and puts back.

limit   of waiting for all: 1 + a (E[Lmax] / E[L] - 1) times an engine whose slots are always full; by a straight line for the
        time of a step, from which a real engine departs
won     of what can be won: (waiting - partial) / (waiting - always full); with constant lengths the gain itself
busy    slots with a request in the engine
again   tokens prefilled a second time, in percent of those generated

On vLLM 8 prompts x 4 responses have 32 slots, syncs are real (training only waits), and lengths are forced. "An engine whose
slots are always full" is vLLM that is given responses of the same lengths all at once, without a cut, in turns with the two
loops; it and waiting go before partial and after it. t0 and t1, for a, come from responses of the mean length. On a CPU a
token that is prefilled again costs a seventh of one that is generated; and a cut costs 0.05 s, whatever the step takes: --mean
says how much that weighs.

Must reach: slots 95 % busy and 80 % won where there is a tail; with constant lengths a loss of at most 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_storm import FakeClockLoop, Numbers  # noqa: E402

import run_gsm8k  # noqa: E402
from one_step_off import AgentLoopWorker, RolloutBatch  # noqa: E402
from partial_rollout import LLMServerManager, PartialSingleTurnAgentLoop, VLLMServer  # noqa: E402
from trainer import Parts, fit_partial, fit_sync  # noqa: E402

PREFILL_S = 1e-5
CYCLE = 10  # batches whose lengths come again and again


class Engine:
    """Continuous batching: what waits gets a slot when one is free, and each step gives every busy slot a token."""

    def __init__(self, t0: float, t1: float, slots: int) -> None:
        self.t0, self.t1, self.slots = t0, t1, slots
        self.waiting: list[list] = []  # (tokens so far, tokens in all, tokens of this call, future)
        self.running: list[list] = []
        self.closed, self.busy, self.tokens, self.again = False, 0.0, 0, 0
        self.work = asyncio.Event()

    async def generate_for_partial(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        """As the servers': until all tokens are there, or until a cancel."""
        if self.closed:
            return [], [], True
        done = len(prompt_ids) - 1
        future = asyncio.get_running_loop().create_future()
        self.waiting.append([done, done + sampling_params["max_tokens"], 0, future])
        self.work.set()
        n, cancelled = await future
        return [1] * n, [-1.0] * n, cancelled

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.work.wait()
            while self.running or self.waiting:
                started = self.waiting[: self.slots - len(self.running)]
                self.waiting = self.waiting[len(started) :]
                self.running += started
                self.again += sum(request[0] for request in started)
                seconds = self.t0 + self.t1 * len(self.running) + PREFILL_S * sum(request[0] for request in started)
                await asyncio.sleep(seconds)
                self.busy += seconds * len(self.running) / self.slots
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


class ForcedLength(PartialSingleTurnAgentLoop):
    """A response has as many tokens as its row of the column `length` says."""

    async def run(self, sampling_params: dict[str, Any], *, length: int, **sample: Any) -> Any:
        """As always."""
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **sample)


@dataclass
class Case:
    """How much of everything; tokens and responses."""

    batch: int = 16
    group: int = 8
    mean: int = 256
    steps: int = 40

    @property
    def slots(self) -> int:
        """As many as a batch has responses."""
        return self.batch * self.group

    @property
    def max_model_len(self) -> int:
        """A prompt of one token, and the longest response."""
        return 1 + 8 * self.mean

    def staleness(self, lengths: np.ndarray) -> int:
        """So that the trainer need not wait for the longest of these."""
        return math.ceil(lengths.max() / self.mean)

    def draw(self) -> dict[str, np.ndarray]:
        """Kinds of lengths, of all responses: those of CYCLE batches, again and again, so that whoever measures over a multiple
        of them has the same ones."""
        rng, n, m = np.random.default_rng(0), CYCLE * self.slots, self.mean
        kinds = {
            "constant": np.full(n, m),
            "exponential": rng.exponential(m, n),
            "lognormal 0.8": rng.lognormal(np.log(m) - 0.32, 0.8, n),
            "as the pocket run": rng.lognormal(np.log(m) - 0.5 * 0.55**2, 0.55, n),
        }
        kinds = {name: np.clip(np.ceil(drawn), 1, 8 * m).astype(int) for name, drawn in kinds.items()}
        return {name: np.tile(drawn, math.ceil(self.steps / CYCLE)) for name, drawn in kinds.items()}


async def run(
    case: Case, loop: str, engine: Any, train_s: float, lengths: np.ndarray, sync: Callable[[int], Awaitable[None]]
) -> tuple[float, float, float]:
    """In the steady middle: seconds a generated token; the share of slots that are busy; tokens that are prefilled again for
    each one that is generated. Training takes `train_s`, and where generation waits for it, that is left out."""
    trainer, ends = Trainer(), []
    limits = {"response_length": 8 * case.mean, "max_model_len": case.max_model_len, "eos_token_ids": [0]}
    worker = AgentLoopWorker(lambda: ForcedLength(LLMServerManager([engine]), Numbers(), **limits))
    clock = asyncio.get_running_loop()

    def group(number: int) -> RolloutBatch:
        samples = range(number * case.group, (number + 1) * case.group)
        columns = {"uid": [str(i) for i in samples], "raw_prompt": [[{"content": 3 + i % 400}] for i in samples]}
        return RolloutBatch(columns | {"group": [number] * case.group, "length": [int(lengths[i]) for i in samples]})

    async def one(chunk: RolloutBatch) -> RolloutBatch:
        rollouts = await worker.generate_sequences(RolloutBatch(chunk.columns, {"param_version": trainer.param_version}))
        rollouts.meta_info = {"timing": {"generate_s": 0.0}}
        return rollouts

    def generate_groups(groups: list[RolloutBatch]) -> list[Awaitable[RolloutBatch]]:
        return [asyncio.ensure_future(one(chunk)) for chunk in groups]

    def generate(t: int) -> Awaitable[RolloutBatch]:
        return generate_groups([RolloutBatch.concat([group(t * case.batch + i) for i in range(case.batch)])])[0]

    parts = SimulatedParts(
        score=lambda rollouts: rollouts,
        sync=lambda: sync(trainer.param_version),
        trainer=trainer,
        steps=case.steps,
        generate=generate,
        group=group,
        generate_groups=generate_groups,
        concat=lambda groups: RolloutBatch.concat([RolloutBatch(chunk.columns) for chunk in groups]),
        cancel=engine.cancel,
        resume=engine.resume,
        log=lambda t, metrics, rollouts: ends.append((clock.time(), engine.busy, engine.tokens, engine.again)),
    )
    parts.train_s = train_s
    if loop == "sync":
        await fit_sync(parts)
        first, last = 0, (case.steps - 1) // CYCLE * CYCLE
    else:
        staleness = case.staleness(lengths)
        await fit_partial(parts, batch_size=case.batch, max_staleness=staleness)
        first = staleness + 1  # those before fill the pool, and the last ones drain it
        last = first + (case.steps - 1 - staleness - first) // CYCLE * CYCLE
    seconds, busy, tokens, again = np.subtract(ends[last], ends[first])
    return (seconds - (last - first) * train_s * (loop == "sync")) / tokens, busy / seconds, again / tokens


def report(name: str, a: float, case: Case, drawn: np.ndarray, rounds: list[tuple[float, float, float, float]]) -> bool:
    """Prints a line of the table, the medians over (waiting, partial, busy, again) of each round, where times are over those of
    an engine whose slots are always full; whether it misses a limit."""
    waiting, partial, busy, again = np.median(rounds, axis=0)
    longest = drawn.reshape(-1, case.slots).max(1).mean() / drawn.mean()
    if drawn.std():
        won = statistics.median((waiting - partial) / (waiting - 1) for waiting, partial, *_ in rounds)
        shown, missed = f"{won:.0%}", won < 0.8 or busy < 0.95
    else:
        gain = statistics.median(waiting / partial - 1 for waiting, partial, *_ in rounds)
        shown, missed = f"{gain:+.1%}", gain < 1 / 1.03 - 1
    limit = 1 + a * (longest - 1)
    print(
        f"| {name} | {a:.2f} | {limit:.2f} | {waiting:.2f} | {partial:.2f} | {shown} | {busy:.0%} | {again:.0%} |", flush=True
    )
    return missed


def simulated() -> bool:
    """All lengths, with an engine of three kinds. Whether a limit is missed."""
    case, missed = Case(), False
    for name, drawn in case.draw().items():
        for a in (0.9, 0.5, 0.1):
            t0, t1 = 0.02 * a, 0.02 * (1 - a) / case.slots
            full = (t0 + t1 * case.slots) / case.slots

            async def go(loop: str, t0: float = t0, t1: float = t1, full: float = full, drawn: np.ndarray = drawn) -> tuple:
                engine = Engine(t0, t1, case.slots)
                running = asyncio.ensure_future(engine.run())
                train_s = case.mean * case.slots * full / 10
                result = await run(case, loop, engine, train_s, drawn, lambda version: asyncio.sleep(0))
                running.cancel()
                return result

            results = {}
            for loop in ("sync", "partial"):
                with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
                    results[loop] = runner.run(go(loop))
            partial, busy, again = results["partial"]
            missed |= report(name, a, case, drawn, [(results["sync"][0] / full, partial / full, busy, again)])
    return missed


class Counting(VLLMServer):
    """A server that counts: tokens, and how many of `slots` are busy."""

    slots, area, tokens, again, since = 32, 0.0, 0, 0, 0.0

    async def generate_for_partial(self, request_id: str, *, prompt_ids: list[int], **more: Any) -> Any:
        """As always; every prompt has one token, so what comes after it was generated before."""
        ids, logprobs, is_cancel = await super().generate_for_partial(request_id, prompt_ids=prompt_ids, **more)
        self.tokens += len(ids)
        self.again += len(prompt_ids) - 1 if ids else 0
        return ids, logprobs, is_cancel

    @property
    def busy(self) -> float:
        """Seconds times the share of busy slots."""
        now = time.perf_counter()
        self.area += (now - self.since) * min(self._in_flight, self.slots) / self.slots
        self.since = now
        return self.area

    def _begin(self) -> None:
        _ = self.busy
        super()._begin()

    def _end(self) -> None:
        _ = self.busy
        super()._end()


async def full_engine(server: VLLMServer, lengths: np.ndarray, slots: int) -> float:
    """Seconds a token of an engine that is given all these responses at once: its slots are full while enough of them wait."""
    ends = []

    async def one(i: int, length: int) -> None:
        params = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
        await server.generate(f"full-{i}", prompt_ids=[3 + i % 400], sampling_params=params)
        ends.append((time.perf_counter(), server.tokens))

    await asyncio.gather(*[one(i, int(length)) for i, length in enumerate(lengths)])
    seconds, tokens = np.subtract(ends[-2 * slots - 1], ends[2 * slots - 1])
    return seconds / tokens


async def real(mean: int, rounds: int, lengths: Sequence[str]) -> bool:
    """These kinds of lengths, on vLLM. Whether a limit is missed."""
    case, missed = Case(batch=8, group=4, mean=mean), False
    waits = replace(case, steps=CYCLE + 1)  # enough, where each of them begins anew
    weights = run_gsm8k.make_trainer(run_gsm8k.Config(), str(run_gsm8k.POCKET), None, "cpu").weights()
    options = run_gsm8k.plan_devices(run_gsm8k.Config(kv_cache_mb=1024), 0).engine_args
    options |= {"dtype": "float32", "block_size": 32}
    options |= {"max_model_len": case.max_model_len, "hf_overrides": {"max_position_embeddings": case.max_model_len}}
    cores = sorted(os.sched_getaffinity(0))
    server = Counting(str(run_gsm8k.POCKET), cores=cores[-1:], max_num_seqs=case.slots, **options)
    await server.ready()
    sync = functools.partial(server.update_weights, weights)

    async def seconds_a_step(n: int) -> float:
        params = {"temperature": 1.0, "max_tokens": mean, "ignore_eos": True}
        start = time.perf_counter()
        await asyncio.gather(*[server.generate(f"{i}", prompt_ids=[3 + i], sampling_params=params) for i in range(n)])
        return (time.perf_counter() - start) / mean

    counts = [1, case.slots // 2, case.slots] * 4
    times = [await seconds_a_step(n) for n in counts][3:]
    t1, t0 = np.polyfit(counts[3:], times, 1)
    step_s = t0 + t1 * case.slots
    print(
        f"vLLM: t0 {t0 * 1e3:.2f} ms, t1 {t1 * 1e3:.3f} ms, {step_s * 1e3:.2f} ms with {case.slots} sequences", file=sys.stderr
    )
    for name in lengths:
        # As many as fill the pool, a cycle that counts, and as many as drain it.
        case = replace(case, steps=2 * case.staleness(case.draw()[name]) + 2 + CYCLE)
        drawn, shown = case.draw()[name], []
        for number in range(rounds):
            # The machine's speed drifts: what partial is set beside is measured before it and after it.
            fulls, waitings = [await full_engine(server, drawn[: (CYCLE + 4) * case.slots], case.slots)], []
            train_s = fulls[0] * case.slots * mean / 10
            waitings.append((await run(waits, "sync", server, train_s, drawn, sync))[0])
            partial, busy, again = await run(case, "partial", server, train_s, drawn, sync)
            waitings.append((await run(waits, "sync", server, train_s, drawn, sync))[0])
            fulls.append(await full_engine(server, drawn[: (CYCLE + 4) * case.slots], case.slots))
            full = sum(fulls) / 2
            shown.append((sum(waitings) / 2 / full, partial / full, busy, again))
            measured = ", ".join(f"{1e6 * x:.0f}" for x in (fulls[0], waitings[0], partial, waitings[1], fulls[1]))
            figures = " ".join(f"{x:.2f}" for x in shown[-1])
            print(f"round {number}, {name}: {measured} us a token, {figures}", file=sys.stderr, flush=True)
        missed |= report(name, t0 / step_s, case, drawn, shown)
    await server.shutdown()
    return missed


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="vLLM in place of the simulation")
    parser.add_argument("--mean", type=int, default=256, help="on vLLM: tokens of a response, on average")
    parser.add_argument("--rounds", type=int, default=3, help="on vLLM: the median of so many")
    parser.add_argument("--lengths", nargs="+", choices=[*Case().draw()], default=[*Case().draw()], help="on vLLM: these alone")
    args = parser.parse_args()
    print("| lengths | a | limit of waiting | waiting | partial | won | slots busy | again |\n" + "|---" * 8 + "|")
    if args.real:
        run_gsm8k.quiet_libraries(verbose=False)
        return int(asyncio.run(real(args.mean, args.rounds, args.lengths)))
    return int(simulated())


if __name__ == "__main__":
    sys.exit(main())
