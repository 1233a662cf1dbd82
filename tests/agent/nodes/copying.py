"""What a coordinator's state machine makes of copies that are on their way, in tests that play the agents around it."""

from __future__ import annotations

from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.slots import AttemptTimes, SaveAttempt, SaveReason
from ckpt.types import Identity


class Copying:
    """One checkpoint after the other. Its word is that of `elsewhere.Elsewhere`: whatever ends well there is safe."""

    def __init__(self) -> None:
        self._facts = JobFacts(1)
        self._replicas = ReplicaState(self._facts)

    def begin(self, identity: Identity) -> None:
        attempt = self._facts.slots[0].attempt = SaveAttempt(
            1, 0, SaveReason.STEP, identity.version, "", AttemptTimes(0.0)
        )
        self._replicas.begin_replication(attempt)

    def lost(self) -> None:
        """An agent is not connected any more."""
        self._replicas.record_lost_holder("b", self._replicas.peer_versions)

    def ended(self, error: str) -> str:
        """Why it is not safe; "": it is."""
        return self._replicas.record_replication(0, error, 0.0)
