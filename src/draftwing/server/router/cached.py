"""The models in the caches that `draftwing pull` fetches into, as models of one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwing.config.aliases import ALIASES, DEFAULT_MODEL
from draftwing.config.model_list import ServedModel, served
from draftwing.files import load_json
from draftwing.models.hub import default_model_file
from draftwing.models.hub_files import HEAD, cached, chosen, files_in, models_in, snapshot

_FOLDER = "models--"  # before the name of a repository, in which -- stands for /


def in_cache(arguments: Mapping[str, Any], taken: Sequence[ServedModel]) -> list[ServedModel]:
    """Returns the models that are whole in the caches, by alias or hub id; draft heads and those that are `taken`, by
    their names or as what is served, are left out. The hub is not asked, neither here nor when one is started.

    arguments: of each of them, as `model_list.in_folder` has them.
    """
    own = ("model", "revision", "served_model_name")
    shared = {name: value for name, value in arguments.items() if name not in own}
    names = {name for one in taken for name in (*one.asked, one.model)}
    found = []
    if default_model_file().is_file():
        found.append(served((DEFAULT_MODEL,), shared | {"model": DEFAULT_MODEL}))
    for repo, commit in _repositories():
        found += _of_repository(repo, commit, shared)
    return [one for one in found if not names & {*one.names}]


def _repositories() -> Iterator[tuple[str, str]]:
    """Yields repositories of the hub's cache, and the commit of each that counts: an alias's, else the newest of its
    main branch, else the one that came last."""
    from huggingface_hub import constants

    pinned = {alias.hub.repo: alias.hub.commit for alias in ALIASES.values() if alias.hub is not None}
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{_FOLDER}*--*")):
        repo = folder.name.removeprefix(_FOLDER).replace("--", "/")
        place = (snapshot(repo, pinned[repo]) if pinned.get(repo) else None) or snapshot(repo)
        others = [one for one in folder.glob("snapshots/*") if one.is_dir()]
        place = place or max(others, key=lambda one: one.stat().st_mtime, default=None)
        if place is not None:
            yield repo, place.name


def _of_repository(repo: str, commit: str, shared: dict[str, Any]) -> list[ServedModel]:
    place = cached(repo, commit)
    if place is None:
        return []
    if place.is_dir():
        if _is_head(place):
            return []
        name = next((name for name, alias in ALIASES.items() if alias.hub == (repo, commit)), None)
        if name is not None:
            return [served((name, repo), shared | {"model": name})]
        return [served((repo,), shared | {"model": repo, "revision": commit})]
    folder = snapshot(repo, commit)
    models = models_in(files_in(folder)) if folder is not None else []
    default = chosen(repo, models, None)
    found = []
    for one in models:
        name = f"{repo}:{one.tag}"
        found.append(served((name, repo) if one == default else (name,), shared | {"model": name, "revision": commit}))
    return found


def _is_head(folder: Path) -> bool:
    try:
        return any(HEAD.search(str(name)) for name in load_json(folder / "config.json").get("architectures") or ())
    except (OSError, ValueError, AttributeError, TypeError):  # whoever loads it says what is wrong
        return False
