"""`python -m monarch._src.actor.bootstrap_main`: a worker process started by a command."""

import monarch.actor
from monarch.runtime.child import run_executed

if __name__ == "__main__":
    run_executed()
