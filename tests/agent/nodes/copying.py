"""What a coordinator's state machine makes of copies that are on their way, in tests that play the agents around it."""

from __future__ import annotations

from ckpt.agent.state.job_facts import SaveAttempt, SaveReason
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.policy.save_options import Every
from ckpt.types import Identity


class Copying:
    """One checkpoint after the other. Its word is that of `elsewhere.Elsewhere`: whatever ends well there is safe."""

    def __init__(self) -> None:
        self._facts = ReplicaState(1, Every(seconds=1.0))

    def begin(self, identity: Identity) -> None:
        attempt = self._facts.slots[0].attempt = SaveAttempt(1, 0, SaveReason.STEP, identity.version, "", 0.0)
        self._facts.begin_replication(attempt)

    def lost(self) -> None:
        """An agent is not connected any more."""
        self._facts.record_lost_holder("b", self._facts.peer_versions)

    def ended(self, error: str) -> str:
        """Why it is not safe; "": it is."""
        return self._facts.record_replication(0, error, 0.0)
