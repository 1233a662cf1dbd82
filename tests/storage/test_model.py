"""Any order of operations does to a store what it does to a dict."""

from __future__ import annotations

import itertools
import shutil
import tempfile

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ckpt import storage
from ckpt.errors import AlreadyExists, DamagedData, NotFound
from ckpt.storage import PutMode

_NAMES = itertools.count()
KEYS = st.sampled_from(["a", "b-c", "d/a", "d/a-b", "d/e/f", "d.e", "x/y/z/w"])
PREFIXES = st.sampled_from(["", "d/", "d/e/", "x/", "nothing/"])


class Model(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="ckpt-model-")
        self.store = storage.open(self.url.format(folder=self.folder, n=next(_NAMES)))
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(key=KEYS, chunks=st.lists(st.binary(max_size=50), max_size=4))
    def put(self, key: str, chunks: list[bytes]) -> None:
        self.store.put(key, chunks)
        self.model[key] = b"".join(chunks)

    @rule(key=KEYS, data=st.binary(max_size=50))
    def put_if_absent(self, key: str, data: bytes) -> None:
        if key in self.model:
            with pytest.raises(AlreadyExists):
                self.store.put(key, [data], PutMode.IF_ABSENT)
        else:
            self.store.put(key, [data], PutMode.IF_ABSENT)
            self.model[key] = data

    @rule(key=KEYS, size_max=st.integers(0, 200))
    def get(self, key: str, size_max: int) -> None:
        if key not in self.model:
            with pytest.raises(NotFound):
                self.store.get(key, size_max)
        elif len(self.model[key]) > size_max:
            with pytest.raises(DamagedData):
                self.store.get(key, size_max)
        else:
            assert self.store.get(key, size_max) == self.model[key]

    @rule(key=KEYS, start=st.integers(0, 100), length=st.integers(0, 100))
    def get_range(self, key: str, start: int, length: int) -> None:
        if key not in self.model:
            with pytest.raises(NotFound):
                self.store.get_range(key, start, length)
        elif start + length > len(self.model[key]):
            with pytest.raises(DamagedData):
                self.store.get_range(key, start, length)
        else:
            assert bytes(self.store.get_range(key, start, length)) == self.model[key][start : start + length]

    @rule(keys=st.lists(KEYS, max_size=3))
    def delete(self, keys: list[str]) -> None:
        self.store.delete(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule(prefix=PREFIXES)
    def list(self, prefix: str) -> None:
        found = [(info.key, info.size) for info in self.store.list(prefix)]
        assert found == sorted((key, len(data)) for key, data in self.model.items() if key.startswith(prefix))


@pytest.mark.parametrize("url", ["{folder}/store", "memory://model-{n}", "fsspec+memory://model-{n}"])
def test_a_store_does_what_a_dict_does(url: str) -> None:
    machine = type("Machine", (Model,), {"url": url})
    run_state_machine_as_test(machine, settings=hypothesis_settings(max_examples=40, stateful_step_count=25))
