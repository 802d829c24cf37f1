"""Publishes a model's folder on the Hugging Face Hub: what others need, and nothing else.

Only files that are named here leave the machine, so that no pickle (`training_args.bin`, the
optimizer of a checkpoint), no test data and no path of this machine does.
"""

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    SpaceCard,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from .configuration_tinytfm import TinyTFMConfig
from .model_card import CARD_FILE, is_generated, loading_lines, make_card, read_facts
from .recipes import RECIPE_FILE, load_recipe
from .run_folder import CURVES_FILE, RESULTS_FILE, RUN_FILE
from .tokenization import TOKENIZER_FILES, mend_tokenizer_class

logger = logging.getLogger(__name__)

CODE_FILES = ("configuration_tinytfm.py", "modeling_tinytfm.py")
# Beside these: the weights, the card, and the recipe without its paths.
PUBLISHED_FILES = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    *CODE_FILES,
    *TOKENIZER_FILES,
    RESULTS_FILE,
    RUN_FILE,
    CURVES_FILE,
)
# What an earlier push, or another program's, may have left: weights of another split, and pickles.
_OUTDATED = re.compile(
    r"(?:model|pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?"
    r"|training_args\.bin|optimizer\.pt|scheduler\.pt|scaler\.pt|rng_state(?:_\d+)?\.pth"
)
# What else belongs to the weights that were there.
_OF_THE_WEIGHTS = {*PUBLISHED_FILES, RECIPE_FILE}
_ADVICE = {
    401: "the token is not valid, or may not see it: `hf auth login`",
    403: "the token may not write there: use one with write access, of that owner",
}
# Of the card that transformers writes where there is none.
_EMPTY_CARD = "[More Information Needed]"
_TAG, _PAGE_FILE = "tinytfm", "index.html"
# What the Hub's own files of a new static Space say.
_NEW_SPACE = {
    CARD_FILE: "huggingface.co/docs/hub/spaces-config-reference",
    _PAGE_FILE: "Welcome to your static Space",
}


class Published(NamedTuple):
    """A published model.

    Attributes:
        repo_id: `owner/name`.
        url: Its page on the Hub.
        loading: The lines of Python that load it.
    """

    repo_id: str
    url: str
    loading: str


def check_repo_id(repo_id: str) -> str:
    """A repository's name, `name` or `owner/name`.

    Raises:
        ValueError: If the Hub would not take it.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"{repo_id!r} is no name of a repository: write name or owner/name, of letters, "
            f"digits, - _ . ({error})"
        ) from None
    return repo_id


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold a model's weights, with the index of several.

    Raises:
        ValueError: If one is missing.
    """
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise ValueError(f"{folder} holds no {SAFE_WEIGHTS_NAME}: there are no weights to publish")
    parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in parts:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which its {index.name} names")
    return [*parts, SAFE_WEIGHTS_INDEX_NAME]


def files_to_publish(folder: str | Path) -> dict[str, Path | bytes]:
    """What of a folder is published: names, and where the contents are. The card is not among it.

    Args:
        folder: A run's, a checkpoint, or any that `save_pretrained` wrote.

    Raises:
        ValueError: If it holds no model of this project that loads elsewhere.
        OSError: If there is no such folder, or a file cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} is no model: it holds no {CONFIG_NAME}")
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    if config.get("model_type") != TinyTFMConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')}, not "
            f"{TinyTFMConfig.model_type}"
        )
    weights = weight_files(folder)
    missing = [name for name in CODE_FILES if not (folder / name).is_file()]
    if missing or "AutoModel" not in config.get("auto_map", {}):
        raise ValueError(
            f"{folder} lacks {' and '.join(missing) or 'an auto_map in ' + CONFIG_NAME}, without "
            "which nobody else can load it: save the model once more by its save_pretrained"
        )
    found: dict[str, Path | bytes] = {
        name: folder / name for name in (*weights, *PUBLISHED_FILES) if (folder / name).is_file()
    }
    if TOKENIZER_FILES[1] in found:
        found.update(_mended_tokenizer(folder))
    if (folder / RECIPE_FILE).is_file():
        public = load_recipe(folder / RECIPE_FILE).without_paths()
        found[RECIPE_FILE] = public.to_yaml().encode()
    return found


def _mended_tokenizer(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer as every version of transformers reads them, whoever saved it."""
    with tempfile.TemporaryDirectory() as copy:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copy(folder / name, copy)
        mend_tokenizer_class(copy)
        return {file.name: file.read_bytes() for file in Path(copy).iterdir()}


def open_repository(
    repo_id: str, *, private: bool | None = None, token: str | None = None
) -> tuple[str, bool]:
    """Makes a repository on the Hub, unless it is there.

    Args:
        repo_id: `owner/name`, or the name of one's own.
        private: Whether only its owner may read it; where None, the owner's settings decide.
        token: A token of the Hub; the one that `hf auth login` keeps if None.

    Returns:
        The whole name, and whether it is new.

    Raises:
        ValueError: If the name is none, nobody is logged in, or it exists and is public although
            it should be private.
        OSError: If the Hub cannot be reached or refuses.
    """
    check_repo_id(repo_id)
    _check_login(repo_id, token)
    api = HfApi(token=token)
    with _hub_errors(repo_id):
        if "/" not in repo_id:
            repo_id = f"{api.whoami()['name']}/{repo_id}"
        if not api.repo_exists(repo_id):
            api.create_repo(repo_id, private=private)
            return repo_id, True
        if private and not api.model_info(repo_id).private:
            raise ValueError(
                f"{repo_id} exists and everybody can read it: make it private on the Hub first, or "
                "do not ask for private"
            )
    return repo_id, False


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    license: str | None = None,
    languages: Sequence[str] = (),
    new_card: bool = False,
    message: str | None = None,
    token: str | None = None,
    say: Callable[[str], None] = logger.info,
) -> Published:
    """Publishes a model's folder in one commit: weights, configuration, code, tokenizer, card.

    A card that a person wrote, in the folder or on the Hub, is kept; where there is none, or only
    a generated one, it is written anew from what the folder tells.

    Args:
        folder: See `files_to_publish`.
        repo_id: `owner/name`, or the name of one's own; made if it is not there.
        private: Whether only its owner may read a new repository.
        revision: A branch, made if it is not there; the main one if None.
        license: See `model_card.make_card`.
        languages: See there.
        new_card: Whether a generated card replaces also one that a person wrote.
        message: What the commit says.
        token: See `open_repository`.
        say: Takes the lines meant for a person.

    Returns:
        What is published, and where.

    Raises:
        ValueError: If the folder, the name or a choice is unusable.
        OSError: If the folder cannot be read, or the Hub cannot be reached or refuses.
    """
    folder = Path(folder)
    check_repo_id(repo_id)
    files = files_to_publish(folder)
    repo_id, is_new = open_repository(repo_id, private=private, token=token)
    api = HfApi(token=token)
    asked = {"license": [license] if license else [], "language": list(languages)}
    with _hub_errors(repo_id):
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = set(api.list_repo_files(repo_id, revision=revision))
        kept = _text_on_hub(api, repo_id, CARD_FILE, revision) if CARD_FILE in there else None
        if kept is not None and is_generated(kept):  # what was said of the weights stays said
            said = ModelCard(kept, ignore_metadata_errors=True).data.to_dict()
            license = license or said.get("license")
            languages = languages or said.get("language") or ()
        card = make_card(folder, repo_id, revision=revision, license=license, languages=languages)
        own = _text_of(folder / CARD_FILE)
        if own is not None and not is_generated(own) and not new_card:
            card = own
            say(f"{CARD_FILE} of {folder} is published as it was edited")
            _tell_of_unwritten(own, asked, say)
            if kept is not None and not is_generated(kept) and kept.strip() != own.strip():
                say(f"it replaces the edited one of {repo_id}, which stays in the history there")
        elif kept is not None and not (new_card or is_generated(kept) or _EMPTY_CARD in kept):
            card = ""
            say(f"{CARD_FILE} of {repo_id} was edited there and stays")
            _tell_of_unwritten(kept, asked, say)
        if card:
            files[CARD_FILE] = card.encode()
        outdated = sorted(
            name
            for name in there - files.keys()
            if _OUTDATED.fullmatch(name) or name in _OF_THE_WEIGHTS
        )
        if is_new:
            say(f"{repo_id} is new{', and private' if private else ''}")
        elif replaced := sorted(there & files.keys()):
            say(f"{repo_id} exists: a new commit replaces {', '.join(replaced)}")
        if outdated:
            say(f"removed from {repo_id}: {', '.join(outdated)}")
        if TOKENIZER_FILES[1] not in files:
            say(f"{folder} holds no tokenizer, so {repo_id} will have none")
        operations: list[Any] = [CommitOperationDelete(name) for name in outdated]
        operations += [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(
            repo_id,
            operations,
            commit_message=message or f"Publish {folder.resolve().name}",
            revision=revision,
        )
    return Published(
        repo_id,
        f"{api.endpoint}/{repo_id}" + (f"/tree/{quote(revision, safe='')}" if revision else ""),
        "\n".join(loading_lines(repo_id, read_facts(folder), revision)),
    )


def _tell_of_unwritten(card: str, asked: dict[str, list[str]], say: Callable[[str], None]) -> None:
    """Says what should be stated on a card that stays as a person left it, and is not."""
    if not any(asked.values()):
        return
    try:
        head = ModelCard(card, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError):  # of which the Hub tells
        return
    for name, values in asked.items():
        stated = head.get(name)
        if values and values != (stated if isinstance(stated, list) else [stated]):
            say(
                f"{name} stays as it is on that card: write {', '.join(values)} above its text, or "
                "have it written anew (new_card=True, --new-card)"
            )


def check_space(
    repo_id: str, *, private: bool | None = None, token: str | None = None
) -> tuple[str, bool, bool | None]:
    """Looks whether `push_space` may publish there; nothing is made or changed.

    Args:
        repo_id: See `push_space`.
        private: See there.
        token: See there.

    Returns:
        The whole name, whether the Space is there, and whether it is to be private.

    Raises:
        ValueError: See `push_space`.
        OSError: See there.
    """
    check_repo_id(repo_id)
    _check_login(repo_id, token)
    api = HfApi(token=token)
    with _hub_errors(repo_id):
        if "/" not in repo_id:
            repo_id = f"{api.whoami()['name']}/{repo_id}"
        if private is None and api.repo_exists(repo_id):
            private = api.model_info(repo_id).private
        if not api.repo_exists(repo_id, repo_type="space"):
            return repo_id, False, private
        if private and not api.repo_info(repo_id, repo_type="space").private:
            raise ValueError(f"the Space {repo_id} exists, and everybody can see it")
        there = set(api.list_repo_files(repo_id, repo_type="space"))

        def text(name: str) -> str:
            found = None
            if name in there:
                found = _text_on_hub(api, repo_id, name, repo_type="space")
            return found or ""

        card = text(CARD_FILE)
        try:
            head = SpaceCard(card, ignore_metadata_errors=True).data.to_dict()
        except (ValueError, yaml.YAMLError):
            head = {}
        may_go = head.get("sdk") == "static" and (
            _TAG in (head.get("tags") or ())
            or (
                there <= {".gitattributes", "style.css", *_NEW_SPACE}
                and all(said in text(name) for name, said in _NEW_SPACE.items() if name in there)
            )
        )
        if not may_go:
            raise ValueError(
                f"the Space {repo_id} exists and holds something else: choose another name"
            )
    return repo_id, True, private


def push_space(
    page: str,
    repo_id: str,
    *,
    title: str,
    private: bool | None = None,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Publishes a page of its own, such as the explorer's, as a static Space.

    Args:
        page: HTML that loads nothing: the Space's `index.html`.
        repo_id: `owner/name`, or the name of one's own; made if it is not there.
        title: What the Hub calls it.
        private: Whether only its owner may see a new Space; if None, as a model of that name is.
        message: What the commit says.
        token: See `open_repository`.

    Returns:
        Its address.

    Raises:
        ValueError: If the name is unusable, nobody is logged in, or a Space of that name holds
            something else, or is public although it should be private.
        OSError: If the Hub cannot be reached or refuses.
    """
    repo_id, is_there, private = check_space(repo_id, private=private, token=token)
    api = HfApi(token=token)
    head = {"title": title, "sdk": "static", "app_file": _PAGE_FILE, "tags": [_TAG]}
    card = f"---\n{yaml.safe_dump(head, allow_unicode=True, sort_keys=False)}---\n"
    with _hub_errors(repo_id):
        if not is_there:
            api.create_repo(repo_id, repo_type="space", space_sdk="static", private=private)
        files = {CARD_FILE: card, _PAGE_FILE: page}
        operations = [CommitOperationAdd(name, text.encode()) for name, text in files.items()]
        api.create_commit(
            repo_id,
            operations,
            commit_message=message or f"Publish {title}"[:72],
            repo_type="space",
        )
    return f"{api.endpoint}/spaces/{repo_id}"


def _check_login(repo_id: str, token: str | None) -> None:
    if token is None and get_token() is None:
        raise ValueError(
            f"{repo_id} needs an account on the Hub: log in by `hf auth login`, or set HF_TOKEN"
        )


def _text_of(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _text_on_hub(
    api: HfApi,
    repo_id: str,
    name: str,
    revision: str | None = None,
    *,
    repo_type: str | None = None,
) -> str | None:
    """A file as it is on the Hub now, whatever the cache holds; None if it is not there.

    What else stops it is raised as the Hub's client does: see `_hub_errors`.
    """
    try:
        path = api.hf_hub_download(
            repo_id, name, revision=revision, repo_type=repo_type, force_download=True
        )
    except RemoteEntryNotFoundError:
        return None
    except ValueError as error:  # in which a forced download wraps what stopped it
        raise (error.__cause__ or error) from None
    return _text_of(Path(path))


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turns what the Hub's client raises into one line that names the repository, and no token."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise OSError(f"{repo_id}: the Hub cannot be asked while HF_HUB_OFFLINE is set") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = _ADVICE.get(status) or error.server_message or "see the Hub's status page"
        raise OSError(f"{repo_id}: the Hub refused ({status}): {reason}") from None
    except HTTPError as error:
        raise OSError(f"{repo_id}: the Hub cannot be reached ({type(error).__name__})") from None
    except RuntimeError as error:  # in which a large file's upload wraps what stopped it
        cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
        raise OSError(f"{repo_id}: {error}{cause}") from None
