"""Images of the rows of an engine: what a tower makes of them, kept for whoever sends the same image again; and where
their tokens stand for a rotary embedding in three axes. They are kept apart for each salt, as prefixes are: how soon an
answer comes says nothing of the pictures of other clients.

A row without images costs a plan no more than a look at a set, and steps, where there are three axes, an addition.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.core import Admission, Chunk, DraftChunk, IntArray, Plan
from draftwing.engine.devices.base import Device
from draftwing.engine.tower_graphs import TowerGraphs
from draftwing.models.towers.base import Tower
from draftwing.ops.attention.batch import Batch, ChunkSpan, ImageRows
from draftwing.requests.images import RequestImage, axes_of
from draftwing.sched.tower_schedule import TowerPiece

BUDGET = 256 << 20  # bytes of features that are kept
_SEEN = np.empty((0, 0, 3), np.uint8)  # pixels of an image that no tower reads any more


class _Row(NamedTuple):
    """images: of the prompt.  salt: of its request.  axes: [3, P] of its positions, and what is added to those behind,
    of a model whose rotary embedding has three axes."""

    images: tuple[RequestImage, ...]
    salt: int
    axes: IntArray | None
    shift: int


class ImageFeatures:
    """shift: [R + 1] int64 of the row table, what is added to positions behind the images of each row for the rotary
    embedding; None: nothing ever is.  runs: of the tower so far."""

    def __init__(
        self, tower: Tower, in_axes: bool, rows: int, device: Device, products: int, heads: bool,
        graphs: TowerGraphs, budget: int = BUDGET,
    ) -> None:  # fmt: skip
        """in_axes: whether the model's rotary embedding has three axes.  rows: of the row table, the dummy included.
        products: that a token takes of the language model.  heads: whether a draft head reads the token behind each of
        a prompt's.  graphs: of the tower.  budget: bytes of features that are kept when no prompt in work needs
        them."""
        self._tower, self._device, self._products, self._budget = tower, device, products, budget
        self._heads, self._graphs = heads, graphs
        self._begun: tuple[tuple[int, bytes], Iterator[int | Tensor]] | None = None  # an image that is not read yet
        self.shift = torch.zeros(rows, dtype=torch.int64, device=device.device) if in_axes else None
        self.runs = self.held = 0
        self._shifted: set[int] = set()  # rows with a shift
        self._rows: dict[int, _Row] = {}  # whose prompts are in work, for heads all
        self._known: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()  # by salt and digest, the newest last

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Takes the images of requests that get a row."""
        for admission in admissions:
            row, images = admission.row, admission.request.images
            self._rows.pop(row, None)
            if not images:
                if row in self._shifted:
                    self._set_shift(row, 0)
                continue
            axes, shift = axes_of(images, admission.prompt_len) if self.shift is not None else (None, 0)
            self._rows[row] = _Row(images, admission.salt, axes, shift)
            if self.shift is not None:
                self._set_shift(row, shift)
        if self._begun is not None and admissions:
            wanted = {(row.salt, image.digest) for row in self._rows.values() for image in row.images}
            if self._begun[0] not in wanted:
                self._begun = None  # whoever sent it has left

    def _set_shift(self, row: int, shift: int) -> None:
        assert self.shift is not None
        self.shift[row : row + 1].fill_(shift)
        (self._shifted.add if shift else self._shifted.discard)(row)

    def turned(self, batch: Batch) -> Batch:
        """Returns a batch of trees with the positions of the rotary embedding."""
        if self.shift is None:
            return batch
        each = len(batch.ids) // len(batch.rows)
        return batch._replace(turns=self._device.ops.row_numbers(self.shift, batch.rows, each, batch.positions))

    def of_prompts(self, plan: Plan, batch: Batch) -> Batch:
        """Returns the batch of a plan's chunks with what images are in them; the same where none of its rows has
        any."""
        if not any(chunk.row in self._rows for chunk in plan.chunks):
            return batch
        images = self._features(plan.chunks, self._of)
        turns = None if self.shift is None else self._device.upload(self._turns(plan.chunks).ravel()).view(3, -1)
        mutual = self._tower.config.mutual if images is not None else ""
        if mutual:
            batch = batch._replace(mutual=mutual, chunks=self._mutual(plan.chunks, batch))
        following = self._features(plan.chunks, self._of, 1) if self._heads else None
        for chunk in plan.chunks:
            row = self._rows.pop(chunk.row, None) if chunk.final else None
            if row is not None and self._heads:  # which may see the prompt later
                self._rows[chunk.row] = row._replace(images=tuple(one._replace(pixels=_SEEN) for one in row.images))
        return batch._replace(turns=turns, images=images, following=following)

    def of_texts(self, parts: Sequence[DraftChunk], batch: Batch) -> Batch:
        """Returns the batch of texts that a draft head sees later than the target with what images are in them."""
        if not any(part.row in self._rows for part in parts):
            return batch
        turns = None if self.shift is None else self._device.upload(self._turns(parts).ravel()).view(3, -1)
        return batch._replace(turns=turns, following=self._features(parts, self._found, 1))

    def _found(self, image: RequestImage, salt: int) -> Tensor | None:
        """Returns all rows of an image where they are there: no text depends on them."""
        return self._known.get((salt, image.digest))

    def _features(
        self, chunks: Sequence[Chunk | DraftChunk], of: Callable[[RequestImage, int], Tensor | None], ahead: int = 0
    ) -> ImageRows | None:
        """Returns the rows of queries of the chunks that stand for images; None where none does. of: gives all rows of
        an image, of a salt.  ahead: 1 for those of the tokens behind each query, as a head reads them."""
        parts, offset = list[tuple[int, Tensor]](), 0  # where some of an image's rows begin, and they
        for chunk in chunks:
            row, begin = self._rows.get(chunk.row), chunk.start + ahead
            for image in row.images if row is not None else ():
                first, end = max(image.start, begin), min(image.end, begin + chunk.length)
                if row is None or first >= end:
                    continue
                found = of(image, row.salt)
                if found is not None:
                    parts.append((first - begin + offset, found[first - image.start : end - image.start]))
            offset += chunk.length
        if not parts:
            return None
        mask = np.zeros(-(-offset // 8) * 8, np.bool_)
        config = self._tower.config
        rows = parts[0][1].new_empty(offset, config.width if ahead else config.row_size)
        for at, part in parts:
            mask[at : at + len(part)] = True
            rows[at : at + len(part)] = part[:, : rows.shape[1]]
        uploaded = self._device.upload(mask.view(np.int64)).view(torch.bool)[:offset]
        return ImageRows(uploaded, rows, 0 if ahead else config.deep)

    def _mutual(self, chunks: Sequence[Chunk], batch: Batch) -> tuple[ChunkSpan, ...]:
        """Returns the spans of chunks with the images in them."""
        found = []
        for chunk, span in zip(chunks, batch.chunks, strict=True):
            row, end = self._rows.get(chunk.row), chunk.start + chunk.length
            some = [image for image in row.images if image.start < end and chunk.start < image.end] if row else []
            assert all(image.end <= end for image in some), "a chunk ends within an image whose tokens see each other"
            found.append(span._replace(mutual=tuple((image.start, image.end) for image in some)))
        return tuple(found)

    def _turns(self, chunks: Sequence[Chunk | DraftChunk]) -> IntArray:
        """Returns positions of the chunks' queries in three axes, [3, M]."""
        parts = []
        for chunk in chunks:
            plain = np.tile(np.arange(chunk.start, chunk.start + chunk.length), (3, 1))
            row = self._rows.get(chunk.row)
            if row is not None and row.axes is not None:
                known = row.axes[:, chunk.start : chunk.start + chunk.length]
                plain += row.shift
                plain[:, : known.shape[1]] = known
            parts.append(plain)
        return np.concatenate(parts, 1)

    def _of(self, image: RequestImage, salt: int) -> Tensor:
        """Returns all rows of an image."""
        found = self._known.get((salt, image.digest))
        if found is None:
            begun = self._has_begun(image, salt)
            found = None if begun else self._graphs.run(image.pixels, image.tokens)
            if found is None:
                *_, made = self._parts(image, salt) if begun else self._new_parts(image)
                assert isinstance(made, Tensor)
                found = made
            self._keep(image, salt, found)
        self._known.move_to_end((salt, image.digest))
        return found

    def _has_begun(self, image: RequestImage, salt: int) -> bool:
        return self._begun is not None and self._begun[0] == (salt, image.digest)

    def _new_parts(self, image: RequestImage) -> Iterator[int | Tensor]:
        return self._tower.parts(self._device.upload_array(image.pixels), image.tokens)

    def _parts(self, image: RequestImage, salt: int) -> Iterator[int | Tensor]:
        """Returns what is left of the tower's work on an image. One at a time is begun; others may be read as a whole
        meanwhile."""
        if self._begun is None or not self._has_begun(image, salt):
            self._begun = (salt, image.digest), self._new_parts(image)
        return self._begun[1]

    def _keep(self, image: RequestImage, salt: int, rows: Tensor) -> None:
        self.runs += 1
        if self._has_begun(image, salt):
            self._begun = None
        self._known[salt, image.digest] = rows
        self.held += rows.nbytes
        while self.held > self._budget and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self.held -= oldest.nbytes

    def unseen(self, images: Sequence[RequestImage], salt: int, start: int, tokens: int) -> RequestImage | None:
        """Returns the first of a request's images, from a position of the prompt on, that the tower has not read, and
        for which it takes longer than the language model for so many tokens; None: there is none."""
        most = tokens * self._products // self._tower.config.depth
        for image in images:
            layer = self._tower.config.products(*image.pixels.shape[:2])
            if image.end > start and layer > most and (salt, image.digest) not in self._known:
                return image
        return None

    def run_piece(self, piece: TowerPiece) -> None:
        """Has the tower go on with an image for about as long as the language model takes for some tokens, and no
        longer by the clock: its products, and what is none, may take longer than the model's. By a part of a layer at
        least."""
        left, now = piece.tokens * self._products, time.perf_counter()
        until = now + piece.seconds
        for made in self._parts(piece.image, piece.salt):
            if isinstance(made, Tensor):
                self._keep(piece.image, piece.salt, made)
                return
            left, before, now = left - made, now, time.perf_counter()
            if left < made or 2 * now - before > until:  # for another one
                return

    def clear(self) -> None:
        """Forgets all features."""
        self._known.clear()
        self._begun, self.held = None, 0
