"""The agent as a whole: it handles messages, runs starts, keeps this node's memory, and decides when its work is done.

It is the top package of the agent and may import all the others. Start reading at agent.py (messages and the end), then
startup.py (how a start chooses its checkpoint); memory_node.py is the agent of a node without ranks.
"""
