"""Is the training step lean? Tokens a second of an update, beside a bare loop model(ids).loss.backward() on the same tokens.

    python tests/bench/training.py                   # the pocket policy: about 3 minutes on two cores
    python tests/bench/training.py --model FOLDER --batch 8 --response-length 128

bare   every micro-batch of the same rows, padded in the same way, through transformers' own loss; no advantages, no ratio, no
       clip, no optimiser
ours   GRPOTrainer.update; what AdamW takes, which the bare loop does not have, is measured apart and taken off

Must reach: 0.85 of the bare loop's tokens a second; memory that grows with the micro-batch, not with the batch; at most 10 % of
the tokens padding. One thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import run_gsm8k  # noqa: E402
from one_step_off import Ragged, RolloutBatch  # noqa: E402
from trainer import GRPOTrainer, load_policy, micro_batches  # noqa: E402


def rollouts(rows: int, vocabulary: int, response_length: int) -> RolloutBatch:
    """Prompts of 60 to 100 tokens; responses lognormal with a long tail, as the pocket run has them."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(60, 100, rows)
    responses = np.clip(rng.lognormal(np.log(response_length / 4), 0.8, rows), 1, response_length).astype(int)
    ids = [[rng.integers(0, vocabulary, n) for n in lengths] for lengths in (prompts, responses)]
    columns = {
        "uid": [str(i) for i in range(rows)],
        "group": [i // 8 for i in range(rows)],
        "rewards": rng.integers(0, 2, rows).astype(float),
        "prompt_ids": Ragged.pack(ids[0], np.int32),
        "response_ids": Ragged.pack(ids[1], np.int32),
        "response_mask": Ragged.pack([np.ones(n) for n in responses], np.int8),
        "response_logprobs": Ragged.pack([np.full(n, -3.0) for n in responses], np.float32),
        "span_versions": Ragged.pack([[0]] * rows, np.int32),
        "span_lengths": Ragged.pack([[n] for n in responses], np.int32),
    }
    return RolloutBatch(columns)


def bare(model: torch.nn.Module, batch: RolloutBatch, micro_batch_tokens: int) -> None:
    """Forward and backward of every micro-batch."""
    lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths
    for cut in micro_batches(lengths, micro_batch_tokens):
        ids = torch.zeros(len(cut), int(lengths[cut].max()), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, i in enumerate(cut):
            ids[row, : lengths[i]] = torch.from_numpy(
                np.concatenate([batch["prompt_ids"][i], batch["response_ids"][i]]).astype(int)
            )
            labels[row, : lengths[i]] = ids[row, : lengths[i]]
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    model.zero_grad()


def peak_mb(args: argparse.Namespace, rows: int) -> float:
    """Most memory of a fresh process that makes one update of so many rows."""
    code = f"""
import re, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from training import *
torch.set_num_threads(1)
model = load_policy({args.model!r})
batch = rollouts({rows}, model.config.vocab_size, {args.response_length})
trainer = GRPOTrainer(model, learning_rate=0.0, micro_batch_tokens={args.micro_batch_tokens})
def kb(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = kb("VmRSS")
trainer.update(batch)
print((kb("VmHWM") - before) / 1024)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(run_gsm8k.POCKET))
    parser.add_argument("--batch", type=int, default=64, help="responses; also 4 and 16 times as many")
    parser.add_argument("--response-length", type=int, default=320)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    run_gsm8k.quiet_libraries(verbose=False)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    model = load_policy(args.model)
    trainer, missed = GRPOTrainer(model, learning_rate=0.0, micro_batch_tokens=args.micro_batch_tokens), False
    memory: list[float] = []
    print("| responses | tokens | padding | bare, tokens/s | ours, tokens/s | ours / bare | optimiser, s | more memory, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in (args.batch, 4 * args.batch, 16 * args.batch):
        batch = rollouts(rows, model.config.vocab_size, args.response_length)
        lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths
        padded = sum(len(cut) * lengths[cut].max() for cut in micro_batches(lengths, args.micro_batch_tokens))
        tokens, padding = int(lengths.sum()), 1 - lengths.sum() / padded
        times: dict[str, list[float]] = {"bare": [], "ours": [], "optimiser": []}
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            bare(model, batch, args.micro_batch_tokens)
            middle = time.perf_counter()
            trainer.update(batch)
            end = time.perf_counter()
            trainer.optimizer.step()
            optimiser = time.perf_counter() - end
            trainer.optimizer.zero_grad()
            for name, seconds in (("bare", middle - start), ("ours", end - middle - optimiser), ("optimiser", optimiser)):
                times[name].append(seconds)
        rate = {name: tokens / statistics.median(values[1:]) for name, values in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["bare"][1:], times["ours"][1:], strict=True))
        memory.append(peak_mb(args, rows))
        print(
            f"| {rows} | {tokens:,} | {padding:.1%} | {rate['bare']:,.0f} | {rate['ours']:,.0f} | {ratio:.2f} | "
            f"{statistics.median(times['optimiser']):.3f} | {memory[-1]:.0f} |",
            flush=True,
        )
        missed |= ratio < 0.85 or padding > 0.1
    missed |= memory[2] > 1.3 * memory[1]  # both have full micro-batches, and one has four times as many of them
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
