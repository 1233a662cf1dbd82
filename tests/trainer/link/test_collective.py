"""What the ranks tell each other when they enter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.trainer.link.collective import TorchGroup, open_group


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("data", [b"", b"what a rank has to say"])
def test_the_default_device_of_the_user_does_not_matter(alone: None, data: bytes) -> None:
    with torch.device("meta"):
        assert TorchGroup(None, Events()).gather(data) == [data]


@pytest.mark.parametrize("given", [dist.GroupMember.NON_GROUP_MEMBER, [0]])
def test_a_group_that_this_rank_is_not_in_is_refused_in_words(alone: None, given: Any) -> None:
    """torch gives the former to ranks that are not in a new group."""
    with pytest.raises(UsageError, match="on rank 0: a torch ProcessGroup that this rank is in"):
        open_group(given, Events())
