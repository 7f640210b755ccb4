"""The node of a process: mailboxes and ports, executors that run actors, hosts that start and watch processes.

This layer knows nothing of meshes as users see them; `monarch.actor` is built on it.
"""
