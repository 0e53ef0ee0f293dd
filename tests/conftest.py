"""The order of the files: the longest first, which keeps both test processes busy to the end."""

import pytest

FIRST = ["test_runs.py", "test_run_gsm8k.py", "test_trainer.py", "test_partial_rollout.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
