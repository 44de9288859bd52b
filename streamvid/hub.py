"""Repositories of the Hugging Face Hub as paths on this machine.

``owner/name`` is a model folder; ``owner/name/path/in/it.pt`` is one file. Knows nothing of what is inside.
"""

from __future__ import annotations

import re
from pathlib import Path

from streamvid.errors import CheckpointError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.pth")


def looks_like_repository(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name`` or ``owner/name/file``."""
    return bool(re.fullmatch(rf"{_REPOSITORY.pattern}(/[\w./-]+)?", name)) and not name.startswith(".")


def fetch(name: str, revision: str | None = None) -> Path:
    """The local copy of a repository or of one of its files, downloaded when it is not in the cache.

    Raises:
        CheckpointError: no network, no such repository or file, or no access to it.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    owner, repository, *rest = name.split("/")
    repo_id = f"{owner}/{repository}"
    try:
        if rest:
            return Path(hf_hub_download(repo_id, "/".join(rest), revision=revision))
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(_WANTED)))
    except GatedRepoError:
        reason = "its owner must grant you access; accept its terms there and run `hf auth login`"
    except RepositoryNotFoundError:
        reason = "there is no such repository, or it is private (`hf auth login`)"
    except (HFValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
    except EntryNotFoundError as error:
        reason = _offline(error) or f"the repository has no file {'/'.join(rest)!r}"
    except (HfHubHTTPError, OSError) as error:
        reason = _offline(error) or str(error).splitlines()[0]
    raise CheckpointError(
        f"{name}: neither a file or folder here nor available from the Hugging Face Hub: {reason}"
    )


def _offline(error: Exception) -> str | None:
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)):
        return "the hub cannot be reached (no network, or offline mode); fetch it elsewhere and give its path"
    return None
