"""The handlers of messages that ask about the store or the agent as a whole: of `ckpt watch` and `ckpt prune`, and of
a trainer that lost its agent."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgpack

from ckpt.agent.commit.job_options import keep_from
from ckpt.agent.commit.store_client import PrunePass
from ckpt.agent.job.job import Job
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.errors import RunInUse
from ckpt.ipc.messages import Message
from ckpt.storage.names import redact_url
from ckpt.types import Identity


class ToolHandlers:
    """Main thread only."""

    def __init__(self, context: NodeContext) -> None:
        self._context, self._jobs = context, context.jobs

    def send_status(self, peer: Peer, message: Message) -> None:
        # A blob, since the status grows with the job.
        peer.reply(int(message.fields["id"]), {}, blobs=[msgpack.packb(self._context.status())])

    def answer_stored(self, peer: Peer, message: Message) -> None:
        """Answers whether a checkpoint is in the store, whoever put it there. The rank need not have joined."""
        request_id, wanted = int(message.fields["id"]), Identity.parse(str(message.fields["identity"]))
        store = self._context.store

        def is_stored() -> bool:
            return any(ref.identity == wanted for ref in store.open_run(impatient=True).view().commits)

        def looked(done: Future[bool]) -> None:
            peer.reply(request_id, {"stored": not failure(done) and done.result()})

        self._context.workers.run(Lane.FRONT, is_stored, looked)

    def prune(self, peer: Peer, message: Message) -> None:
        """Deletes old checkpoints, or tells which would be deleted. Errors: RunInUse; UsageError."""
        fields, job, store = message.fields, self._jobs.current, self._context.store
        request_id, rule = int(fields["id"]), keep_from(fields.get("keep") or {}, "keep")
        also = [Identity.parse(str(text)) for text in fields.get("also") or []]
        epoch = job.epoch if job is not None and store.is_claimed(job.epoch) else None
        what = PrunePass.ALL if fields["yes"] else PrunePass.REPORT
        if what is PrunePass.ALL:
            self._refuse_if_follower(job)

        def pruned(done: Future[dict[str, Any]]) -> None:
            error = done.exception()
            if error is not None:
                peer.refuse(request_id, error)
            else:
                # A blob, since the result grows with the run.
                peer.reply(request_id, {}, blobs=[msgpack.packb(done.result())])

        # A prune that only looks does not wait for a commit.
        lane = Lane.FRONT if what is PrunePass.REPORT else Lane.COMMIT
        self._context.workers.run(lane, lambda: store.prune(epoch, rule, also, what), pruned)

    def _refuse_if_follower(self, job: Job | None) -> None:
        """Errors: RunInUse if another node coordinates the newest job here: its agent decides what is deleted."""
        needed = [each for each in self._jobs.followed if each.is_needed]
        led = max(needed, key=lambda each: each.epoch, default=None)
        if led is not None and (job is None or led.epoch > job.epoch):
            raise RunInUse(
                f"{redact_url(self._context.url)} is in use: its epoch {led.epoch} is coordinated by agent "
                f"{led.coordinator.name}, which alone decides what goes. Run ckpt prune on that node"
            )
