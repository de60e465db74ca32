"""`python -m endless_start FD`: a worker whose model takes for ever to load."""

import sys
import time

import draftwing.engine.engine
from draftwing.engine.process import worker


class EndlessEngine:
    def __init__(self, options: object) -> None:
        time.sleep(600)


if __name__ == "__main__":
    draftwing.engine.engine.Engine = EndlessEngine  # type: ignore[assignment,misc]
    sys.exit(worker.main(sys.argv))
