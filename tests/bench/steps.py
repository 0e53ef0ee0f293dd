"""Whole steps: ours one step off and synchronous, beside TRL's GRPOTrainer, on the same policy, prompts and lengths.

    python tests/bench/steps.py                      # ours alone: about 8 minutes on two cores
    python tests/bench/steps.py --peer PYTHON        # and TRL's, by the python of an environment with trl 1.16: 20 minutes

The pocket policy, 8 prompts x 8 responses x 128 tokens (EOS ignored), two cores, in turns; float32 unless said. Ours: one core
for vLLM and one for training. "sync, both cores": our baseline with two threads for each half. TRL with transformers'
generation, which was faster here than vLLM in its process, with one thread and with two; its bfloat16 is that of the whole
model, since autocast took a third longer. In bfloat16 attention is transformers' eager one, for ours and for TRL: PyTorch's own
takes twice as long for heads as small as these. On a CPU without AVX-512 training takes 17 times as long in it as in
float32: there it is left out. Seconds are those from the end of the third step to that of the last but one.

Must reach: 2 times the samples a second of TRL's best, in float32 and in bfloat16; without the peer, of the best that was ever
seen of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GROUP, TOKENS = 8, 8, 128

# The fastest for each; in float32 eager takes 5 % longer, for both.
ATTENTION = {"float32": "sdpa", "bfloat16": "eager"}

OURS = """
import functools, os, sys, run_gsm8k
run_gsm8k.make_prompts = functools.partial(run_gsm8k.make_prompts, ignore_eos=True)
if sys.argv.pop(1) == "both":
    cores = sorted(os.sched_getaffinity(0))
    run_gsm8k.split_cores = lambda: (cores, cores)
sys.exit(run_gsm8k.main())
"""

TRL = """
import sys, time
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
import run_gsm8k

model, dtype, attention, threads, steps, prompts, group, tokens = *sys.argv[1:4], *map(int, sys.argv[4:])
torch.set_num_threads(threads)
problems = run_gsm8k.PocketProblems().train(0, 0, prompts * steps)
data = Dataset.from_list([{"prompt": [{"role": "user", "content": p.question}], "answer": p.answer} for p in problems])

def reward(completions, answer, **_):
    return [run_gsm8k.compute_reward(c[0]["content"], a) for c, a in zip(completions, answer)]

args = GRPOConfig(
    output_dir="/tmp", use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=10**6, disable_tqdm=True,
    per_device_train_batch_size=prompts * group, num_generations=group, max_completion_length=tokens, max_steps=steps,
    learning_rate=3e-4, beta=0.0, temperature=1.0, gradient_checkpointing=False, generation_kwargs={"min_new_tokens": tokens},
    model_init_kwargs={"dtype": dtype, "attn_implementation": attention},
)
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data)
step, ends = trainer.training_step, []

def timed(*a, **k):
    result = step(*a, **k)  # generation, forward and backward; the optimiser comes after it, and so counts in the next
    ends.append(time.perf_counter())
    return result

trainer.training_step = timed
trainer.train()
print("STEP_S", (ends[-2] - ends[2]) / (len(ends) - 4))
"""


def ours(mode: str, cores: str, steps: int, dtype: str = "float32") -> float:
    """Seconds a step, from the end of the third to that of the last but one (with the last no generation overlaps)."""
    with tempfile.TemporaryDirectory() as folder:
        argv = f"--preset pocket --mode {mode} --dtype {dtype} --attn-implementation {ATTENTION[dtype]} "
        argv += f"--steps {steps} --batch-size {PROMPTS} --group-size {GROUP} "
        argv += f"--response-length {TOKENS} --eval-problems 0 --save-every 0 --out {folder} --name run"
        run(sys.executable, OURS, cores, *argv.split())
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        assert all(row["response_length/mean"] == TOKENS for row in rows)
        return (rows[-2]["time/seconds"] - rows[2]["time/seconds"]) / (len(rows) - 4)


def trl(python: str, threads: int, steps: int, dtype: str = "float32") -> float:
    """Seconds a step, of the same steps."""
    argv = [str(ROOT / "pocket"), dtype, ATTENTION[dtype], *map(str, (threads, steps, PROMPTS, GROUP, TOKENS))]
    return float(run(python, TRL, *argv, OMP_NUM_THREADS=str(threads)).split("STEP_S")[1])


def run(python: str, program: str, *argv: str, **environment: str) -> str:
    """What the program prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"} | environment
    result = subprocess.run([python, "-c", program, *argv], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout


def main() -> int:
    """The command; exit status 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="the python of an environment in which trl is installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # as many as TRL has threads
    has_bfloat16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    contenders = {
        "ours, one-step-off, bfloat16": lambda: ours("one-step-off", "one each", args.steps, "bfloat16"),
        "ours, one-step-off": lambda: ours("one-step-off", "one each", args.steps),
        "ours, sync": lambda: ours("sync", "one each", args.steps),
        "ours, sync, both cores": lambda: ours("sync", "both", args.steps),
    }
    if args.peer:
        contenders |= {
            "TRL, 1 thread": lambda: trl(args.peer, 1, args.steps),
            "TRL, 2 threads": lambda: trl(args.peer, 2, args.steps),
            "TRL, 2 threads, bfloat16": lambda: trl(args.peer, 2, args.steps, "bfloat16"),
        }
    contenders = {name: measure for name, measure in contenders.items() if has_bfloat16 or "bfloat16" not in name}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, measure in contenders.items():
            seconds[name].append(measure())
            print(f"round {number}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    rates = {name: PROMPTS * GROUP / statistics.median(values) for name, values in seconds.items()}
    peers = [rate for name, rate in rates.items() if name.startswith("TRL")]
    best = max(peers, default=33.0)  # the best that was seen of it on a quiet machine of this kind
    print("| | s a step, median (lowest, highest) | samples/s | x TRL's best |\n|---|---|---|---|")
    for name, values in seconds.items():
        spread = f"{statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})"
        print(f"| {name} | {spread} | {rates[name]:.1f} | {rates[name] / best:.2f} |")
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(min(rate for name, rate in rates.items() if name.startswith("ours, one-step-off")) < 2 * best)


if __name__ == "__main__":
    sys.exit(main())
