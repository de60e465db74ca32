"""Makes a running front of options: models, port, application."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftwing.config.model_list import ServedModel, in_folder, read_models, seconds
from draftwing.config.option_fields import SERVER
from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.machine import keep_tidy
from draftwing.server.run import bind
from draftwing.server.signals import Hangup, terminable
from draftwing.version import __version__

logger = logging.getLogger(__name__)


def serve_models(arguments: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> None:
    """Serves several models until SIGINT, SIGTERM or the end of the terminal. Raises ConfigError.

    arguments: of the command line, the environment and the file.  tables: of the file's list `models`.
    """
    options = front_options(arguments)
    served = read_models(arguments, tables)
    for one in served:
        _check(one)
    hangup = Hangup(reloads=options.api_key_file is not None)
    with terminable(hangup), bind(options.host, options.port) as sock:
        from draftwing.server.router.app import Front, create_front
        from draftwing.server.router.models import Models
        from draftwing.server.uvicorn_server import server_of

        budget = None if options.models_memory is None else options.models_memory * 1e9
        models = Models(served, further=partial(further, arguments, options), most=options.models_max, budget=budget)
        names = ", ".join(model.served.name for model in models.every) or "none yet"
        logger.info("draftwing %s: models: %s", __version__, names)
        default = served[0].name if "model" in arguments else None
        app = create_front(models, options, default)
        keep_tidy()
        server = server_of(app, options, Front(models), sock.getsockname()[1], hangup, app.state.reload_keys)
        server.run(sockets=[sock])


def further(arguments: Mapping[str, Any], options: Options, named: Sequence[ServedModel]) -> list[ServedModel]:
    """Returns the models in the folder and in the caches, as far as options ask for them."""
    found: list[ServedModel] = []
    if options.models_dir is not None:
        found += in_folder(arguments, Path(options.models_dir).expanduser().absolute(), named)
    if options.models_cache:
        from draftwing.server.router.cached import in_cache

        found += in_cache(arguments, [*named, *found])
    return found


def front_options(arguments: Mapping[str, Any]) -> Options:
    """Returns the options that concern the address and the list of models. Raises ConfigError."""
    groups = {spec.name: spec.metadata["group"] for spec in dataclasses.fields(Options)}
    own = {name: value for name, value in arguments.items() if groups.get(name) == SERVER}
    options = Options.from_kwargs(**own).resolve()
    seconds(options.keep_alive)  # its check
    return options


def _check(served: ServedModel) -> None:
    """Raises ConfigError for options that cannot work, before anything is started."""
    try:
        Options.from_kwargs(**served.arguments).resolve()
    except ConfigError as error:
        raise ConfigError(f"model {served.name!r}: {error}") from None
