"""The network between agents: authenticated control messages, and transfers of frames from memory to memory.

It may import `agent.preemption`, `agent.state`, `agent.runtime`, `ckpt.ipc` and the packages below it. Start with
`peer_network`, then `handshake` and `channel` for messages, or `transport` for frames.
"""
