"""SPMD: launcher-style environment variables across a mesh, and running a plain script on every rank.

setup_torch_elastic_env(procs)          # RANK, WORLD_SIZE, MASTER_ADDR, ... in every process
procs.spawn("spmd", SPMDActor).main.call(host, port, ["train.py", "--lr", "0.1"])
"""

from monarch.spmd.actor import SPMDActor
from monarch.spmd.env import setup_torch_elastic_env, setup_torch_elastic_env_async

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]
