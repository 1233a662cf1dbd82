"""The arenas of one job's slots: the division that they are made for, their sizes, how many memory allows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.agent.state.slots import JobSlots, Slot
from ckpt.ipc.control_page import SLOTS_MAX

ARENA_SLACK_PARTS = 16  # an arena that is too large by one part in so many is kept


@dataclass(eq=False)
class Arenas:
    """The arenas of a job."""

    _world: int
    _slots: JobSlots
    division: str = ""
    slot_limit: int = 0  # the number of slots that memory allows; 0 until the first division
    refusal_reason: str = ""  # why nothing can be saved
    layouts_version: int = 0  # rises with each change of a rank's layout
    is_dividing: bool = False
    needed_bytes: tuple[int, ...] = ()  # arena bytes per rank under the current division
    _divided_layouts_version: int = 0

    # -- facts

    def record_layout(self) -> None:
        """A rank's state has another structure, or needs larger arenas: a new division is due, and saves wait."""
        self.layouts_version += 1
        self.refusal_reason = ""

    def record_division(self, layouts_version: int, division: str, arena_bytes: tuple[int, ...], slots: int) -> bool:
        """Outcome of `Divide`: the division of the layouts of that version. `slots`: the number that fits into memory.
        Returns whether the division is current: then send each rank its part; else another one is made."""
        self.is_dividing = False
        if layouts_version != self.layouts_version:
            return False
        self._divided_layouts_version = layouts_version
        self.division = division
        self.needed_bytes = arena_bytes
        for slot in self._slots:
            slot.is_offered = False
            slot.warm_ranks.clear()
            self.set_arenas(slot, slot.arena_bytes)
        self.slot_limit = slots
        self.refusal_reason = (
            "" if slots else "not one arena fits into memory: free some, save less, or raise Limits(memory=)"
        )
        return True

    def record_division_failure(self, layouts_version: int, message: str) -> None:
        """Outcome of `Divide`: there is no division. `message`: the reason, for ranks that ask to save."""
        self.is_dividing = False
        if layouts_version != self.layouts_version:
            return
        self._divided_layouts_version = layouts_version
        self.division = ""
        self.refusal_reason = message

    def record_arenas(self, slot: int, arena_bytes: tuple[int, ...]) -> None:
        """Outcome of `MakeArenas`: the sizes by rank; () if it failed: then call `limit_slots` before."""
        entry = self._slots[slot]
        entry.is_making_arenas = entry.is_offered = False
        self.set_arenas(entry, arena_bytes)
        entry.is_handed_out |= bool(arena_bytes)

    def record_lost_arenas(self, slot: int) -> None:
        """A node lost its arenas of that slot. All arenas of the slot are made anew once the slot is free."""
        entry = self._slots[slot]
        entry.is_offered = False
        if entry.attempt is None and not entry.leases:
            self.set_arenas(entry, ())

    def set_arenas(self, slot: Slot, arena_bytes: tuple[int, ...]) -> None:
        """The slot has arenas of these sizes by rank. They fit if they are large enough but not too large: the excess
        would never be freed. There may be thousands of ranks, and each decision asks."""
        has, need = arena_bytes, self.needed_bytes
        is_whole = len(has) == len(need) == self._world
        slot.arena_bytes = arena_bytes
        slot.has_fitting_arenas = is_whole and all(
            least <= size <= least + least // ARENA_SLACK_PARTS for size, least in zip(has, need, strict=True)
        )

    def record_warm_arena(self, rank: int, slot: int, division: str) -> None:
        """The rank has mapped its arena of this slot, and bound it for this division."""
        if 0 <= slot < SLOTS_MAX and not self._slots[slot].is_making_arenas and division == self.division:
            self._slots[slot].warm_ranks.add(rank)

    def limit_slots(self, slots: int, message: str) -> None:
        """Memory allows at most `slots` slots. `message`: the reason to refuse saves if that is none."""
        self.slot_limit = min(self.slot_limit, slots)
        if not self.slot_limit:
            self.refusal_reason = message

    def raise_slot_limit(self, slots: int) -> None:
        """Memory now allows `slots` slots. Ignored if there are as many, or if there is no current division."""
        if slots > self.slot_limit and self.has_division:
            self.slot_limit, self.refusal_reason = slots, ""

    # -- queries

    @property
    def is_division_due(self) -> bool:
        """Whether the ranks' layouts have changed since the last division."""
        return self._divided_layouts_version != self.layouts_version

    @property
    def has_division(self) -> bool:
        """Whether there is a division of the ranks' present layouts."""
        return bool(self.division) and not self.is_division_due

    @property
    def slots_by_use(self) -> list[Slot]:
        """The slots, first those that hold something, then those with arenas. The last ones are closed first."""
        return sorted(
            self._slots,
            key=lambda slot: (
                slot.attempt is None and not slot.leases,
                not (slot.arena_bytes or slot.is_making_arenas),
                slot.number,
            ),
        )

    @property
    def used_slots(self) -> list[Slot]:
        """The slots in use: as many as memory allows."""
        return self.slots_by_use[: self.slot_limit]

    @property
    def usable_slot_count(self) -> int:
        """The number of slots in use that have fitting arenas or hold a snapshot."""
        return sum(slot.attempt is not None or slot.has_fitting_arenas for slot in self.used_slots)

    def needs_arenas(self, slot: int, arena_bytes: tuple[int, ...]) -> bool:
        """Whether that slot is in use, and needs arenas of exactly these sizes."""
        return self._slots[slot] in self.used_slots and arena_bytes == self.needed_bytes

    def check(self) -> None:
        """Asserts the invariants of divisions and arenas."""
        assert self._divided_layouts_version <= self.layouts_version
        assert sum(slot.is_making_arenas for slot in self._slots) <= 1, "arenas of two slots are made at once"
        for slot in self._slots:
            assert not slot.arena_bytes or slot.is_handed_out, f"slot {slot.number} has arenas that nobody would close"
