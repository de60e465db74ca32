"""Stands for the process that trains: counts in a file as long as it runs, and ends as another file says."""

import sys
import time
from pathlib import Path

out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
(out / "train.json").write_text(" ".join(sys.argv))
end = out / "end"  # is there, and empty, before it says how
while not (end.exists() and end.read_text()):
    count = out / "count"
    count.write_text(str(int(count.read_text() or 0) + 1 if count.exists() else 1))
    time.sleep(0.002)
sys.exit(int(end.read_text()))
