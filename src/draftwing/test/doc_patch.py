"""`launch_server_cmd` for notebooks of documentation: it picks a free port, so that several can run side by side."""

from draftwing.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]
