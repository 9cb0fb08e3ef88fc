"""What is in safetensors files, and how it comes into memory.

Law of this file: all of it runs in worker threads, and all of it can be stopped within a few megabytes. The
``safetensors`` package judges a file before anything of it is used; nothing is ever unpickled. Tensors are
views of the mapped file: they cost no memory of their own, and the staging threads read them.

A page that is not in memory yet would hold up a staging thread, which all transfers share, for as long as the
disk takes. So pages are brought in here first, in a thread of the reader's own, where Linux can tell that
they are missing (``preadv2`` with ``RWF_NOWAIT``); elsewhere the staging threads meet the disk.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from .transfers.hostcopy import note_file
from .transfers.plan import neutral

__all__ = ["Entry", "Shard", "StrPath", "find_shards", "require_package", "select"]

StrPath = str | os.PathLike[str]

#: Bytes read at a time, and so between two looks at whether the reader has been stopped.
_PIECE = 4 * 2**20

#: Bytes between two looks at whether a page is there. Linux reads ahead by 128 KiB and more at a time.
_STRIDE = 2**20

#: Bytes that a cold file's next pages are asked for ahead: a disk stays busy while copies go on.
_AHEAD = 256 * 2**20

#: Up to this size the reader copies: small transfers read their sources on the loop's thread, and a page
#: that has been dropped meanwhile must not make it wait for a disk.
_SMALL = 64 * 2**10


def require_package() -> Any:
    """The ``safetensors`` package, imported on first use."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("loading files needs the safetensors package: pip install aiogpu[files]") from error
    return safetensors


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: where its bytes begin in there, how many they are, and its shape."""

    name: str
    shard: Shard
    start: int
    nbytes: int
    shape: tuple[int, ...]


class Shard:
    """One open file. It is closed with the last reference to it: a thread may be reading still."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        self.path = path
        package = require_package()
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        # The very same file, though somebody may have put another one in its place by now: by its descriptor.
        same = f"/proc/self/fd/{self._fd}"
        try:
            self._file = package.safe_open(
                same if os.path.exists(same) else path, framework="pt", device="cpu"
            )
        except package.SafetensorError as error:
            raise ValueError(
                f"{path} is damaged, incomplete, or no safetensors file ({error}). Download or save it "
                "again; convert pickled checkpoints (.bin, .pt, .ckpt) with safetensors.torch.save_file"
            ) from error
        self._tells = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")
        self._layout = list(self._find_layout())

    @property
    def entries(self) -> Iterator[Entry]:
        """Its tensors. Made anew each time: an entry holds its file, and must not be held by it."""
        return (Entry(name, self, start, nbytes, shape) for name, start, nbytes, shape in self._layout)

    def _find_layout(self) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
        # The format has no holes: a tensor begins where the one before it ends.
        assert self._fd is not None
        start = 8 + int.from_bytes(os.read(self._fd, 8), "little")
        names = self._file.offset_keys()
        slices = [self._file.get_slice(name) for name in names]
        formats = self._formats(names, slices)
        for name, each in zip(names, slices, strict=True):
            packed, itemsize = formats[each.get_dtype()]
            shape = tuple(each.get_shape())
            if packed > 1:
                shape = (*shape[:-1], shape[-1] // packed)
            nbytes = math.prod(shape) * itemsize
            yield name, start, nbytes, shape
            start += nbytes

    def _formats(self, names: Sequence[str], slices: Sequence[Any]) -> dict[str, tuple[int, int]]:
        """For each dtype in the file: numbers in an element of torch's, and its bytes. Asked of one tensor of
        each, so that what this torch has no dtype for is known before anything is loaded."""
        samples: dict[str, tuple[str, Sequence[int]]] = {}
        for name, each in zip(names, slices, strict=True):
            code, shape = each.get_dtype(), each.get_shape()
            if code not in samples or (
                0 in samples[code][1] and 0 not in shape
            ):  # an empty one tells nothing
                samples[code] = (name, shape)
        formats = {}
        for code, (name, shape) in samples.items():
            try:
                tensor = self.tensor(name)
            except Exception as error:
                raise ValueError(
                    f"{self.path}: {name!r} is of dtype {code}, which torch {torch.__version__} cannot load "
                    f"({error})"
                ) from error
            formats[code] = (math.prod(shape) // max(1, tensor.numel()) or 1, tensor.element_size())
        return formats

    def tensor(self, name: str, start: int | None = None) -> torch.Tensor:
        """A view of the mapped file, or a copy of few bytes. Not to be written to. ``start``: where its bytes
        begin; then staging reads them from the file, and the mapping's pages are never touched."""
        with neutral():
            tensor: torch.Tensor = self._file.get_tensor(name)
            if tensor.nbytes <= _SMALL:
                return tensor.clone()
        if start is not None:
            note_file(tensor, self, start)
        return tensor

    def bring_in(self, start: int, nbytes: int, stopped: Callable[[], bool]) -> None:
        """Wait until the file's bytes are in memory, or nobody wants them any more."""
        asked = False
        for at in range(start, start + nbytes, _PIECE):
            if stopped():
                return
            size = min(_PIECE, start + nbytes - at)
            if not self._in_memory(at, size):
                if not asked and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self.descriptor, at, _AHEAD, os.POSIX_FADV_WILLNEED)
                    asked = True
                os.preadv(self.descriptor, [bytearray(size)], at)

    def _in_memory(self, start: int, nbytes: int) -> bool:
        """As far as anybody can tell; ``True`` where nobody can."""
        byte = bytearray(1)
        try:
            for at in range(start, start + nbytes if self._tells else start, _STRIDE):
                os.preadv(self.descriptor, [byte], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            self._tells = False  # some file systems cannot
        return True

    @property
    def descriptor(self) -> int:
        """What the system knows the open file by."""
        assert self._fd is not None
        return self._fd

    def __del__(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


# -- which files ---------------------------------------------------------------------------------------------


def find_shards(path: StrPath | Iterable[StrPath]) -> list[Shard]:
    """The files behind what a user names: one file, several, or an index of shards."""
    if isinstance(path, str | os.PathLike):
        named = Path(path)
        if named.suffix == ".json":
            return _indexed(named)
        return [_open(named)]
    shards = [_open(Path(each)) for each in path]
    if not shards:
        raise ValueError("no files to load: an empty list")
    return shards


def _open(path: Path) -> Shard:
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR,
            "name the .safetensors file, or the .safetensors.index.json, in the folder",
            str(path),
        )
    return Shard(path)


def _indexed(index: Path) -> list[Shard]:
    """The shards of a ``model.safetensors.index.json``, as Hugging Face's libraries write it: its
    ``weight_map`` names the file of each tensor, beside the index."""
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        files = {name: str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is no index of safetensors files: it has no weight_map of names"
        ) from error
    for file in files.values():
        # An index is data from outside: it must not reach for other files.
        if PurePath(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{index} names {file!r}: shards are .safetensors files beside their index")
    shards = {file: _open(index.parent / file) for file in sorted(set(files.values()))}
    has = {file: {entry.name for entry in shard.entries} for file, shard in shards.items()}
    lacking = [name for name, file in files.items() if name not in has[file]]
    if lacking:
        raise ValueError(f"{index} places {lacking[0]!r} in {files[lacking[0]]!r}, which does not have it")
    return list(shards.values())


def select(shards: Iterable[Shard], names: Collection[str] | None) -> list[Entry]:
    """The shards' tensors in the order of their bytes: all, or those of ``names``."""
    entries: dict[str, Entry] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.name in entries:
                other = entries[entry.name].shard.path
                raise ValueError(f"{entry.name!r} is in both {other} and {shard.path}")
            entries[entry.name] = entry
    if names is None:
        return list(entries.values())
    for name in names:
        if name not in entries:
            near = difflib.get_close_matches(name, entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {len(entries)} others"
            raise ValueError(f"there is no tensor {name!r}{hint}")
    return [entry for name, entry in entries.items() if name in names]
