"""Overlap: Ray workers generate batch t+1 while batch t trains. The policy is then one step off.

    synchronous    rollouts  | gen 0 |         | gen 1 |         | gen 2 |
                   trainer           | train 0 |       | train 1 |       | train 2 |

    one step off   rollouts  | gen 0 | gen 1   | gen 2   | gen 3   |
                   trainer           | train 0 | train 1 | train 2 |
                             ^ sync            ^ sync    ^ sync      (weights move while nothing is in flight)

A step costs max(T_gen, T_train) in place of T_gen + T_train. The price: batch t+1 is sampled by the policy from before
update t, so each batch but the first is trained exactly one version late. PPO's ratio corrects for that, token by token,
because each carries the log-probability it was sampled with (`response_logprobs`). The loop itself, with the sync, is
trainer.fit_one_step_off; `_demo` below is its skeleton, without weights.

Three things carry the idea:
    RolloutBatch                 columns of equal length, ragged ones packed without padding
    AgentLoopWorker              a Ray actor: one agent loop for each of its samples, all at once
    OneStepOffAgentLoopManager   dispatches a batch over the workers *now*, hands back an awaitable

Left out, and where verl does it (commit b178a3c):
    1. agent loops that call tools       verl/experimental/agent_loop/tool_agent_loop.py
    2. a reward model beside the rollout verl/experimental/agent_loop/agent_loop.py
    3. padding to tensors (DataProto)    verl/protocol.py; here padding is made in the trainer, a micro-batch at a time

Needs: numpy, ray.   Used by: run_gsm8k.py.   Run: python one_step_off.py  (sleeping workers; shows the overlap)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

logger = logging.getLogger(__name__)


# ---- The container: one kind all the way from prompt to gradient -----------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column whose rows differ in length, packed: one flat array and the length of each row.

    `values` is (sum of lengths,), any dtype; `lengths` is (n,) int64. Nothing is padded, so a batch costs what its tokens
    cost, and Ray moves it as two buffers that the reader maps without copying. verl's padded tensors of
    4,096 x 2,048 tokens take 14 to 33 times as long (tests/bench/manager.py).
    """

    values: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray = field(init=False, repr=False)  # (n + 1,) int64: row i is values[offsets[i]:offsets[i + 1]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]))
        if self.offsets[-1] != len(self.values):
            raise ValueError(f"lengths add up to {self.offsets[-1]}, but there are {len(self.values)} values")

    @classmethod
    def pack(cls, rows: Sequence[Sequence], dtype: Any) -> Ragged:
        """Packs `rows` (n sequences of numbers) into one array of `dtype`."""
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        values = np.empty(int(lengths.sum()), dtype)
        start = 0
        for row, length in zip(rows, lengths.tolist(), strict=True):
            values[start : start + length] = row
            start += length
        return cls(values, lengths)

    def __reduce__(self) -> tuple:
        return Ragged, (self.values, self.lengths)  # the offsets are made again at the other end

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray | Ragged:
        """Row i as a view (L_i,); with a slice a Ragged that shares the memory; with an index array one that copies."""
        if isinstance(index, (int, np.integer)):
            index = range(len(self))[index]
            return self.values[self.offsets[index] : self.offsets[index + 1]]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                stop = max(start, stop)
                return Ragged(self.values[self.offsets[start] : self.offsets[stop]], self.lengths[start:stop])
        chosen = np.arange(len(self))[index]
        rows = [self.values[self.offsets[i] : self.offsets[i + 1]] for i in chosen]
        return Ragged(np.concatenate(rows) if rows else self.values[:0], self.lengths[chosen])

    def rows(self) -> list[np.ndarray]:
        """All n rows, (L_i,) each, as views into `values`."""
        return [self.values[a:b] for a, b in itertools.pairwise(self.offsets.tolist())]


def _column(values: Any) -> np.ndarray | Ragged:
    if isinstance(values, (Ragged, np.ndarray)):
        return values
    values = list(values)
    if values and isinstance(values[0], (str, int, float, bool, np.generic)):
        column = np.array(values)
        if column.dtype.kind == "f" and all(isinstance(value, (int, np.integer)) for value in values):
            raise ValueError(f"{min(values)} and {max(values)} have no integer type in common: as floats they would be rounded")
        return column
    column = np.empty(len(values), object)  # chat messages, dicts: pickled one by one, so keep them out of hot paths
    column[:] = values
    return column


class RolloutBatch:
    """n samples as named columns, and `meta_info` that holds for all of them.

    A column is an array of shape (n, ...) or a `Ragged` of n rows. On the way from prompt to gradient the same sample keeps
    the same row, and brings its own `uid`, `seed` and `ground_truth` along, so that nothing can pair it with a stranger's.

    >>> batch = RolloutBatch({"uid": ["a", "b", "c"], "prompt_ids": Ragged.pack([[1, 2], [3], []], np.int32)})
    >>> len(batch), [len(part) for part in batch.chunk(2)], batch[1]["prompt_ids"].tolist()
    (3, [2, 1], [3])
    """

    def __init__(self, columns: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> None:
        self.columns: dict[str, np.ndarray | Ragged] = {name: _column(values) for name, values in columns.items()}
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one batch must have equal lengths, got {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, index: str | int | slice | np.ndarray) -> Any:
        """A column by name; a row, as a dict, by number; a smaller batch by slice or index array."""
        if isinstance(index, str):
            return self.columns[index]
        if isinstance(index, (int, np.integer)):
            row = {name: column[index] for name, column in self.columns.items()}
            return {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
        return RolloutBatch({name: column[index] for name, column in self.columns.items()}, self.meta_info)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def with_columns(self, **columns: Any) -> RolloutBatch:
        """The same samples with columns added or replaced."""
        return RolloutBatch({**self.columns, **columns}, self.meta_info)

    def chunk(self, n: int) -> list[RolloutBatch]:
        """At most n parts in order, none of them empty, whose sizes differ by at most one."""
        if n < 1:
            raise ValueError(f"cannot cut a batch into {n} parts: ask for at least 1")
        n = min(n, len(self))
        size, larger = divmod(len(self), n or 1)  # the first `larger` parts have one more
        bounds = [i * size + min(i, larger) for i in range(n + 1)]
        return [self[a:b] for a, b in itertools.pairwise(bounds)]

    def save(self, path: Path) -> None:
        """Writes the batch as .npz, without pickle: what is not an array of numbers or text is kept as JSON."""
        arrays: dict[str, np.ndarray] = {"meta_info": np.array(json.dumps(self.meta_info))}
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                arrays |= {f"values:{name}": column.values, f"lengths:{name}": column.lengths}
            elif column.dtype == object:
                arrays[f"json:{name}"] = np.array([json.dumps(value) for value in column], np.str_)
            else:
                arrays[f"array:{name}"] = column
        with path.open("wb") as file:
            np.savez(file, **arrays)

    @staticmethod
    def load(path: Path) -> RolloutBatch:
        """Reads what `save` wrote."""
        columns: dict[str, Any] = {}
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.partition(":")
                if kind == "values":
                    columns[name] = Ragged(arrays[key], arrays[f"lengths:{name}"])
                elif kind == "json":
                    columns[name] = [json.loads(str(text)) for text in arrays[key]]
                elif kind == "array":
                    columns[name] = arrays[key]
            return RolloutBatch(columns, json.loads(str(arrays["meta_info"])))

    @staticmethod
    def concat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """The parts in order, as one batch. Their columns and their `meta_info` must agree; a ValueError names what differs."""
        if not parts:
            raise ValueError("nothing to concatenate: an empty list has no columns")
        first = parts[0]
        for i, part in enumerate(parts[1:], start=1):
            if differing := set(first.columns) ^ set(part.columns):
                raise ValueError(f"part {i} and part 0 differ in columns {sorted(differing)}")
            for key in first.meta_info.keys() | part.meta_info.keys():
                ours, theirs = first.meta_info.get(key), part.meta_info.get(key)
                if ours is theirs:
                    continue
                if not np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours != theirs:
                    raise ValueError(f"part {i} and part 0 differ in meta_info[{key!r}]: {theirs!r} and {ours!r}")
        if len(parts) == 1:
            return first
        columns: dict[str, np.ndarray | Ragged] = {}
        for name, column in first.columns.items():
            pieces = [part.columns[name] for part in parts]
            if isinstance(column, Ragged):
                columns[name] = Ragged(
                    np.concatenate([piece.values for piece in pieces]),
                    np.concatenate([piece.lengths for piece in pieces]),
                )
            else:
                columns[name] = np.concatenate(pieces)
        return RolloutBatch(columns, first.meta_info)


# ---- The worker: a Ray actor that runs one agent loop per sample -----------------------------------------------------

# What an agent loop returns for a sample, token by token, and the dtype in which it travels.
TOKEN_COLUMNS = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "response_mask": np.int8,
    "response_logprobs": np.float32,
    "span_versions": np.int32,
    "span_lengths": np.int32,
}


class AgentLoopWorker:
    """Runs one agent loop for each of its samples, all of them concurrently.

    `make_agent_loop()` is called once, inside the actor. The loop it returns serves all samples at once. It has
    `async run(sampling_params, **sample) -> output`, where `output` has the attributes named in `TOKEN_COLUMNS`, a dict
    `extra_fields` of scalars, with the same keys for all, and a dict `metrics`. partial_rollout.AgentLoopOutput is one such.
    `sample` has every column of the row, `param_version` where meta_info has it, and `ticket`: so let `run` end in `**_`. The
    ticket goes with the sample's first request to partial_rollout.LLMServerManager, which keeps a run repeatable: the servers
    wait for all requests of a batch. A loop that may make no request must not pass on any ticket, or they wait for 20 s.

    The actor is `ray.remote(max_concurrency=2**16, max_restarts=3)(AgentLoopWorker)`. Ray's defaults are a thousand calls at
    once, and no restart when it dies.
    """

    def __init__(self, make_agent_loop: Callable[[], Any]) -> None:
        self.agent_loop = make_agent_loop()

    def ready(self) -> bool:
        """Answers once the constructor is through: what to wait for at the start of a run."""
        return True

    async def generate_sequences(self, prompts: RolloutBatch, *, new_columns_only: bool = False) -> RolloutBatch:
        """The same rows, in the same order, with what was generated for them.

        Reads meta_info["sampling_params"], a dict for the loop; meta_info["param_version"], the version that the servers were
        last given (they send back what comes for another; without it the loop's default, 0, counts); a column `seed` of ints.
        Sets the columns `TOKEN_COLUMNS` and those of `extra_fields`; every other column that came in goes out again (with
        `new_columns_only` none but `uid`, and no meta_info, since a manager has them). So the result can be sent in once more:
        responses that were cancelled are then resumed, finished ones stay as they are.
        Its `meta_info["metrics"]` has an array (n,) for each figure: seconds, prompt and response length in tokens, and the
        loop's own, nan where a sample has none.
        A sample that raises takes its siblings with it; the error names its `uid`.
        """
        sampling_params = prompts.meta_info.get("sampling_params", {})
        shared = {key: prompts.meta_info[key] for key in ("param_version",) if key in prompts.meta_info}
        batch, size = prompts.meta_info.get("_batch_id"), prompts.meta_info.get("_batch_size")
        tasks = []
        for sample in prompts:
            index = sample.pop("_index", -1)
            ticket = (batch, index, size) if index >= 0 else None  # for servers, which take a batch whole and in order
            tasks.append(asyncio.ensure_future(self._run(sampling_params, {**sample, **shared, "ticket": ticket})))
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # a no-op for those that are done
        kept = {"uid"} & prompts.columns.keys() if new_columns_only else prompts.columns
        columns: dict[str, Any] = {name: prompts[name] for name in kept}
        for name, dtype in TOKEN_COLUMNS.items():
            columns[name] = Ragged.pack([getattr(output, name) for output, _ in outputs], dtype)
        for name in outputs[0][0].extra_fields if outputs else ():
            columns[name] = [output.extra_fields[name] for output, _ in outputs]
        figures = dict.fromkeys(name for _, metrics in outputs for name in metrics)
        by_name = {name: np.array([metrics.get(name, np.nan) for _, metrics in outputs]) for name in figures}
        return RolloutBatch(columns, ({} if new_columns_only else prompts.meta_info) | {"metrics": by_name})

    async def _run(self, sampling_params: dict[str, Any], sample: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        start = time.perf_counter()
        if "seed" in sample:
            # The sample's own seed travels with the sample. A seed made here, from a place in the chunk, would change with
            # the number of workers.
            sampling_params = {**sampling_params, "seed": sample["seed"]}
        try:
            output = await self.agent_loop.run(sampling_params, **sample)
        except Exception as error:
            cause = getattr(error, "cause", None) or error  # of what an actor raised: Ray's own text quotes a whole traceback
            raise RuntimeError(f"sample {sample.get('uid', '?')}: {type(cause).__name__}: {cause}") from error
        lengths = {"prompt_length": len(output.prompt_ids), "response_length": len(output.response_ids)}
        return output, {"generate_sequences": time.perf_counter() - start, **lengths, **output.metrics}


# ---- The managers: who talks to the workers --------------------------------------------------------------------------


@dataclass
class _Call:
    """One chunk on one worker: what must be known to wait for it, to name it when it fails, and to cancel it."""

    worker: int
    chunk: RolloutBatch
    ref: Any = field(repr=False)

    def __str__(self) -> str:
        names = [str(uid) for uid in self.chunk["uid"]] if "uid" in self.chunk else []
        more = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        return f"worker {self.worker} with {len(self.chunk)} sample{'s' * (len(self.chunk) != 1)}{more}"


class AgentLoopManager:
    """Spreads a batch over the workers and puts the answers together again, in order. Blocking: the synchronous baseline.

    `workers` are actor handles of `AgentLoopWorker`, `replicas` those of the rollout servers (of their methods only those are
    needed that one calls here: cancel, resume, wake_up, sleep, clear_kv_cache). `timeout_s` bounds the wait for a batch, anew
    where a worker takes over from one that died; a TimeoutError then names who did not answer.
    What comes back has meta_info["timing"]: generate_s, in seconds, and figures by verl's names. A sample with a column
    `stop_reason` that is not "abort" is finished.
    """

    def __init__(self, workers: Sequence[Any], replicas: Sequence[Any] = (), *, timeout_s: float | None = None) -> None:
        if not workers:
            raise ValueError("an agent loop manager needs at least one worker, got none")
        self.agent_loop_workers = list(workers)
        self.rollout_replicas = list(replicas)
        self.timeout_s = timeout_s
        self._down: set[int] = set()  # workers that have died and do not answer yet
        self._batches = (f"{uuid4().hex}-{i}" for i in itertools.count())  # servers may have other managers too
        # One thread per worker, ours alone. asyncio.to_thread would borrow from the loop's default pool, which has
        # min(32, cpus + 4) threads: 6 on two cores. With 16 workers waiting in it, the trainer's own to_thread queues
        # behind the very generation that it should overlap with: an overlap efficiency of 0.55 in place of 0.97.
        # Inside Ray `await ref` would do as well; a thread is the pattern for *any* blocking wait.
        self._threads = ThreadPoolExecutor(len(self.agent_loop_workers), thread_name_prefix="wait_for_worker")

    def generate_sequences(self, prompts: RolloutBatch) -> RolloutBatch:
        """Generates for `prompts` and waits. Call it where no event loop runs."""

        async def generate() -> RolloutBatch:
            return await self._collect(self._dispatch(prompts), time.perf_counter(), self._get_in_thread)

        return asyncio.run(generate())

    def close(self) -> None:
        """Lets the waiting threads go. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _dispatch(self, prompts: RolloutBatch) -> list[_Call]:
        """Starts the work on every worker. Nothing here waits."""
        prompts = self._numbered([prompts])[0]
        workers = self._workers_that_are_up()
        # An empty batch still goes to a worker: it comes back with the columns of tokens.
        chunks = prompts.chunk(len(workers)) or [prompts]
        return [_Call(i, chunk, self._submit(i, chunk)) for i, chunk in zip(workers, chunks, strict=False)]

    def _workers_that_are_up(self) -> list[int]:
        """All but those that are known to have died; all, where none is left. A server takes a batch whole, so that every other
        request would wait for those of a dead worker."""
        everyone = range(len(self.agent_loop_workers))
        return [i for i in everyone if i not in self._down] or list(everyone)

    def _leave_out(self, worker: int) -> None:
        """Gives `worker` no more work until it answers, once Ray has started it again."""
        if worker not in self._down:
            self._down.add(worker)
            answer = self.agent_loop_workers[worker].ready.options(max_task_retries=-1).remote().future()
            answer.add_done_callback(lambda answer: None if answer.exception() else self._down.discard(worker))

    def _numbered(self, groups: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        """Numbers the unfinished responses of all groups as one batch, from 0 to its size - 1, in a column `_index`; a
        finished one gets -1, since it asks nothing of a server. By these the servers take a batch whole and in order
        (partial_rollout.VLLMServer._take_batch says why)."""
        finished = [
            group["stop_reason"] != "abort" if "stop_reason" in group else np.zeros(len(group), bool) for group in groups
        ]
        meta = {"_batch_id": next(self._batches), "_batch_size": int(sum((~done).sum() for done in finished))}
        numbered, first = [], 0
        for group, done in zip(groups, finished, strict=True):
            index = np.where(done, -1, first + np.cumsum(~done) - 1)
            first += int((~done).sum())
            numbered.append(RolloutBatch({**group.columns, "_index": index}, group.meta_info | meta))
        return numbered

    def _submit(self, worker: int, chunk: RolloutBatch, **options: Any) -> Any:
        method = self.agent_loop_workers[worker].generate_sequences
        return (method.options(**options) if options else method).remote(chunk, new_columns_only=True)

    async def _collect(self, calls: list[_Call], start: float, get: Callable[[Any], Awaitable[RolloutBatch]]) -> RolloutBatch:
        """Waits for all the calls and joins their answers in order."""
        tasks = [asyncio.ensure_future(self._wait(call, get)) for call in calls]
        try:
            parts = await asyncio.gather(*tasks)
        except BaseException:
            # Cancelling a waiter frees nothing: the actor goes on, and its thread with it, which then holds up the exit
            # of the program. So the *work* is cancelled; that ends the threads too.
            for task in tasks:
                task.cancel()
            self._end_work(calls)
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        metrics = [part.meta_info.pop("metrics") for part in parts]
        rollouts = RolloutBatch.concat(parts)
        del rollouts.meta_info["_batch_id"], rollouts.meta_info["_batch_size"], rollouts.columns["_index"]
        rollouts.meta_info["timing"] = {"generate_s": time.perf_counter() - start, **_timing(metrics)}
        return rollouts

    def _end_work(self, calls: list[_Call]) -> None:
        import ray

        for call in calls:
            ray.cancel(call.ref)

    async def _get_in_thread(self, ref: Any) -> RolloutBatch:
        import ray

        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: ray.get(ref, timeout=self.timeout_s))

    async def _wait(self, call: _Call, get: Callable[[Any], Awaitable[RolloutBatch]]) -> RolloutBatch:
        """The answer to one call, joined to what stayed here; if its worker dies, that of the worker which takes over."""
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

        dead: dict[int, bool] = {}  # workers that have had this call, and whether Ray starts them again
        while True:
            try:
                answer = await get(call.ref)
                if "uid" in call.chunk and not np.array_equal(answer["uid"], call.chunk["uid"]):
                    raise RuntimeError(f"{call} answered for other samples: {answer['uid'].tolist()}")
                return RolloutBatch({**call.chunk.columns, **answer.columns}, {**call.chunk.meta_info, **answer.meta_info})
            except (GetTimeoutError, TimeoutError):
                raise TimeoutError(f"{call} did not answer within {self.timeout_s:g} s") from None
            except RayTaskError as error:
                raise RuntimeError(f"{call} failed: {error.cause}") from error
            except (RayActorError, OutOfMemoryError) as error:  # the second: Ray has killed it for its memory, for good
                dead[call.worker] = isinstance(error, ActorUnavailableError)
                self._leave_out(call.worker)
                alive = [i for i in self._workers_that_are_up() if i not in dead]
                coming = [i for i in (call.worker, *dead) if dead[i]]
                if alive:
                    heir = alive[call.worker % len(alive)]
                    ref = self._submit(heir, call.chunk)
                elif coming:  # Ray keeps the call until it is there again
                    heir = coming[0]
                    ref = self._submit(heir, call.chunk, max_task_retries=-1)
                else:
                    raise RuntimeError(f"{call} died, and no other worker is left") from error
                logger.warning("%s died; worker %d generates them again", call, heir)
                call.worker, call.ref = heir, ref


class OneStepOffAgentLoopManager(AgentLoopManager):
    """The same, without blocking: the batch is under way when the call returns.

    One step off needs `generate_sequences_async` alone. The rest is for fit_partial, evaluation and --colocate.
    """

    def generate_sequences_async(self, prompts: RolloutBatch) -> Awaitable[RolloutBatch]:
        """Starts generating *now* and returns an awaitable of the rollouts. Call it inside a running event loop.

        A plain function on purpose. An `async def` starts nothing until its task gets a turn; training that blocks the loop
        takes that turn away, and the overlap is gone (2.0 s a step where 1.0 s was due). Here `.remote()` has been called
        before the caller has anything to await.
        """
        start = time.perf_counter()
        return self._started(self._dispatch(prompts), start, self._get_in_thread)

    def _started(self, calls: list[_Call], start: float, get: Callable[[Any], Awaitable[RolloutBatch]]) -> asyncio.Task:
        task = asyncio.ensure_future(self._collect(calls, start, get))
        # A task that is cancelled before it first runs never enters `_collect`, whose `except` ends the work.
        task.add_done_callback(lambda task: self._end_work(calls) if task.cancelled() else None)
        return task

    def generate_groups(self, groups: Sequence[RolloutBatch]) -> list[Awaitable[RolloutBatch]]:
        """Starts generating for each of `groups` *now* and returns one awaitable for each: they come back as they finish.

        What fully asynchronous training needs: `cancel` brings all of them back at once, each response with the tokens it
        has, and a group that came back with cancelled responses is resumed by handing it in again.
        """
        waiting = []
        for worker, chunk in zip(itertools.cycle(self._workers_that_are_up()), self._numbered(groups), strict=False):
            call = _Call(worker, chunk, self._submit(worker, chunk))
            waiting.append(self._started([call], time.perf_counter(), self._get_as_future))
        return waiting

    async def _get_as_future(self, ref: Any) -> RolloutBatch:
        # There are more groups than workers, and a thread each would be too many.
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), self.timeout_s)

    async def cancel(self) -> None:
        """Every replica ends what it has in flight, each response with the tokens it has, and takes nothing until `resume`."""
        await self._on_every_replica("cancel")

    async def resume(self) -> None:
        """Every replica takes requests again."""
        await self._on_every_replica("resume")

    async def wake_up(self) -> None:
        """Every replica takes its weights and cache memory back, all at once."""
        await self._on_every_replica("wake_up")

    async def sleep(self, level: int = 1) -> None:
        """Every replica gives its memory to the trainer, all at once; with level 2 that of the weights too, for good."""
        await self._on_every_replica("sleep", *([level] if level != 1 else []))

    async def clear_kv_cache(self) -> None:
        """Every replica forgets its cached prefixes, all at once. Raises what a replica that refuses raises."""
        await self._on_every_replica("clear_kv_cache")

    async def _on_every_replica(self, method: str, *args: Any) -> None:
        await asyncio.gather(*[getattr(replica, method).remote(*args) for replica in self.rollout_replicas])


def _timing(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """verl's timing keys from the samples' metrics; seconds and tokens. An empty batch has none."""
    parts = [part for part in parts if part]
    if not parts:
        return {}
    names = "generate_sequences", "prompt_length", "response_length"
    figures = {name: np.concatenate([part[name] for part in parts]) for name in names}
    seconds = figures["generate_sequences"]
    preempted = np.concatenate([part.get("num_preempted", np.full(len(part["prompt_length"]), np.nan)) for part in parts])
    preempted = np.nan_to_num(preempted, nan=-1)  # as in verl, where the loop does not say
    slowest = {name: values[int(seconds.argmax())] for name, values in figures.items()}
    return {
        "agent_loop/generate_sequences/min": float(seconds.min()),
        "agent_loop/generate_sequences/max": float(seconds.max()),
        "agent_loop/generate_sequences/mean": float(seconds.mean()),
        "agent_loop/slowest/generate_sequences": float(slowest["generate_sequences"]),
        "agent_loop/slowest/prompt_length": int(slowest["prompt_length"]),
        "agent_loop/slowest/response_length": int(slowest["response_length"]),
        "agent_loop/num_preempted/min": int(preempted.min()),
        "agent_loop/num_preempted/max": int(preempted.max()),
        "agent_loop/num_preempted/mean": float(preempted.mean()),
    }


# ---- See it: workers that sleep, a trainer that sleeps ---------------------------------------------------------------


class _Sleeper:
    """An agent loop that takes its time to say what it was asked."""

    async def run(self, sampling_params: dict[str, Any], *, prompt_ids: np.ndarray, **_: Any) -> Any:
        from types import SimpleNamespace

        await asyncio.sleep(sampling_params["seconds"])
        echo = prompt_ids.tolist()
        tokens = dict.fromkeys(TOKEN_COLUMNS, echo) | {"span_versions": [0], "span_lengths": [len(echo)]}
        return SimpleNamespace(**tokens, extra_fields={}, metrics={})


async def _demo(steps: int = 4, seconds: float = 0.5) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actor = ray.remote(num_cpus=0, max_concurrency=2**16, max_restarts=3)(AgentLoopWorker)
    manager = OneStepOffAgentLoopManager([actor.remote(_Sleeper) for _ in range(3)])
    prompts = RolloutBatch(
        {"uid": list("abcdefg"), "prompt_ids": Ragged.pack([[i] * i for i in range(7)], np.int32)},
        {"sampling_params": {"seconds": seconds}},
    )
    await manager.generate_sequences_async(prompts)  # once without a clock, while the workers start

    start = time.perf_counter()
    for _ in range(steps):
        await manager.generate_sequences_async(prompts)
        await asyncio.to_thread(time.sleep, seconds)  # "training"
    synchronous = (time.perf_counter() - start) / steps

    rollouts = await manager.generate_sequences_async(prompts)  # the first batch, with which nothing overlaps
    start = time.perf_counter()
    for _ in range(steps):
        # Nothing is in flight: here the weights would move.
        pending = manager.generate_sequences_async(prompts)
        await asyncio.to_thread(time.sleep, seconds)
        rollouts = await pending
    one_step_off = (time.perf_counter() - start) / steps

    print(f"7 samples over 3 workers came back in order: {''.join(rollouts['uid'])}")
    print(f"generate {seconds} s, train {seconds} s")
    print(f"a step: synchronous {synchronous:.2f} s, one step off {one_step_off:.2f} s")
    manager.close()
    ray.shutdown()


if __name__ == "__main__":
    # By import: the classes of a __main__ script would be pickled whole, and sent along with every batch.
    from one_step_off import _demo

    asyncio.run(_demo())
