"""Accelerate's loaders: the one within has the position, or has none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckpt
from ckpt.trainer.state.loaders import find_inexactness, find_position, read_loader_state
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen
from tests.trainer.state.test_loaders import BATCH, CUTS, PER_EPOCH, SAMPLES, STEPS, endless, own

accelerate = pytest.importorskip("accelerate.data_loader")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own


def prepared(loader: DataLoader[Any], stateful: bool = True, **options: Any) -> Any:
    """As `Accelerator.prepare` makes it, of a process of its own."""
    return accelerate.prepare_data_loader(
        loader, device=torch.device("cpu"), put_on_device=True, use_stateful_dataloader=stateful, **options
    )


def torchdata(**options: Any) -> Any:
    return StatefulDataLoader(SAMPLES, batch_size=BATCH, sampler=RandomSampler(SAMPLES), generator=own(), **options)


KINDS: dict[str, Callable[[], Any]] = {
    "in order": lambda: prepared(DataLoader(SAMPLES, batch_size=BATCH, generator=own())),
    "dispatched": lambda: prepared(torchdata(), dispatch_batches=True),
    "torch's sampler": lambda: prepared(DataLoader(SAMPLES, batch_size=BATCH, shuffle=True, generator=own())),
    "accelerate's sampler": lambda: prepared(
        DataLoader(SAMPLES, batch_size=BATCH, shuffle=True, generator=own()), use_seedable_sampler=True
    ),
    "torchdata's sampler": lambda: prepared(torchdata()),
    "torchdata's sampler, a worker": lambda: prepared(torchdata(num_workers=1)),
}


def restarted(make: Callable[[], Any], *cuts: int) -> list[list[int]]:
    """The samples of each step of a run that is restarted behind each of these steps."""
    torch.manual_seed(1)
    found: list[list[int]] = []
    state = None
    for cut in (*cuts, STEPS):
        made = make()
        if state is not None:
            made.load_state_dict(state)
            assert read_loader_state(made) == state, "a save that comes before the next batch"
        drawn = endless(made)
        found += [sorted(next(drawn).tolist()) for _ in range(cut - len(found))]
        state = read_loader_state(made)
        drawn.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_an_accelerate_loader_is_what_a_restart_does_to_it(kind: str) -> None:
    make = KINDS[kind]
    found = [restarted(make, cut) for cut in CUTS]
    whole = all(sorted(chain(*run[at : at + PER_EPOCH])) == SAMPLES for run in found for at in (0, PER_EPOCH))
    assert ("repeats some samples" in find_inexactness(make())) == (not whole)
    if not find_inexactness(make()).count("sampler"):
        assert all(run == restarted(make) for run in found)


def test_with_its_epoch_from_the_state_accelerates_sampler_goes_on() -> None:
    def start(epoch: int, steps: int, state: Any = None) -> tuple[list[list[int]], int, Any]:
        made = KINDS["accelerate's sampler"]()
        if state is not None:
            made.load_state_dict(state)
        found: list[list[int]] = []
        while True:
            made.set_epoch(epoch)
            for batch in made:
                found.append(batch.tolist())
                epoch += made.end_of_dataloader
                if len(found) == steps:
                    return found, epoch, read_loader_state(made)

    undisturbed, _, _ = start(0, STEPS)
    for cut in CUTS:
        before, epoch, state = start(0, cut)
        assert before + start(epoch, STEPS - cut, state)[0] == undisturbed


@pytest.mark.parametrize("kind", ["dispatched", "torchdata's sampler"])
def test_an_accelerate_loader_stands_at_what_it_has_handed_out(kind: str) -> None:
    made = KINDS[kind]()
    drawn = iter(made)
    for count in range(1, 4):
        next(drawn)
        stands = find_position(made)
        assert stands is not None
        assert (stands.batches, stands.is_at_end) == (count, False)
    drawn.close()


@pytest.mark.parametrize("dispatched", [False, True])
def test_an_accelerate_loader_without_a_position_is_refused_on_entry(dispatched: bool, tmp_path: Path) -> None:
    made = prepared(DataLoader(SAMPLES, batch_size=BATCH), stateful=False, dispatch_batches=dispatched)
    kind = "DataLoaderDispatcher" if dispatched else "DataLoaderShard"
    refused = f"'loader'.* is a {kind} over a torch DataLoader.*use_stateful_dataloader=True"
    with (
        pytest.raises(ckpt.UsageError, match=refused),
        ckpt.Checkpointer(tmp_path, {"loader": made, "model": torch.nn.Linear(1, 1)}),
    ):
        pass


@pytest.mark.parametrize(("late", "names"), [(True, ["epoch.repeated"]), (False, [])])
def test_of_an_accelerate_loader_only_an_epoch_counted_late_is_named(
    late: bool, names: list[str], tmp_path: Path
) -> None:
    """Behind the last batch it stands in the next epoch; and it draws a batch ahead, which is no fault."""
    seen = Seen()
    model = torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    made = KINDS["torchdata's sampler"]()
    state = {"model": model, "optim": optim, "loader": made, "epoch": 0}
    with ckpt.Checkpointer(tmp_path, state, sinks=(seen,)) as ck:
        while ck.state["epoch"] < 4:
            for _ in made:
                model(torch.ones(1)).sum().backward()
                optim.step()
                optim.zero_grad()
                if not late and made.end_of_dataloader:
                    ck.state["epoch"] += 1
                ck.step()
            if late:
                ck.state["epoch"] += 1
    wait_agent_gone(tmp_path)
    assert [event.name for event in seen.events if event.name.startswith(("loader.", "epoch."))] == names
