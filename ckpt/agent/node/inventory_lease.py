"""Whose word has something dropped here, while starts ask what lies here and after that. Pure: no clock of its own.

- From the answer to a start's question until its outcome nothing of what was listed goes: words of every epoch that
  was known then are refused, those of this agent's own jobs among them.
- Once the start has begun its epoch, that one decides, and words of older epochs are refused for good. So are starts
  that asked before it.
- A node that commits what a job has left asks as a start does, and begins nothing. It gives way to every start: where
  one has asked it is refused, and once one does nothing waits for its outcome any more.
- A start that comes to nothing says so. One whose coordinator has not been connected for BOUND_S is taken for over:
  then the words of the epochs before it count again. Nothing is freed by that.
- What has begun, be it nowhere in the store, is an epoch that is known here: the next start takes a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import AgentError
from ckpt.types import HERE, Epoch

BOUND_S = 60.0  # its connection is known to be gone up to 25 s late, and from then on it fetches nothing from here
UNHEARD_MAX = 10_000  # starts of the run, one after the other, that a node may have heard nothing of


@dataclass(slots=True)
class _Asked:
    """`newest`: the newest epoch that was known here then. `left`: for what a job has left, and not for a start.
    `lost_s`: since when who asked is not connected."""

    newest: Epoch
    left: bool
    lost_s: float | None = None


class InventoryLease:
    """Agents are called by their names, this one HERE."""

    def __init__(self) -> None:
        self.floor = Epoch(0, "0" * 16)  # words of older epochs decide nothing any more
        self._asked: dict[str, _Asked] = {}  # the one that asked last is last

    def asked(self, by: str, newest: Epoch, left: bool = False) -> None:
        """A start that this agent coordinates is told what lies here; `newest`: of all epochs that are known here.
        `left`: no start, but what a job has left. Errors: AgentError where that has to give way."""
        starts = {name: each for name, each in self._asked.items() if not each.left}
        if left and starts:
            raise AgentError("a start has asked what lies here, and its outcome is not known")
        self._asked = self._asked if left else starts
        self._asked.pop(by, None)
        self._asked[by] = _Asked(newest, left)

    def has_asked(self, by: str) -> bool:
        """Whether a start of it waits for its outcome."""
        return by in self._asked

    def begun(self, by: str, epoch: Epoch) -> bool:
        """Its start has begun that epoch. False where it has not asked: then that says nothing."""
        if by not in self._asked or epoch <= self._asked[by].newest:
            return False
        names = list(self._asked)
        for name in names[: names.index(by) + 1]:
            del self._asked[name]
        self.floor = max(self.floor, epoch)
        return True

    def over(self, by: str) -> None:
        """Its start has come to nothing."""
        self._asked.pop(by, None)

    def lost(self, by: str, now_s: float) -> None:
        """It is not connected any more."""
        if by in self._asked and self._asked[by].lost_s is None:
            self._asked[by].lost_s = now_s

    def heard(self, by: str) -> None:
        """It is connected."""
        if by in self._asked:
            self._asked[by].lost_s = None

    def stands(self, now_s: float) -> bool:
        """Whether some start waits for its outcome."""
        for name, each in list(self._asked.items()):
            if each.lost_s is not None and now_s >= each.lost_s + BOUND_S:
                del self._asked[name]
        return bool(self._asked)

    def until_s(self) -> float | None:
        """When a start is taken for over next; None: none is, as things are."""
        return min((each.lost_s + BOUND_S for each in self._asked.values() if each.lost_s is not None), default=None)

    def refusal(self, by: str, epoch: Epoch, now_s: float) -> str:
        """Why that agent may have nothing dropped or overwritten for that epoch now; "": it may."""
        if epoch < self.floor:
            return f"{epoch} decides nothing any more: {self.floor} has begun"
        if not self.stands(now_s):
            return ""
        last, each = next(reversed(self._asked.items()))
        if by == last and epoch > each.newest:
            return ""  # what it begins
        who = f"of agent {last}" if last != HERE else "on this node"
        what = f"a start {who} has asked what lies here, and its outcome is not known"
        return f"nothing is dropped for {epoch} now: {what}"

    def check(self, by: str, epoch: Epoch, now_s: float) -> None:
        """Errors: AgentError, see `refusal`."""
        if why := self.refusal(by, epoch, now_s):
            raise AgentError(why)


class Frozen:
    """How long no snapshot could be taken of the job that is under way. `due_s`: when that is to be told; None: not as
    things are."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._what: tuple[Epoch, str] | None = None

    def is_late(self, what: tuple[Epoch, str] | None, now_s: float) -> bool:
        """Whether it is to be told now: BOUND_S have passed. `what`: of which job, and of what kind; None: of none."""
        if what != self._what:
            self._what, self.due_s = what, now_s + BOUND_S if what is not None else None
        if self.due_s is None or now_s < self.due_s:
            return False
        self.due_s = None
        return True
