"""What does a resume cost in agent loop and server manager? Responses in pieces, on one core; Ray and the engine left out.

    python tests/bench/resume.py                     # half a minute

An engine that answers at once from a list takes the engine's time out of the picture. Must reach: at most 150 µs per call for a
response of 2,048 tokens, below verl's loop at each size (56, 93 and 262 µs a piece at 256, 2,048 and 8,192 tokens in 4 pieces,
measured in the same manner at its commit b178a3c, on another day), and growth with the length, not with pieces x length.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from partial_rollout import LLMServerManager, PartialSingleTurnAgentLoop  # noqa: E402

VERL_US = {256: 56, 2048: 93, 8192: 262}  # per piece, in-process server, 4 pieces


class Instant:
    """A server whose tokens lie ready; it cancels each request but the last after an equal share of them."""

    def __init__(self, length: int, pieces: int) -> None:
        self.ids, self.logprobs = list(range(length)), [-1.0] * length
        self.ends = [length * (n + 1) // pieces for n in range(pieces)]

    async def generate_for_partial(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        """The next piece: what lies between the tokens that the prompt has already and the next end."""
        done = len(prompt_ids) - 32
        end = next(end for end in self.ends if end > done)
        return self.ids[done:end], self.logprobs[done:end], end < len(self.ids)


class NoTokenizer:
    """Prompts of 32 tokens."""

    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        """Always the same."""
        return [1] * 32


async def us_per_call(length: int, pieces: int, rounds: int) -> float:
    """Microseconds for a whole response, over the number of its pieces; the median of `rounds`."""
    server = Instant(length, pieces)
    loop = PartialSingleTurnAgentLoop(
        LLMServerManager([server]), NoTokenizer(), response_length=length, max_model_len=length + 32
    )
    figures = []
    for _ in range(rounds):
        start, output = time.perf_counter(), None
        while output is None or output.is_cancel:
            output = await loop.run({"temperature": 1.0, "seed": 1}, raw_prompt=[], output=output)
        figures.append((time.perf_counter() - start) / pieces * 1e6)
        assert output.response_ids == server.ids
    return statistics.median(figures)


async def run(args: argparse.Namespace) -> int:
    """The table."""
    missed = False
    print("| tokens | pieces | µs per piece | µs per response | verl, µs per piece |\n|---|---|---|---|---|")
    for length in (256, 2048, 8192):
        before = math.inf
        for pieces in (1, 4, 16):
            us = await us_per_call(length, pieces, args.rounds)
            missed |= us >= before  # so many pieces must cost less than so many responses
            before = us
            verl = VERL_US[length] if pieces == 4 else None
            missed |= (verl is not None and us > verl) or (length == 2048 and us > 150)
            print(f"| {length} | {pieces} | {us:.0f} | {us * pieces:.0f} | {verl or ''} |", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(missed)


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    gc.collect()
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
