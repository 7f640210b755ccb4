"""The floor: a pickled integer back and forth between two processes over a socket pair, nothing else. Median us."""

import os
import pickle
import socket
import statistics
import time


def main() -> None:
    a, b = socket.socketpair()
    if os.fork() == 0:
        a.close()
        while data := b.recv(4096):
            b.send(pickle.dumps(pickle.loads(data)))
        os._exit(0)
    b.close()
    times = []
    for i in range(3000):
        began = time.perf_counter()
        a.send(pickle.dumps(i))
        pickle.loads(a.recv(4096))
        times.append(time.perf_counter() - began)
    a.close()
    os.wait()
    print(f"{statistics.median(times) * 1e6:.0f}")


if __name__ == "__main__":
    main()
