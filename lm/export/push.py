"""An exported directory → a repository of the HuggingFace hub, when asked; private by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lm.common.errors import UserError
from lm.export.measured import CARD
from lm.export.model_card import with_place
from lm.model.checksums import refuse_changed
from lm.runs.written import PAGE


class PushError(UserError, RuntimeError):
    """An upload that cannot be made; the message says why, and what is on the hub then."""


@dataclass(frozen=True)
class Place:
    """A repository that may be written to.

    Args:
        repository: OWNER/NAME. user: who is logged in. exists: it is there already.
    """

    repository: str
    user: str
    exists: bool
    public: bool


def find(repository: str, public: bool = False) -> Place:
    """Find out, before anything is made or uploaded, whether the hub would take it.

    Args:
        public: what is uploaded may be seen by everybody.
    Raises:
        PushError: no token, no network, no such name, or a repository that is public already where
            that was not asked for.
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
    user = _asked(api.whoami, "the token is not accepted, or the hub is not reached")["name"]
    name = repository if "/" in repository else f"{user}/{repository}"

    def look_up():
        try:
            return api.model_info(name)
        except RepositoryNotFoundError:
            return None

    there = _asked(look_up, f"{name} cannot be looked up")
    if there is None:
        return Place(name, user, False, public)
    if not there.private and not public:
        raise PushError(
            f"{name} is on the hub already and public: say --public if everybody may see this"
            " model, or choose another name; nothing was uploaded"
        )
    return Place(name, user, True, not there.private)


def check_export(folder: Path) -> None:
    """Raises PushError where a folder is no export with a model card, or not as it was written."""
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
    """Upload the files of an exported directory in one commit → its address. Folders inside, with
    results and figures, stay here: the model card holds the numbers. So does what is no part of the
    model: hidden files, and the page of `fprnn inspect`, whose text is nobody else's.

    Raises:
        PushError: `folder` is no export, or the hub did not take it; a commit is whole or not made.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    check_export(folder)
    folder = Path(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file() and _is_uploaded(path.name))
    size = sum(path.stat().st_size for path in files)
    where = "public" if place.public else "private"
    kind = "the repository" if place.exists else "the new repository"
    say(f"uploads {len(files)} files, {size / 1e6:.1f} MB, to {kind} {place.repository} ({where})")
    say(f"  as {place.user}: {', '.join(path.name for path in files)}")
    card = with_place((folder / CARD).read_text(encoding="utf-8"), place.repository)
    contents = {path.name: path for path in files} | {CARD: card.encode()}
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi()
    if not place.exists:
        _asked(
            lambda: api.create_repo(place.repository, private=not place.public, exist_ok=False),
            f"{place.repository} cannot be made; nothing was uploaded",
        )
    left = "it is as it was" if place.exists else "it was made, and is empty"
    done = _asked(
        lambda: api.create_commit(
            place.repository, operations, commit_message="Uploaded by fprnn export"
        ),
        f"the upload to {place.repository} failed; {left}",
    )
    return done.commit_url


def _is_uploaded(name: str) -> bool:
    return name != PAGE and (not name.startswith(".") or name == ".gitattributes")


def _asked(request: Callable, failure: str):
    """What the hub answers.

    Raises:
        PushError: it refuses, or is not reached.
    """
    from huggingface_hub.errors import HTTPError  # of whatever library huggingface_hub asks by

    try:
        return request()
    except (HTTPError, OSError, ValueError) as e:  # OSError: also of HF_HUB_OFFLINE
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise PushError(f"{failure}: {reason}") from None
