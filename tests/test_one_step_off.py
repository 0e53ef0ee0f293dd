"""Laws of one_step_off.py: the container under hypothesis, the managers on real Ray."""

from __future__ import annotations

import asyncio
import doctest
import math
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import one_step_off
from one_step_off import TOKEN_COLUMNS, AgentLoopManager, AgentLoopWorker, OneStepOffAgentLoopManager, Ragged, RolloutBatch

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=9)


def batch_of(rows: list[list[int]], **meta_info: Any) -> RolloutBatch:
    uids = np.array([f"s{i}" for i in range(len(rows))], np.str_)
    return RolloutBatch({"uid": uids, "prompt_ids": Ragged.pack(rows, np.int32)}, meta_info)


def rows_of(batch: RolloutBatch) -> list[tuple[str, list[int]]]:
    return [(str(row["uid"]), row["prompt_ids"].tolist()) for row in batch]


# ---- Ragged and RolloutBatch -----------------------------------------------------------------------------------------


@given(ROWS)
@example([])
@example([[], []])
def test_a_ragged_column_gives_back_the_rows_that_were_packed(rows: list[list[int]]) -> None:
    """pack then rows, indexing and pickling are the identity on a list of lists."""
    column = Ragged.pack(rows, np.int32)
    assert [row.tolist() for row in column.rows()] == rows
    assert [column[i].tolist() for i in range(len(rows))] == rows
    assert [row.tolist() for row in pickle.loads(pickle.dumps(column)).rows()] == rows


@given(ROWS, st.slices(9), st.randoms())
@example([[1], [2], [3]], slice(2, 0), None)
def test_slices_and_index_arrays_choose_rows_as_a_list_does(rows: list[list[int]], cut: slice, rng: Any) -> None:
    """A slice of a Ragged is the Ragged of the slice; so is an index array, with repeats and in any order."""
    column = Ragged.pack(rows, np.int32)
    assert [row.tolist() for row in column[cut].rows()] == rows[cut]
    if rows and rng is not None:
        chosen = [rng.randrange(len(rows)) for _ in range(5)]
        assert [row.tolist() for row in column[np.array(chosen)].rows()] == [rows[i] for i in chosen]


def test_a_slice_of_a_ragged_column_shares_its_memory() -> None:
    """A chunk of a batch costs nothing to make."""
    column = Ragged.pack([[1, 2], [3], [4, 5, 6]], np.int32)
    assert np.shares_memory(column[1:].values, column.values)


@given(ROWS, st.integers(1, 12))
@example([[1]] * 7, 3)
@example([[1]] * 2, 3)
@example([], 3)
def test_chunks_are_even_in_order_and_concat_to_the_whole(rows: list[list[int]], n: int) -> None:
    """chunk(n): min(n, len) parts, sizes within one of each other, none empty; concat undoes it."""
    batch = batch_of(rows, step=3)
    parts = batch.chunk(n)
    sizes = [len(part) for part in parts]
    assert len(parts) == min(n, len(rows)) and sum(sizes) == len(rows)
    assert not sizes or (max(sizes) - min(sizes) <= 1 and min(sizes) > 0)
    if parts:
        whole = RolloutBatch.concat(parts)
        assert rows_of(whole) == rows_of(batch) and whole.meta_info == {"step": 3}


def test_concat_names_what_the_parts_disagree_in() -> None:
    """Columns or meta_info that differ end in an error with their name and both values."""
    with pytest.raises(ValueError, match=r"part 1 and part 0 differ in meta_info\['version'\]: 2 and 1"):
        RolloutBatch.concat([batch_of([[1]], version=1), batch_of([[1]], version=2)])
    with pytest.raises(ValueError, match=r"differ in columns \['extra'\]"):
        RolloutBatch.concat([batch_of([[1]]), batch_of([[1]]).with_columns(extra=[1])])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        RolloutBatch.concat([])


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    """A batch cannot be built crooked."""
    with pytest.raises(ValueError, match=r"equal lengths, got {'a': 1, 'b': 2}"):
        RolloutBatch({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="cannot cut a batch into 0 parts"):
        batch_of([[1]]).chunk(0)


@given(ROWS)
def test_a_saved_batch_is_the_batch_that_is_loaded(tmp_path_factory: Any, rows: list[list[int]]) -> None:
    """save then load keeps rows, dtypes, chat messages and meta_info, without pickle."""
    path = tmp_path_factory.mktemp("batch") / "rollouts.npz"
    messages = [[{"role": "user", "content": f"ü{i}"}] for i in range(len(rows))]
    batch = batch_of(rows, timing={"generate_s": 0.1}).with_columns(raw_prompt=messages, rewards=np.arange(len(rows)) / 3)
    batch.save(path)
    again = RolloutBatch.load(path)
    assert rows_of(again) == rows_of(batch) and again.meta_info == batch.meta_info
    assert list(again["raw_prompt"]) == messages and again["rewards"].tolist() == batch["rewards"].tolist()
    assert again["prompt_ids"].values.dtype == np.int32


# ---- On real Ray -----------------------------------------------------------------------------------------------------


class Loop:
    """An agent loop that does what the sample tells it, and writes down that it began, in a folder of notes."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    async def run(self, sampling_params: dict[str, Any], *, uid: str, prompt_ids: np.ndarray, ticket: Any, **_: Any) -> Any:
        (self.notes / f"{uid}-{os.getpid()}").touch()
        try:
            return await self.respond(sampling_params, uid, prompt_ids, ticket)
        except asyncio.CancelledError:
            (self.notes / f"cancelled {uid}").touch()
            raise

    async def respond(self, sampling_params: dict[str, Any], uid: str, prompt_ids: np.ndarray, ticket: Any) -> Any:
        if uid in sampling_params.get("raises", ()):
            raise KeyError("no such thing")
        if uid in sampling_params.get("kills_once", ()) and not (self.notes / "killed").exists():
            (self.notes / "killed").touch()
            os.kill(os.getpid(), 9)
        if uid in sampling_params.get("kills", ()) and not (self.notes / f"killed {uid}").exists():
            (self.notes / f"killed {uid}").touch()
            os.kill(os.getpid(), 9)
        while sampling_params.get("waits") and not (self.notes / "go").exists():
            await asyncio.sleep(0.01)
        ids = prompt_ids.tolist()
        tokens = dict.fromkeys(TOKEN_COLUMNS, ids) | {"span_versions": [0], "span_lengths": [len(ids)]}
        _, place, size = ticket or ("", -1, 0)
        more = {"stop_reason": "stop", "place": place, "size": size, "drawn_with": sampling_params.get("seed", -1)}
        return SimpleNamespace(**tokens, extra_fields=more, metrics={})


@pytest.fixture(scope="module")
def ray() -> Any:
    import ray

    here = Path(__file__).parent
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def idle(ray: Any) -> Any:
    """Three workers for the tests that kill none, and their folder of notes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder)
        workers = start_workers(ray, notes, 3)
        yield workers, notes


def start_workers(ray: Any, notes: Path, n: int) -> list[Any]:
    actor = ray.remote(num_cpus=0, max_concurrency=100)(AgentLoopWorker)
    workers = [actor.remote(lambda: Loop(notes)) for _ in range(n)]
    ray.get([worker.ready.remote() for worker in workers])
    return workers


def fresh(notes: Path) -> None:
    for note in notes.iterdir():
        note.unlink()


async def until(condition: Any, limit_s: float = 60) -> None:
    """Waits for a condition; the limit only keeps a broken test from hanging."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [7, 2, 0])
def test_a_batch_of_any_size_comes_back_whole_and_in_order(idle: Any, n: int) -> None:
    """7, 2 and 0 samples over 3 workers: each sample once, in order, with its generated columns and its metrics."""
    workers, _ = idle
    rows = [[i] * (i + 1) for i in range(n)]
    manager = OneStepOffAgentLoopManager(workers)
    rollouts = asyncio.run(_await(lambda: manager.generate_sequences_async(batch_of(rows, step=5))))
    assert rows_of(rollouts) == rows_of(batch_of(rows))
    assert [row.tolist() for row in rollouts["response_ids"].rows()] == rows
    assert rollouts["response_logprobs"].values.dtype == np.float32
    timing = rollouts.meta_info.pop("timing")
    assert rollouts.meta_info == {"step": 5}, "the workers' metrics and the batch's own marks do not leak out"
    assert ("agent_loop/slowest/response_length" in timing) == (n > 0) and timing["generate_s"] > 0
    assert timing.get("agent_loop/num_preempted/max", -1) == -1, "the loop does not say: no 0, which would claim to know"
    blocking = AgentLoopManager(workers).generate_sequences(batch_of(rows, step=5))
    assert rows_of(blocking) == rows_of(rollouts)


async def _await(make: Any) -> Any:
    return await make()


def test_the_work_is_under_way_when_the_call_returns(idle: Any) -> None:
    """generate_sequences_async dispatches by itself: workers begin although the event loop never gets a turn."""
    workers, notes = idle
    fresh(notes)
    manager = OneStepOffAgentLoopManager(workers)

    async def scenario() -> RolloutBatch:
        pending = manager.generate_sequences_async(batch_of([[1]] * 3))
        end = time.monotonic() + 60
        while len(list(notes.iterdir())) < 3:  # this blocks the loop, as training in its thread would
            assert time.monotonic() < end, "nothing was dispatched before the loop got a turn"
            time.sleep(0.01)
        return await pending

    assert len(asyncio.run(scenario())) == 3


def test_many_waiting_workers_do_not_starve_the_trainers_thread(idle: Any) -> None:
    """With more workers waiting than asyncio's pool has threads, the trainer's own to_thread still runs.

    The workers wait for what the trainer does. Were the manager to wait in the default pool, none of them would ever end.
    """
    workers, notes = idle
    fresh(notes)
    n = min(32, (os.cpu_count() or 1) + 4) + 4
    manager = OneStepOffAgentLoopManager([workers[0]] * n)

    async def scenario() -> RolloutBatch:
        pending = manager.generate_sequences_async(batch_of([[i] for i in range(n)], sampling_params={"waits": True}))
        await until(lambda: len(list(notes.iterdir())) == n)
        await asyncio.wait_for(asyncio.to_thread((notes / "go").touch), 60)
        return await asyncio.wait_for(pending, 60)

    assert len(asyncio.run(scenario())) == n


def test_a_sample_that_raises_is_named_with_its_worker(idle: Any) -> None:
    """The error says which worker, which samples, which one failed and why."""
    workers, _ = idle
    prompts = batch_of([[1]] * 4, sampling_params={"raises": ["s3"]})
    with pytest.raises(RuntimeError, match=r"worker 2 with 1 sample \(s3\) failed: sample s3: KeyError: 'no such thing'"):
        AgentLoopManager(workers).generate_sequences(prompts)


def test_of_what_a_server_raised_the_cause_is_named(ray: Any) -> None:
    """Ray's own error would quote the server's traceback before it comes to that."""

    async def run(sampling_params: dict, **sample: Any) -> Any:
        raise RayTaskError("generate", "Traceback (most recent call last):\n ...\nKeyError: 'b'", KeyError("b"))

    from ray.exceptions import RayTaskError

    worker = AgentLoopWorker(lambda: SimpleNamespace(run=run))
    with pytest.raises(RuntimeError, match=r"^sample s0: KeyError: 'b'$"):
        asyncio.run(worker.generate_sequences(batch_of([[1]])))


def test_the_siblings_of_a_sample_that_raises_end_with_it(idle: Any) -> None:
    """No one waits for them any more."""
    workers, notes = idle
    fresh(notes)
    prompts = batch_of([[1]] * 3, sampling_params={"raises": ["s0"], "waits": True})
    with pytest.raises(RuntimeError, match="sample s0"):
        AgentLoopManager(workers[:1]).generate_sequences(prompts)
    asyncio.run(until(lambda: {path.name for path in notes.glob("cancelled *")} == {"cancelled s1", "cancelled s2"}))


@pytest.mark.parametrize("n", [1, 3])
def test_a_sample_brings_its_own_seed(idle: Any, n: int) -> None:
    """Over however many workers: one made of its place would be another there, and the same in each batch."""
    workers, _ = idle
    batch = batch_of([[i] for i in range(4)], sampling_params={"temperature": 1.0}).with_columns(seed=[7, 9, 8, 10])
    rollouts = AgentLoopManager(workers[:n]).generate_sequences(batch)
    assert rollouts["drawn_with"].tolist() == rollouts["seed"].tolist() == [7, 9, 8, 10]


def test_what_was_generated_replaces_what_was_handed_in(idle: Any) -> None:
    """A response that was cut comes back with more tokens and another end; the rest of its sample stays."""
    workers, _ = idle
    manager = OneStepOffAgentLoopManager(workers)
    old = {"response_ids": Ragged.pack([[9], [9]], np.int32), "stop_reason": ["abort"] * 2, "place": [-7] * 2}
    cut = batch_of([[1, 2], [3]]).with_columns(**old, ground_truth=["a", "b"])

    async def scenario() -> list[RolloutBatch]:
        return [await manager.generate_groups([cut])[0], await manager.generate_sequences_async(cut)]

    for again in asyncio.run(scenario()):
        assert [row.tolist() for row in again["response_ids"].rows()] == [[1, 2], [3]]
        assert again["stop_reason"].tolist() == ["stop"] * 2 and again["place"].tolist() == [0, 1]
        assert again["ground_truth"].tolist() == ["a", "b"]


def test_ray_maps_a_batch_without_copying_it(ray: Any) -> None:
    """The arrays that come out of the object store are views of it, which no one may write to."""
    batch = ray.get(ray.put(batch_of([[i] * 1000 for i in range(9)])))
    values = batch["prompt_ids"].values
    assert not values.flags.owndata and not values.flags.writeable and values.base is not None


def test_what_a_worker_need_not_send_back_stays_with_the_manager(ray: Any, idle: Any) -> None:
    """Chats are dear to move: they go there, and only what is new comes back, with the names of its samples. A worker that
    answers for others is an error, and no batch of strangers."""
    workers, _ = idle
    batch = batch_of([[1], [2, 2]]).with_columns(raw_prompt=[[{"role": "user", "content": "x"}]] * 2)
    new = ray.get(workers[0].generate_sequences.remote(batch, new_columns_only=True))
    assert new.columns.keys() == {"uid", *TOKEN_COLUMNS, "stop_reason", "place", "size", "drawn_with"}
    assert new.meta_info.keys() == {"metrics"}, "a copy that has travelled may differ from itself, as nan does"
    odd = batch_of([[1], [2, 2]], threshold=float("nan"))
    assert math.isnan(AgentLoopManager(workers).generate_sequences(odd).meta_info["threshold"])
    whole = ray.get(workers[0].generate_sequences.remote(batch))
    assert whole.columns.keys() == new.columns.keys() | {"raw_prompt"}
    rollouts = AgentLoopManager(workers[:1]).generate_sequences(batch)
    assert rollouts.columns.keys() == whole.columns.keys() and list(rollouts["raw_prompt"]) == list(batch["raw_prompt"])
    confused = SimpleNamespace(remote=lambda chunk, **_: ray.put(new[::-1]))
    with pytest.raises(RuntimeError, match=r"worker 0 with 2 samples \(s0, s1\) answered for other samples: \['s1', 's0'\]"):
        AgentLoopManager([SimpleNamespace(generate_sequences=confused)]).generate_sequences(batch)


def test_a_timeout_names_who_did_not_answer(idle: Any) -> None:
    """A worker that does not answer in time is named, and its work is cancelled, so that nothing holds up the exit."""
    workers, notes = idle
    fresh(notes)
    with pytest.raises(TimeoutError, match=r"worker 0 with 1 sample \(s0\) did not answer within 1 s"):
        AgentLoopManager(workers, timeout_s=1).generate_sequences(batch_of([[1]], sampling_params={"waits": True}))
    asyncio.run(until((notes / "cancelled s0").exists))


def test_cancelling_the_waiter_cancels_the_work(idle: Any) -> None:
    """A cancelled batch ends on the workers too: the threads that waited for it come back."""
    workers, notes = idle
    fresh(notes)
    manager = OneStepOffAgentLoopManager(workers)

    async def scenario() -> None:
        pending = manager.generate_sequences_async(batch_of([[1]] * 3, sampling_params={"waits": True}))
        await until(lambda: len(list(notes.iterdir())) == 3)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        # "go" was never given: threads that still waited for the workers would hold this up for ever.
        await asyncio.wait_for(asyncio.to_thread(manager._threads.shutdown, True), 60)
        await until(lambda: len(list(notes.glob("cancelled *"))) == 3)

    asyncio.run(scenario())


def test_who_cancels_at_once_cancels_the_work_too(idle: Any) -> None:
    """Before the event loop has had a turn: the work is under way, and no one has begun to wait for it."""
    workers, notes = idle
    fresh(notes)
    manager = OneStepOffAgentLoopManager(workers)

    async def scenario() -> None:
        batch = batch_of([[1]] * 3, sampling_params={"waits": True})
        pending = [
            manager.generate_sequences_async(batch),
            *manager.generate_groups([batch_of([[1]], sampling_params={"waits": True}).with_columns(uid=["g0"])]),
        ]
        end = time.monotonic() + 60
        while len(list(notes.glob("[sg]?-*"))) < 4:
            assert time.monotonic() < end, "nothing was dispatched"
            time.sleep(0.01)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        assert all(task.cancelled() for task in pending)
        await until(lambda: len(list(notes.glob("cancelled *"))) == 4)

    asyncio.run(scenario())


def test_groups_come_back_one_by_one_and_those_that_were_cut_go_on(idle: Any) -> None:
    """A fresh group, one that was cut and one that is finished: each is an awaitable of its own. To the servers all of them are
    one batch, in which each response that they are asked for has a place, and no other; so is a whole batch sent in again."""
    workers, notes = idle
    fresh(notes)
    manager = OneStepOffAgentLoopManager(workers)
    fresh_one, cut, finished = (batch_of([[i], [i, i]], which=i) for i in range(3))
    cut = cut.with_columns(stop_reason=["stop", "abort"])
    finished = finished.with_columns(stop_reason=["stop", "length"])

    async def scenario() -> tuple[list[RolloutBatch], RolloutBatch]:
        groups = await asyncio.gather(*manager.generate_groups([fresh_one, cut, finished]))
        return groups, await manager.generate_sequences_async(RolloutBatch(cut.columns))

    groups, again = asyncio.run(scenario())
    for i, group in enumerate(groups):
        assert [row.tolist() for row in group["response_ids"].rows()] == [[i], [i, i]]
        assert group.meta_info.pop("timing") and group.meta_info == {"which": i} and "index" not in group
    assert [group["place"].tolist() for group in groups] == [[0, 1], [-1, 2], [-1, -1]]
    assert [group["size"].tolist() for group in groups] == [[3, 3], [0, 3], [0, 0]]
    assert again["place"].tolist() == [-1, 0] and again["size"].tolist() == [0, 1]
    own = batch_of([[1]], batch_size=7).with_columns(index=[5])  # names that others use, as verl does
    mine = manager.generate_sequences(own)
    assert mine["index"].tolist() == [5] and mine.meta_info["batch_size"] == 7 and mine["place"].tolist() == [0]
    late = OneStepOffAgentLoopManager(workers, timeout_s=1)
    with pytest.raises(TimeoutError, match=r"worker 1 with 2 samples \(s0, s1\) did not answer within 1 s"):
        asyncio.run(_await(lambda: late.generate_groups([fresh_one, batch_of([[1], [2]], sampling_params={"waits": True})])[1]))


def test_the_chunk_of_a_worker_that_dies_is_generated_by_another(
    ray: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker killed in the middle of a batch: the batch is complete, in order, each sample once; the log says who died."""
    manager = AgentLoopManager(start_workers(ray, tmp_path, 2))
    rows = [[i] for i in range(5)]
    rollouts = manager.generate_sequences(batch_of(rows, sampling_params={"kills_once": ["s4"]}))
    assert rows_of(rollouts) == rows_of(batch_of(rows))
    assert rollouts["place"].tolist() == [0, 1, 2, 3, 4], "a server that waits for the batch would not know them"
    assert "worker 1 with 2 samples (s3, s4) died; worker 0 generates them again" in caplog.text


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_has_died_gets_no_work_until_it_is_up_again(ray: Any, tmp_path: Path, restarts: int) -> None:
    """A server takes a batch whole, so that the requests of the living would wait for those of the dead: every sample after the
    one batch has its place in it."""
    actor = ray.remote(num_cpus=0, max_concurrency=100, max_restarts=restarts)(AgentLoopWorker)
    manager = OneStepOffAgentLoopManager([actor.remote(lambda: Loop(tmp_path)) for _ in range(2)])
    batch = batch_of([[i] for i in range(4)], sampling_params={"kills_once": ["s3"]})

    async def batches() -> None:
        await manager.generate_sequences_async(batch)
        for _ in range(2):
            rollouts = await manager.generate_sequences_async(batch)
            groups = await asyncio.gather(*manager.generate_groups([batch[:2], batch[2:]]))
            assert [*rollouts["place"], *(place for group in groups for place in group["place"])] == [0, 1, 2, 3, 0, 1, 2, 3]
            if restarts:
                await until(lambda: not manager._down)
        fresh(tmp_path)
        (tmp_path / "killed").touch()
        await manager.generate_sequences_async(batch)

    asyncio.run(batches())
    assert len({path.name.split("-")[1] for path in tmp_path.glob("s*-*")}) == 1 + restarts, "how many workers had work"
    assert manager._down == (set() if restarts else {1})


@pytest.mark.parametrize("restarts", [(1, 0), (0, 1)])
def test_a_worker_that_comes_back_is_waited_for_when_the_other_is_gone_for_good(
    ray: Any, tmp_path: Path, restarts: tuple[int, int]
) -> None:
    """Both die with their samples in hand, and only one of them is started again: it generates those of both."""
    actors = [ray.remote(num_cpus=0, max_concurrency=100, max_restarts=n)(AgentLoopWorker) for n in restarts]
    manager = AgentLoopManager([actor.remote(lambda: Loop(tmp_path)) for actor in actors])
    rows = [[i] for i in range(4)]
    rollouts = manager.generate_sequences(batch_of(rows, sampling_params={"kills": ["s0", "s3"]}))
    assert rows_of(rollouts) == rows_of(batch_of(rows))


def test_the_death_of_the_only_worker_says_what_was_lost(ray: Any, tmp_path: Path) -> None:
    """With no one left to take over, the error names the worker and its samples."""
    manager = AgentLoopManager(start_workers(ray, tmp_path, 1))
    with pytest.raises(RuntimeError, match=r"worker 0 with 2 samples \(s0, s1\) died, and no other worker is left"):
        manager.generate_sequences(batch_of([[1], [2]], sampling_params={"kills_once": ["s0"]}))


def test_replicas_are_told_all_at_once(ray: Any) -> None:
    """Each call reaches every replica before any has answered, and one's error is raised."""

    @ray.remote(num_cpus=0)
    class Replica:
        def __init__(self, notes: Path, number: int) -> None:
            self.notes, self.number = notes, number

        async def told(self, what: str) -> None:
            """Waits until the other one is told as well."""
            (self.notes / f"{what} {self.number}").touch()
            await until(lambda: (self.notes / f"{what} {1 - self.number}").exists(), limit_s=20)

        async def cancel(self) -> None:
            await self.told("cancel")

        async def resume(self) -> None:
            await self.told("resume")

        async def sleep(self, level: int = 1) -> None:
            await self.told(f"sleep {level}")

        async def wake_up(self) -> None:
            await self.told("wake_up")

        async def clear_kv_cache(self) -> None:
            raise RuntimeError("refused")

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        manager = OneStepOffAgentLoopManager([object()], [Replica.remote(Path(folder), i) for i in range(2)])

        async def scenario() -> None:
            for call in (manager.cancel(), manager.resume(), manager.sleep(), manager.sleep(2), manager.wake_up()):
                await call
            with pytest.raises(RuntimeError, match="refused"):
                await manager.clear_kv_cache()

        asyncio.run(scenario())
        calls = ("cancel", "resume", "sleep 1", "sleep 2", "wake_up")
        assert {path.name for path in Path(folder).iterdir()} == {f"{call} {i}" for call in calls for i in range(2)}


def test_integers_that_no_column_can_hold_are_refused() -> None:
    """numpy would make floats of them, and give two seeds one value: twins."""
    with pytest.raises(ValueError, match=r"5 and 9223372036854775811 have no integer type in common"):
        RolloutBatch({"seed": [5, 2**63 + 3]})
    assert RolloutBatch({"seed": [2**63 + 3]})[0] == {"seed": 2**63 + 3}
    assert RolloutBatch({"reward": [1, 0.5]})["reward"].tolist() == [1, 0.5]


def test_preemptions_that_a_loop_does_not_count_are_unknown_and_not_none() -> None:
    """-1, as in verl, for samples of a loop that does not say; the others' figures stand."""
    figures = {"generate_sequences": [1.0, 3.0], "prompt_length": [5.0, 4.0], "response_length": [8.0, 9.0]}
    figures = {name: np.array(values) for name, values in figures.items()}
    timing = one_step_off._timing([figures | {"num_preempted": np.array([np.nan, 4.0])}, {}, figures])
    assert {name.removeprefix("agent_loop/"): value for name, value in timing.items()} == {
        "generate_sequences/min": 1, "generate_sequences/max": 3, "generate_sequences/mean": 2,
        "slowest/generate_sequences": 3, "slowest/prompt_length": 4, "slowest/response_length": 9,
        "num_preempted/min": -1, "num_preempted/max": 4, "num_preempted/mean": 0.25,
    }  # fmt: skip
    assert one_step_off._timing([{}]) == {}


def test_a_manager_without_workers_is_refused() -> None:
    """No workers, no manager."""
    with pytest.raises(ValueError, match="at least one worker"):
        AgentLoopManager([])


# ---- The file as a tutorial ------------------------------------------------------------------------------------------


def test_the_docstring_examples_are_true() -> None:
    """What the documentation shows is what the code does."""
    result = doctest.testmod(one_step_off)
    assert result.attempted and not result.failed


def test_the_file_works_alone(tmp_path: Path) -> None:
    """Copied into an empty folder it runs its demo: nothing of the rest of the project is needed."""
    alone = tmp_path / "one_step_off.py"
    alone.write_text(Path(one_step_off.__file__).read_text())
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, alone.name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "abcdefg" in done.stdout
