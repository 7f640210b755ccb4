"""How bytes travel: pickling, frames, addresses, connections, shared-memory segments.

This layer knows nothing of actors or meshes; it moves frames between two processes that trust each other.
"""
