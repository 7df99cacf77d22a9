"""Upload of an exported folder to the HuggingFace hub, on request; private by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UserError
from lm.export.model_card import with_place
from lm.model.checksums import refuse_changed
from lm.runs.written import CARD, PAGE


class PushError(UserError, RuntimeError):
    """An upload that cannot be made; the message says why, and what is on the hub then."""


class Place(NamedTuple):
    """A repository that may be written to."""

    repository: str  # OWNER/NAME
    user: str  # who is logged in
    exists: bool
    public: bool


def find(repository: str, public: bool = False) -> Place:
    """Find out, before anything is made or uploaded, whether the hub would take an upload.

    Args:
        repository: OWNER/NAME, or NAME.
        public: Whether everybody may see the upload.

    Raises:
        PushError: If there is no token, no network or no such name, or the repository is public
            already and `public` is False.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise PushError(f"`{repository}` is no name of a repository: OWNER/NAME") from None
    if get_token() is None:
        raise PushError(
            "no token of the hub is there: `hf auth login`, or set HF_TOKEN to one that may write"
            " (https://huggingface.co/settings/tokens); nothing was uploaded"
        )
    api = HfApi()
    user = _request(api.whoami, "the token is not accepted, or the hub is not reached")["name"]
    name = repository if "/" in repository else f"{user}/{repository}"

    def look_up():
        try:
            return api.model_info(name)
        except RepositoryNotFoundError:
            return None

    there = _request(look_up, f"{name} cannot be looked up")
    if there is None:
        return Place(name, user, False, public)
    if not there.private and not public:
        raise PushError(
            f"{name} is on the hub already and public: say --public if everybody may see this"
            " model, or choose another name; nothing was uploaded"
        )
    return Place(name, user, True, not there.private)


def check_export(folder: Path) -> None:
    """Refuse a folder that is no export, or whose files were changed.

    Raises:
        PushError: It has no model or no card, or does not match its SHA256SUMS.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / CARD).is_file():
        raise PushError(
            f"{folder} is no export (it has no config.json, or no {CARD}): name an exported folder,"
            " or give RUN and OUT"
        )
    try:
        refuse_changed(folder)
    except (OSError, ValueError) as e:
        raise PushError(f"{e}; nothing was uploaded") from None


def push(folder: Path, place: Place, say: Callable[[str], None]) -> str:
    """Upload the files of an exported folder in one commit, and return its address.

    Sub-folders, hidden files and the page of `fprnn inspect` stay here: they may hold texts of the
    user.

    Raises:
        PushError: If `folder` is no export, or the hub refuses; a commit is whole or not made.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    check_export(folder)
    folder = Path(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file() and _is_uploaded(path.name))
    size = sum(path.stat().st_size for path in files)
    kind = "the repository" if place.exists else "the new repository"
    where = "public" if place.public else "private"
    say(f"uploads {len(files)} files, {size / 1e6:.1f} MB, to {kind} {place.repository} ({where})")
    say(f"  as {place.user}: {', '.join(path.name for path in files)}")
    card = with_place((folder / CARD).read_text(encoding="utf-8"), place.repository)
    contents = {path.name: path for path in files} | {CARD: card.encode()}
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi()
    if not place.exists:
        _request(
            lambda: api.create_repo(place.repository, private=not place.public, exist_ok=False),
            f"{place.repository} cannot be made; nothing was uploaded",
        )
    left = "it is as it was" if place.exists else "it was made, and is empty"
    message = "Uploaded by fprnn export"
    commit = _request(
        lambda: api.create_commit(place.repository, operations, commit_message=message),
        f"the upload to {place.repository} failed; {left}",
    )
    return commit.commit_url


def _is_uploaded(name: str) -> bool:
    return name != PAGE and (not name.startswith(".") or name == ".gitattributes")


def _request(request: Callable, failure: str):
    """Return the hub's answer.

    Raises:
        PushError: If it refuses, or is not reached.
    """
    from huggingface_hub.errors import HTTPError  # of the library that huggingface_hub uses

    try:
        return request()
    except (HTTPError, OSError, ValueError) as e:  # OSError: also of HF_HUB_OFFLINE
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise PushError(f"{failure}: {reason}") from None
