"""docs/environment_variables.md has every variable that the code reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from test_pages import table_rows, text_of

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"[A-Z][A-Z0-9_]*[A-Z0-9]")
INTERNAL = {"PYTHONPATH", "TQDM_DISABLE"}  # set for processes of draftwing's own, and read by nobody here


def names(nodes: Iterable[ast.expr | None]) -> set[str]:
    values = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {value for value in values if isinstance(value, str) and NAME.fullmatch(value)}


def read_in(file: Path) -> Iterator[str]:
    """What a file asks the environment for: in calls, subscripts and comparisons, or by the entries of a table."""
    source = text_of(file)
    for node in ast.walk(ast.parse(source)) if "environ" in source else ():
        if isinstance(node, ast.Call) and "environ" in ast.unparse(node):
            yield from names(node.args)
        elif isinstance(node, ast.Subscript) and "environ" in ast.unparse(node.value):
            yield from names([node.slice])
        elif isinstance(node, ast.Compare) and "environ" in ast.unparse(node):
            yield from names([node.left])
        elif isinstance(node, ast.Tuple | ast.Dict):
            yield from (name for name in names(node.elts if isinstance(node, ast.Tuple) else node.keys) if "_" in name)


def test_every_variable_is_on_the_page() -> None:
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "setup.py"]
    read = {name for file in files for name in read_in(file)} - INTERNAL
    assert read >= {"XDG_CACHE_HOME", "DRAFTWING_NATIVE", "SGLANG_SIMULATE_ACC_LEN", "NCCL_SOCKET_IFNAME", "LOCAL_RANK"}
    rows = table_rows(text_of(ROOT / "docs" / "environment_variables.md"))
    listed = {name for row in rows for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", row[0])}
    assert read <= listed, f"not on the page: {sorted(read - listed)}"
