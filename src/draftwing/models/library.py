"""Models on this machine: those in the caches of this package and of the hub, and what their files say of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwing.config.aliases import ALIASES, DEFAULT_MODEL
from draftwing.config.options import Options
from draftwing.errors import CheckpointError
from draftwing.gguf_file import open_gguf
from draftwing.models.generation import sampling_defaults
from draftwing.models.heads.beside import with_found_drafter
from draftwing.models.hub import default_model_file, hub_id
from draftwing.models.hub_files import HEAD, cached, files_in, models_in
from draftwing.models.loader import load_config
from draftwing.models.stored import main_type, stored_type
from draftwing.models.weight_files import bytes_of, read_config_json
from draftwing.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class StoredModel:
    """A model in a cache.

    name: its alias, or hub id.  path: of its `.gguf` file, or of the folder of its newest revision.  size: bytes that
    all of its revisions take.  commits: of those revisions.  files: of a GGUF file in a repository, its parts.
    """

    name: str
    path: Path
    size: int
    commits: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def stored_models() -> list[StoredModel]:
    """Returns the models in the caches, by name; draft heads are among them."""
    found = []
    default = default_model_file()
    if default.is_file():
        found.append(StoredModel(DEFAULT_MODEL, default, default.stat().st_size))
    names = {alias.hub.repo: name for name, alias in ALIASES.items() if alias.hub is not None}
    for repo in _cached_repositories():
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        commits = tuple(revision.commit_hash for revision in repo.revisions)
        if (newest.snapshot_path / "config.json").exists():
            name = names.get(repo.repo_id, repo.repo_id)
            found.append(StoredModel(name, newest.snapshot_path, repo.size_on_disk, commits))
            continue
        for one in models_in(files_in(newest.snapshot_path)):
            files = tuple(newest.snapshot_path / file for file in one.files)
            size = sum(file.stat().st_size for file in files)
            found.append(StoredModel(f"{repo.repo_id}:{one.tag}", files[0], size, commits, files))
    return sorted(found, key=lambda model: model.name)


def _cached_repositories() -> Iterator[Any]:
    """Repositories of models in the hub's cache that have a revision."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    yield from (repo for repo in cache.repos if repo.repo_type == "model" and repo.revisions)


def find(name: str) -> Path | None:
    """Returns the files that `name`, as for `resolve_model`, means on this machine, without asking the hub."""
    alias = ALIASES.get(name)
    if name == DEFAULT_MODEL:
        file = default_model_file()
        return file if file.is_file() else None
    if alias is not None and alias.hub is not None:
        return cached(*alias.hub, weights=False)
    place = Path(name).expanduser()
    if place.exists() or "/" not in name:
        return place
    # Of a repository that was fetched at a commit the cache does not know the main branch.
    found = hub_id(name)
    path = None if found is None else cached(found.repo, None, weights=False, gguf=found.gguf)
    return path or next((model.path for model in stored_models() if name in _names(model)), None)


def describe(name: str, path: Path) -> dict[str, Any]:
    """Returns what config.json or a `.gguf` file's metadata say: architecture, whether it is served, and sizes.

    unserved: why it is not, None: it is.  parameters: those in matrices.
    """
    facts: dict[str, Any] = {"model": name, "path": str(path), "size": bytes_of(path)}
    alias = ALIASES.get(name)
    licence = alias.licence if alias is not None else None
    try:
        if path.suffix == ".gguf":
            file = open_gguf(path)
            facts["size"] = file.size
            facts["architecture"] = file.metadata.get("general.architecture")
            facts["format"] = f"GGUF {main_type(file)}"
            licence = licence or file.metadata.get("general.license")
        else:
            config = read_config_json(path)
            facts["architecture"] = ", ".join(map(str, config.get("architectures") or ())) or config.get("model_type")
            facts["format"] = stored_type(config) or "unknown"
        facts["licence"] = licence
        served = load_config(path)
        options = with_found_drafter(Options.from_kwargs(model=name).resolve(), path, served)
    except CheckpointError as error:
        head = HEAD.search(str(facts.get("architecture", "")))
        return facts | {"unserved": "a draft head" if head else str(error)}
    return facts | {
        "architecture": served.architecture,
        "unserved": None,
        "parameters": served.matrix_weights,
        "context_length": served.max_positions,
        "drafter": options.drafter,
        "draft_model": options.speculative_draft_model_path,
    }


def describe_requests(name: str, path: Path) -> dict[str, Any]:
    """Returns what a request meets: the chat template, and defaults of sampling fields."""
    try:
        source = load_tokenizer(path).chat_source
    except CheckpointError:
        source = None
    template = "none" if source is None else "with tools" if "tools" in source else "without tools"
    return {"chat_template": template, "sampling_defaults": sampling_defaults(path, name)}


def remove(name: str) -> int:
    """Deletes a model from its cache, of a repository all revisions; returns how many bytes that frees. Raises
    CheckpointError for what is in no cache."""
    if name == DEFAULT_MODEL and default_model_file().is_file():
        size = bytes_of(default_model_file().parent)
        shutil.rmtree(default_model_file().parent)
        return size
    stored = [model for model in stored_models() if model.commits]
    meant = [model for model in stored if name in _names(model)]
    if not meant:
        if Path(name).expanduser().exists():
            raise CheckpointError(f"{name} is a file or folder of yours, which was not fetched: delete it yourself")
        raise CheckpointError(f"{name} is in no cache; `draftwing list` shows what is")
    from huggingface_hub import constants, scan_cache_dir

    if any(model.commits == meant[0].commits for model in stored if model not in meant):
        for file in meant[0].files:  # one of several quantisations
            file.resolve().unlink()
            file.unlink(missing_ok=True)
    else:
        scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*meant[0].commits).execute()
    return sum(model.size for model in meant)


def _names(model: StoredModel) -> tuple[str, ...]:
    alias = ALIASES.get(model.name)
    if model.files:
        return model.name, model.name.partition(":")[0]
    return (model.name,) if alias is None or alias.hub is None else (model.name, alias.hub.repo)
