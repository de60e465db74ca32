"""Names under which notebooks import helpers."""
