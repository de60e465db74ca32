"""`python -m endless_start FD`: a worker whose model takes for ever to load."""

import sys
import time

from fake_engine import stands_in

from draftwing.engine.process import worker


class EndlessEngine:
    def __init__(self, *_: object, **__: object) -> None:
        time.sleep(600)


if __name__ == "__main__":
    stands_in(EndlessEngine)
    sys.exit(worker.main(sys.argv))
