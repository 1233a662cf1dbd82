"""The agent: the process, one per user, node and store URL, that owns arenas, replicates, commits and serves restores.

It never imports torch. It is a process of its own, so that the newest checkpoint survives a trainer's crash. Each of
its packages imports only those below it (tests/test_layers.py). Start reading at node/agent.py. From top to bottom:

- node: the agent as a whole: messages, starts, memory, the end; entry points; memory-only nodes
- observability: status, metrics page, file of events
- adaptive: what the agent learns from failures and predictions, and does about them
- job: one job: its scheduler, its commits, and its ranks on other nodes
- commit: commits to the store, also by several nodes, and of orphaned checkpoints
- restore: the frames of a restore, from this host, peers, parity or the store
- replication: replicas and parity: placement, transfer, eviction, rebuild
- snapshots: the snapshots in arenas, the checkpoints they make up, and the inventory of nodes
- net: connections and transfers between agents
- preemption: notices, and how a job leaves before a deadline
- state: facts and pure decisions about a job
- runtime: the event loop, worker threads, memory figures, process priority
"""
