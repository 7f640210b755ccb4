"""Kept so that `import monarch.tensor_engine` works; its names moved to `monarch.rdma`."""
