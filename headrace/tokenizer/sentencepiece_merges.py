"""Merge lists rebuilt from SentencePiece scores, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from headrace.checkpoint.user_cache import atomic_writer, user_cache_dir

logger = logging.getLogger(__name__)

_FORMAT = b"headrace merges 1\n"


def merges_from_scores(
    pieces: Sequence[str], scores: Sequence[float], is_mergeable: Sequence[bool]
) -> array[int]:
    """Pairs of ids, flat and best first, whose merging gives what SentencePiece's BPE gives.

    SentencePiece joins the neighbours whose joint piece has the best score. A merge list says the same when each
    piece that is the joint of two pieces stands in it, ordered by score.
    """
    ids = {piece: index for index, piece in enumerate(pieces) if is_mergeable[index]}
    found: list[tuple[float, int, int]] = []
    get = ids.get
    for piece, index in ids.items():
        score = -scores[index]
        for cut in range(1, len(piece)):
            left = get(piece[:cut])
            if left is not None:
                right = get(piece[cut:])
                if right is not None:
                    found.append((score, left, right))
    found.sort()
    flat = array("I")
    for _, left, right in found:
        flat.append(left)
        flat.append(right)
    return flat


def cached_merges(pieces: Sequence[str], scores: Sequence[float], is_mergeable: Sequence[bool]) -> array[int]:
    """``merges_from_scores``, read from the cache when the same vocabulary was seen before.

    A cache that cannot be read or written is no error: the list is made anew.
    """
    digest = hashlib.sha256(_FORMAT)
    digest.update("\0".join(pieces).encode())
    digest.update(struct.pack(f"<{len(scores)}f", *scores))
    digest.update(bytes(is_mergeable))
    path = user_cache_dir() / "tokenizers" / f"{digest.hexdigest()}.merges"
    merges = _read(path, len(pieces))
    if merges is None:
        merges = merges_from_scores(pieces, scores, is_mergeable)
        _write(path, merges)
    return merges


def _read(path: Path, num_pieces: int) -> array[int] | None:
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    body, checksum = blob[len(_FORMAT) : -32], blob[-32:]
    if not blob.startswith(_FORMAT) or hashlib.sha256(body).digest() != checksum or len(body) % 8:
        logger.warning("ignoring the damaged cache file %s", path)
        return None
    merges = array("I", body)
    if sys.byteorder == "big":
        merges.byteswap()
    return merges if not merges or max(merges) < num_pieces else None


def _write(path: Path, merges: array[int]) -> None:
    body = array("I", merges)
    if sys.byteorder == "big":
        body.byteswap()
    blob = body.tobytes()
    try:
        with atomic_writer(path) as file:
            file.write(_FORMAT + blob + hashlib.sha256(blob).digest())
    except OSError as error:
        logger.debug("cannot keep %s: %s", os.fspath(path), error)
