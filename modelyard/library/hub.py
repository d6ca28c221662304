"""The Hugging Face hub, or any server with its HTTP API (HF_ENDPOINT): references, listings and downloads.

Listings, searches, tokens, addresses and the hub's own cache folder come from huggingface_hub. Downloads are our own:
huggingface_hub (2.4) gives each attempt a file of its own and deletes it on failure, so that a process that is killed
after 39 of 40 GB begins again, and it compares sizes only. Here

- an interrupted download continues at its last byte, also if the process was killed, and is hashed while it arrives;
- several files are one download: one lock, one check of the disk, one progress bar;
- the files lie under their own names in the library's folder, where a configuration can name them. What is in the hub's
  cache folder already is linked there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from modelyard import __version__
from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, NotFound, RateLimited, Unavailable
from modelyard.library.cache_dir import file_lock
from modelyard.library.progress import OnBytes, ProgressReporter, format_size

if TYPE_CHECKING:
    from httpx2 import Response
    from huggingface_hub.hf_api import RepoSibling

T = TypeVar("T")

DEFAULT_ENDPOINT = "https://huggingface.co"
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_PART = r"[A-Za-z0-9][\w.-]*"
_REPO = re.compile(rf"{_PART}/{_PART}")

# --- references -------------------------------------------------------------------------------------------------------


class HubReference(Struct, frozen=True):
    """A repository, and optionally a quantization (or a branch of that name), a revision, or one of its files."""

    repo: str
    quant: str | None = None
    revision: str | None = None
    file: str | None = None


def parse_reference(text: str, env: Mapping[str, str] = os.environ) -> HubReference | None:
    """`owner/repo[:quant]`, the same behind `hf.co/`, or the URL of a repository, a folder or a file. None: neither."""
    if "://" in text:
        try:
            url = urlsplit(text)
        except ValueError:  # a bracket that is not of an IPv6 address
            return None
        if url.netloc not in (*_HUB_HOSTS, urlsplit(endpoint(env)).netloc):
            return None
        return _parse_path(unquote(url.path).strip("/"))
    host, slash, rest = text.partition("/")
    if slash and host in _HUB_HOSTS:
        return _parse_path(rest.strip("/"))
    repo, colon, tag = text.partition(":")
    if not _REPO.fullmatch(repo) or (colon and not tag):
        return None
    return HubReference(repo, tag or None)


def _parse_path(path: str) -> HubReference | None:
    """The path of a hub's URL. `/tree/`, `/blob/` and `/resolve/` are followed by a revision and a path in it."""
    parts = path.split("/")
    repo, colon, tag = "/".join(parts[:2]).partition(":")
    if not _REPO.fullmatch(repo) or (colon and (not tag or len(parts) > 2)):
        return None
    if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve", "raw"):
        inner = "/".join(parts[4:])
        revision = parts[3]
        if parts[2] == "tree":  # a folder of a repository is often a quantization
            return HubReference(repo, parts[-1] if inner else None, revision)
        return HubReference(repo, None, revision, inner) if inner else None
    return HubReference(repo, tag or None)


# --- the API ----------------------------------------------------------------------------------------------------------

_READ_TIMEOUT_S = 30.0  # between two pieces of data
_ATTEMPTS = 5  # in a row without a new byte
_CHUNK = 1 << 20


def endpoint(env: Mapping[str, str] = os.environ) -> str:
    return (env.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


class HubFile(Struct, frozen=True):
    """`sha256` is known for large files; others have `blob`, git's hash of a small file. Empty: unknown."""

    name: str
    size: int
    sha256: str = ""
    blob: str = ""

    @property
    def identity(self) -> str:
        """Changes with the content."""
        return self.sha256 or self.blob or str(self.size)


class HubListing(Struct, frozen=True):
    """A revision of a repository: its commit and its files by name."""

    repo: str
    commit: str
    files: Mapping[str, HubFile]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: file.size for name, file in self.files.items()}


class HubModel(Struct, frozen=True):
    """A repository in the result of a search."""

    repo: str
    downloads: int = 0
    likes: int = 0
    gated: bool = False
    updated: str = ""


class HubClient:
    """A connection to the hub. Every error of the hub or the network is one sentence."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        from huggingface_hub import HfApi, get_token  # slow to import, and most servers never ask the hub

        self._url, self._token = endpoint(env), get_token()
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise InvalidRequest(f"HF_ENDPOINT is not an http or https URL: {self._url}")
        self._api = HfApi(self._url, self._token or False, "modelyard", __version__)

    def list_files(self, repo: str, revision: str | None = None) -> HubListing:
        about = self._call(repo, lambda: self._api.model_info(repo, revision=revision or "main", files_metadata=True))
        files = [_hub_file(sibling) for sibling in about.siblings or []]
        return HubListing(repo, about.sha or revision or "main", {file.name: file for file in files})

    def search(self, text: str, limit: int) -> list[HubModel]:
        """Repositories with GGUF files whose names contain the words, most downloaded first."""

        def search() -> list[HubModel]:  # not `HfApi.list_models`, which tries for 23 s where there is no network
            from huggingface_hub import get_session, hf_raise_for_status

            query: dict[str, str | int | bool] = {"search": text, "filter": "gguf", "sort": "downloads", "limit": limit}
            url = f"{self._url}/api/models"
            found = get_session().get(url, params=query, headers=self._headers(), timeout=_READ_TIMEOUT_S)
            hf_raise_for_status(found)
            return [_hub_model(one) for one in found.json()]

        return [found for found in self._call("the list of models", search) if _REPO.fullmatch(found.repo)]

    def list_branches(self, repo: str) -> list[str]:
        return [branch.name for branch in self._call(repo, lambda: self._api.list_repo_refs(repo)).branches]

    def read_start(self, listing: HubListing, name: str, size: int) -> bytes:
        """The first bytes of a file: at most `size`."""
        with self.stream(listing, name, {"range": f"bytes=0-{size - 1}"}) as response:
            data = b""
            for chunk in response.iter_raw():
                data += chunk
                if len(data) >= size:
                    break
            return data[:size]

    @contextmanager
    def stream(self, listing: HubListing, name: str, headers: Mapping[str, str]) -> Iterator[Response]:
        """The response to a request for a file, which may be whole where the server ignores ranges."""
        from httpx2 import RemoteProtocolError
        from huggingface_hub import get_session, hf_hub_url

        url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self._url)
        sent = {**self._headers(), "accept-encoding": "identity", **headers}
        with get_session().stream("GET", url, headers=sent, timeout=_READ_TIMEOUT_S) as response:
            if response.status_code >= 500:  # try again, like after a disconnect
                raise RemoteProtocolError(f"the server answered {response.status_code}")
            if response.status_code >= 400:
                raise self._refused(listing.repo, response)
            yield response

    def _headers(self) -> dict[str, str]:
        """The token is not sent to the CDN that a download is redirected to."""
        sent = {"user-agent": f"modelyard/{__version__}"}
        return sent | {"authorization": f"Bearer {self._token}"} if self._token else sent

    def cached(self, listing: HubListing, name: str) -> Path | None:
        """The file in the cache folder that huggingface_hub's own programs share."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(listing.repo, name, revision=listing.commit)
        return Path(found).resolve() if isinstance(found, str) else None

    def _call(self, repo: str, ask: Callable[[], T]) -> T:
        from httpx2 import HTTPError, ReadError, RemoteProtocolError
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        for attempt in range(_ATTEMPTS):
            try:
                return ask()
            except (ReadError, RemoteProtocolError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise self._refused(repo, error.response) from None
                if attempt == _ATTEMPTS - 1:
                    raise self.unreachable(repo, error) from error
                pause(attempt)  # a server that is restarting
            except (HTTPError, OfflineModeIsEnabled) as error:
                raise self.unreachable(repo, error) from error
            except (ValueError, KeyError, TypeError):
                message = f"{self._url} did not answer as a hub does: is HF_ENDPOINT right?"
                raise Unavailable(message, code="fetch_failed") from None
        raise AssertionError("unreachable")

    def unreachable(self, repo: str, error: Exception) -> Unavailable:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        hint = "check the network, or set HF_ENDPOINT to a mirror"
        return Unavailable(f"{repo} could not be fetched from {self._url}: {reason}; {hint}", code="fetch_failed")

    def _refused(self, repo: str, response: Response) -> ModelyardError:
        """The hub answers 401 for a repository that does not exist, too: only its X-Error-Code tells."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        page = f"{self._url}/{repo}"
        if code == "GatedRepo":
            step = "wait until its owner grants access" if self._token else "set HF_TOKEN to a token of your account"
            return Forbidden(f"{repo} is gated: accept its terms on {page} and {step}", code="gated")
        if code == "RevisionNotFound":
            return NotFound(f"{repo} has no such branch, tag or commit: look at {page}", code="unknown_revision")
        if code == "EntryNotFound":
            return NotFound(f"{repo} has no such file: look at {page}", code="unknown_file")
        if status in (401, 404) or code == "RepoNotFound":
            access = "HF_TOKEN has no access to it" if self._token else "it is private: set HF_TOKEN"
            return NotFound(f"the hub has no repository {repo!r}, or {access}", code="unknown_repo")
        if status == 403:
            return Forbidden(f"the hub refuses {repo}: HF_TOKEN lacks the permission", code="forbidden")
        if status == 429:
            wait = response.headers.get("retry-after", "")
            return RateLimited(
                "the hub's rate limit is reached: wait a few minutes, or set HF_TOKEN for a higher one",
                retry_after=float(wait) if wait.isdigit() else 60.0,
            )
        return Unavailable(f"{self._url} answered {status} for {repo}: is HF_ENDPOINT right?", code="fetch_failed")


def _hub_model(found: dict[str, Any]) -> HubModel:
    counts = found.get("downloads") or 0, found.get("likes") or 0
    return HubModel(found["id"], *counts, bool(found.get("gated")), found.get("lastModified") or "")


def _hub_file(sibling: RepoSibling) -> HubFile:
    size = (sibling.lfs and sibling.lfs.size) or sibling.size or 0
    return HubFile(sibling.rfilename, size, sibling.lfs.sha256 if sibling.lfs else "", sibling.blob_id or "")


def pause(attempt: int) -> None:
    time.sleep(min(0.2 * 2**attempt, 5.0))


# --- downloads --------------------------------------------------------------------------------------------------------
#
# A file arrives as `NAME.IDENTITY.part` beside its place: the identity of its content keeps bytes of two versions
# apart. It is renamed when its size and hash are right. `.hub.json` has the identities of the complete files, so that a
# new version on the hub is noticed without reading the file.

_INDEX = ".hub.json"
_LOCK = ".fetch.lock"
_DISK_RESERVE = 64 << 20


def download(
    client: HubClient, listing: HubListing, names: Sequence[str], folder: Path, title: str, progress: ProgressReporter
) -> list[Path]:
    """Fetch these files into `folder`. What is already there is kept, a part of a file is continued, and a second
    process that wants the same waits for the first. If it fails or is interrupted, all that has arrived stays."""
    files = [listing.files[name] for name in names]
    for file in files:
        _check_inside(file.name)
    wait = f"another process is fetching {listing.repo}: waiting for it"
    try:
        with file_lock(folder / _LOCK, lambda: progress.write_line(wait)):
            missing = [file for file in files if not _is_complete(folder, file)]
            missing = [file for file in missing if not _link_cached(client, listing, file, folder)]
            if missing:
                _check_disk_space(title, missing, folder)
                with progress.track(title) as on_bytes:
                    _fetch_all(client, listing, missing, folder, on_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            message = f"the disk of {folder} is full: free some space, then pull again; the download continues there"
            raise Unavailable(message, code="disk_full") from error
        raise Unavailable(f"{title} cannot be written to {folder}: {error}", code="fetch_failed") from error
    return [folder / name for name in names]


def _check_inside(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise InvalidRequest(f"the hub lists a file outside the model's folder: {name!r}", code="bad_listing")


def _part(folder: Path, file: HubFile) -> Path:
    path = folder / file.name
    return path.with_name(f"{path.name}.{file.identity[:12]}.part")


def _check_disk_space(title: str, files: Sequence[HubFile], folder: Path) -> None:
    parts = [part.stat().st_size for file in files if (part := _part(folder, file)).exists()]
    needed = sum(file.size for file in files) - sum(parts)
    free = shutil.disk_usage(folder).free
    if needed + _DISK_RESERVE > free:
        raise Unavailable(
            f"{title} needs {format_size(needed)} and {folder} has {format_size(free)} free: free some space, choose a "
            "smaller --quant, or set MODELYARD_CACHE to a folder on another disk",
            code="disk_full",
        )


def _link_cached(client: HubClient, listing: HubListing, file: HubFile, folder: Path) -> bool:
    """Uses the file that another program has in the hub's cache folder, if there is one of this commit."""
    cached, path = client.cached(listing, file.name), folder / file.name
    if cached is None or cached.stat().st_size != file.size:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.hardlink_to(cached)
    except OSError:  # another file system
        path.symlink_to(cached)
    _write_index(folder, _read_index(folder) | {file.name: file.identity})
    return True


def _fetch_all(
    client: HubClient, listing: HubListing, files: Sequence[HubFile], folder: Path, on_bytes: OnBytes
) -> None:
    total = sum(file.size for file in files)
    before = 0
    for file in files:
        start = before
        _fetch_file(client, listing, file, folder, lambda done, start=start: on_bytes(start + done, total))  # type: ignore[misc]
        before += file.size


def _fetch_file(
    client: HubClient, listing: HubListing, file: HubFile, folder: Path, on_done: Callable[[int], None]
) -> None:
    part = _part(folder, file)
    part.parent.mkdir(parents=True, exist_ok=True)
    for stale in part.parent.glob(f"{_escape(Path(file.name).name)}.*.part"):
        if stale != part:  # of another version
            stale.unlink()
    resumed = part.exists() and part.stat().st_size > 0
    fault = _receive(client, listing, file, part, on_done)
    if fault is not None and resumed:  # the old part may be the cause
        fault = _receive(client, listing, file, part, on_done)
    if fault is not None:
        raise InvalidRequest(
            f"{Path(file.name).name} does not have the {fault} that the hub lists, and was removed: pull again, and if "
            "the error remains, the file on the hub or on the mirror is damaged",
            code="checksum_mismatch",
        )
    part.replace(folder / file.name)
    _write_index(folder, _read_index(folder) | {file.name: file.identity})


def _escape(name: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", name)


def _receive(
    client: HubClient, listing: HubListing, file: HubFile, part: Path, on_done: Callable[[int], None]
) -> str | None:
    """Receive a file to its end, through disconnects. Returns what is wrong with it ("checksum", "size"), having
    removed it; None if it is right."""
    from httpx2 import HTTPError, ReadError

    hasher = _Hasher(file)
    with part.open("a+b") as out:
        out.seek(0)
        while chunk := out.read(_CHUNK):
            hasher.update(chunk)
        done, failures = out.tell(), 0
        on_done(done)
        while done < file.size:
            try:
                with client.stream(listing, file.name, {"range": f"bytes={done}-"} if done else {}) as response:
                    if done and response.status_code != 206:  # it sends the whole file
                        out.truncate(0)
                        hasher, done = _Hasher(file), 0
                    for chunk in response.iter_raw():
                        out.write(chunk)
                        hasher.update(chunk)
                        done, failures = done + len(chunk), 0
                        on_done(min(done, file.size))
                        if done > file.size:
                            break
                if done < file.size:
                    raise ReadError("the connection ended early")
            except HTTPError as error:
                out.flush()
                failures += 1
                if failures >= _ATTEMPTS:
                    raise _interrupted(client, listing, file, done, error) from error
                pause(failures)
    if (fault := hasher.fault(done)) is not None:
        part.unlink()
    return fault


def _interrupted(client: HubClient, listing: HubListing, file: HubFile, done: int, error: Exception) -> Unavailable:
    reason = client.unreachable(listing.repo, error).message
    kept = f"{format_size(done)} of {format_size(file.size)} are kept, and the next pull continues there"
    return Unavailable(f"{reason}. {kept}", code="fetch_failed")


class _Hasher:
    """The hash that the hub lists for a file: sha256, or git's for a small one."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        if not file.sha256:
            self._hash = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def fault(self, size: int) -> str | None:
        expected = self._file.sha256 or self._file.blob
        if size != self._file.size:
            return "size"
        return "checksum" if len(expected) >= 40 and self._hash.hexdigest() != expected else None


def _is_complete(folder: Path, file: HubFile) -> bool:
    """Whether this version of the file is here. One without a note, of an older program, is hashed once."""
    path = folder / file.name
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    index = _read_index(folder)
    if file.name not in index:
        hasher = _Hasher(file)
        with path.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                hasher.update(chunk)
        if hasher.fault(file.size) is not None:
            return False
        _write_index(folder, index | {file.name: file.identity})
        return True
    return index[file.name] == file.identity


def _read_index(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / _INDEX).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write_index(folder: Path, index: Mapping[str, str]) -> None:
    temporary = folder / f"{_INDEX}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(index))
    temporary.replace(folder / _INDEX)
