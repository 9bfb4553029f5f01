"""Folds a task's attention of one block by its own tensors alone: biases, norms of heads, and low-rank changes.

Folding multiplies a matrix by the shared norm's γ from the right, and by constants of its rows from the left, so that a
change b · a is folded by its thin factors: (s ⊙ b) · (a ⊙ γ), with s = 1/√D for queries and LayerScale for the output.
In a bias, W · β is that of the base, known once, plus b · (a · β). `vtk.fused.fold` has the same for whole matrices.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.plain_changes import Module, Plain, to_change
from vtk.fused.fold import centred, fold_output
from vtk.fused.norms import Affine, NormSpec, read_norm
from vtk.fused.stages import Context
from vtk.models.packed.low_rank import Change, LowRankMatrix, Matrix
from vtk.models.packed.structure import Branch, is_rms, own_weights, read_block

_READ_THE_NORM = ("qkv.weight", "gate.weight")


@dataclass(frozen=True, eq=False)
class BranchFold:
    """What folding multiplies in one attention; of the base, the same for all tasks.

    Attributes:
        module: the attention.
        norm: before it.
        affine: of that norm.
        front: Context Broadcasting between the two.
        scale: (C), LayerScale; None for none.
        outputs: (rows of qkv), 1/√D for queries and 1 for the others; None where norms of queries have it.
        offsets: by name of a matrix that reads the norm, its product with β.
        inner: norm of the heads' outputs.
    """

    module: Module
    norm: NormSpec
    affine: Affine
    front: Context | None
    scale: Tensor | None
    outputs: Tensor | None
    offsets: Mapping[str, Tensor]
    inner: NormSpec | None

    @classmethod
    def of(cls, branch: Branch, like: Tensor) -> "BranchFold":
        """Read an attention of a block of the base, its norm and LayerScale, in the dtype of ``like``."""
        module = Module.of(branch.name, branch.body)
        norm, affine = read_norm(branch.norm, like, branch.norm_name)
        front = None
        if getattr(branch.body, "cb_placement", None) == "front" and branch.body.cb is not None:
            factors = branch.body.cb.scale
            front = Context(None if factors is None else factors.detach().to(like.dtype))
        scale = branch.scale(torch.ones(1, len(affine.weight), dtype=like.dtype))[0].detach()
        own, outputs = own_weights(branch.body), None
        heads = module.heads
        if isinstance(heads.q_norm, nn.Identity):
            outputs = like.new_ones(sum(heads.widths))
            outputs[: heads.widths[0]] = heads.dim**-0.5
        inner = None
        if not isinstance(heads.inner, nn.Identity):
            inner = read_norm(heads.inner, like, f"{branch.name}.norm")[0]
        found = cls(module, norm, affine, front, None if bool((scale == 1).all()) else scale, outputs, {}, inner)
        offsets = {key: own[key].detach().to(like.dtype) @ found.shift for key in _READ_THE_NORM if key in own}
        return dataclasses.replace(found, offsets=offsets)

    @property
    def shift(self) -> Tensor:
        """β, as the matrices behind the norm see it."""
        factors = None if self.front is None else self.front.scale
        return self.affine.bias if factors is None else self.affine.bias * (1 + factors)

    @property
    def gated(self) -> bool:
        """Whether a product of the input multiplies the heads' outputs, so that no matrix can take their norm."""
        return "gate.weight" in self.module.matrices

    def offset(self, key: str, plain: Plain) -> Tensor:
        """Return the product of a task's matrix with β."""
        value = plain[key]
        if isinstance(value, Tensor):
            return value.to(self.shift.dtype) @ self.shift
        assert value is not None
        found = self.offsets[key].clone()
        for change in value:
            a, b = change.factors.values(found.dtype)
            found[change.row : change.row + len(b)] += b @ (a @ self.shift)
        return found

    def bias(self, key: str, plain: Plain) -> Tensor:
        """Return the folded bias of a matrix that reads the norm."""
        found, own = self.offset(key, plain), plain.get(key.replace("weight", "bias"))
        if isinstance(own, Tensor):
            found = found + own.to(found.dtype)
        return found if key != "qkv.weight" or self.outputs is None else found * self.outputs

    def whole(self, key: str, matrix: Tensor) -> Tensor:
        """Return a task's own matrix that reads the norm, folded."""
        w = centred(matrix.to(self.shift.dtype) * self.affine.weight, self.norm, self.front)
        return w if key != "qkv.weight" or self.outputs is None else w * self.outputs[:, None]


@dataclass(frozen=True, eq=False)
class LayerFold:
    """Folds the attention of one block, of P branches.

    Attributes:
        branches: P of them.
        base: the folded matrices of the base, by the names of `Weights`, in the bank's dtype; tasks share them.
    """

    branches: tuple[BranchFold, ...]
    base: Mapping[str, Tensor]

    def folded(self, plains: Sequence[Plain], dtype: torch.dtype) -> dict[str, Matrix]:
        """Return a task's weights of this block, as of `Folding.weights`.

        Args:
            plains: of each branch; of one matrix all are `Tensor` or all are changes.
            dtype: of the bank.
        """
        found: dict[str, Matrix] = {}
        for key in ("qkv.weight", "gate.weight"):
            if key in plains[0]:
                found[key] = self._reading(key, plains, dtype)
                biases = [b.bias(key, p) for b, p in zip(self.branches, plains, strict=True)]
                found[key.replace("weight", "bias")] = torch.cat(self._sections(key, biases)).to(dtype)
        found["proj.weight"], bias = self._output(plains, dtype)
        found["proj.bias"] = bias.to(dtype)
        wide = self.branches[0].shift.dtype
        for side in "qk":
            found |= {key: t.to(dtype) for key, t in self._head_norms(side, plains, wide).items()}
        if self.branches[0].gated and self.branches[0].inner is not None:
            sides = [self._inner(b, p, wide) for b, p in zip(self.branches, plains, strict=True)]
            found["norm.weight"] = torch.cat([s.weight for s in sides]).to(dtype)
            found["norm.bias"] = torch.cat([s.bias for s in sides]).to(dtype)
        return found

    def _reading(self, key: str, plains: Sequence[Plain], dtype: torch.dtype) -> Matrix:
        """Return a matrix that reads the norm: rows of q of all branches, then k, then v; or those of the gates."""
        if all(isinstance(p[key], Tensor) for p in plains):
            parts = [b.whole(key, p[key]) for b, p in zip(self.branches, plains, strict=True)]  # type: ignore[arg-type]
            return torch.cat(self._sections(key, parts)).to(dtype)
        return LowRankMatrix(self.base[key], tuple(self._changes(key, plains, dtype)))

    def _changes(self, key: str, plains: Sequence[Plain], dtype: torch.dtype) -> Iterator[Change]:
        for j, (branch, plain) in enumerate(zip(self.branches, plains, strict=True)):
            for change in plain[key] or ():
                assert not isinstance(change, Tensor)
                rows, outputs = len(change.factors.b), None
                if key == "qkv.weight" and branch.outputs is not None:
                    outputs = branch.outputs[change.row : change.row + rows]
                whole = to_change(change.factors, dtype, row=change.row, inputs=branch.affine.weight, outputs=outputs)
                yield from self._placed(key, j, whole)

    def _placed(self, key: str, j: int, change: Change) -> Iterator[Change]:
        """Yield the parts of a change of branch j's rows where these rows are in the merged matrix."""
        if len(self.branches) == 1:
            yield change
            return
        first, last, before = change.row, change.row + len(change.b), 0
        for width, start in zip(self._widths(key), self._starts(key, j), strict=True):
            low, high = max(first, before), min(last, before + width)
            if low < high:
                part = slice(low - first, high - first)
                outputs = None if change.outputs is None else change.outputs[part]
                yield dataclasses.replace(change, b=change.b[part], outputs=outputs, row=start + low - before)
            before += width

    def _widths(self, key: str) -> tuple[int, ...]:
        heads = self.branches[0].module.heads
        return heads.widths if key == "qkv.weight" else heads.widths[:1]

    def _starts(self, key: str, j: int) -> list[int]:
        starts, first = [], 0
        for width in self._widths(key):
            starts.append(first + j * width)
            first += len(self.branches) * width
        return starts

    def _sections(self, key: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the q of all branches, then k, then v."""
        split = [part.split(self._widths(key)) for part in parts]
        return [part for section in zip(*split, strict=True) for part in section]

    def _output(self, plains: Sequence[Plain], dtype: torch.dtype) -> tuple[Matrix, Tensor]:
        """Return the output projection, columns of the branches side by side, and the sum of their biases."""
        width, wide = self._widths("gate.weight")[0], self.branches[0].shift.dtype
        bias: Any = 0
        whole, changes, inputs = [], [], []
        for j, (branch, plain) in enumerate(zip(self.branches, plains, strict=True)):
            value, own, columns = plain["proj.weight"], plain.get("proj.bias"), slice(j * width, (j + 1) * width)
            affine = None if branch.gated or branch.inner is None else self._inner(branch, plain, wide)
            scale = 1.0 if branch.scale is None else branch.scale
            part: Any = own.to(wide) * scale if isinstance(own, Tensor) else branch.shift * 0
            if isinstance(value, Tensor):
                norm = None if affine is None or branch.inner is None else (branch.inner, affine)
                w, more = fold_output(value.to(wide), branch.shift * 0, norm)
                whole.append(w * (scale if branch.scale is None else branch.scale[:, None]))
                bias = bias + part + more * scale
                continue
            assert value is not None
            if affine is not None:
                inputs.append(affine.weight)
                part = part + self.base["proj.weight"][:, columns].to("cpu", wide) @ affine.bias
            for change in value:
                if affine is not None:
                    a, b = change.factors.values(wide)
                    part = part + (b @ (a @ affine.bias)) * scale
                changes.append(to_change(change.factors, dtype, column=columns.start, outputs=branch.scale))
            bias = bias + part
        if whole:
            return torch.cat(whole, 1).to(dtype), bias
        factors = torch.cat(inputs).to(dtype) if inputs else None
        return LowRankMatrix(self.base["proj.weight"], tuple(changes), factors), bias

    def _head_norms(self, side: str, plains: Sequence[Plain], wide: torch.dtype) -> dict[str, Tensor]:
        """Return the norms' weights of q or k of all branches' heads, 1/√D in those of q."""
        heads = self.branches[0].module.heads
        norm, count = (heads.q_norm, heads.count) if side == "q" else (heads.k_norm, heads.kv)
        if isinstance(norm, nn.Identity):
            return {}
        factor = heads.dim**-0.5 if side == "q" else 1.0
        found = {}
        for name, default in (("weight", 1.0),) if is_rms(norm) else (("weight", 1.0), ("bias", 0.0)):
            blank = torch.full((heads.dim,), default, dtype=wide)
            values = [p.get(f"{side}_norm.{name}", blank) for p in plains]
            found[f"{side}_norm.{name}"] = torch.cat([(v.to(wide) * factor).expand(count, -1) for v in values])  # type: ignore[union-attr]
        return found

    def _inner(self, branch: BranchFold, plain: Plain, wide: torch.dtype) -> Affine:
        """Return a task's affine part of the norm of the heads' outputs."""
        ones = torch.ones(branch.module.heads.widths[0], dtype=wide)
        weight, bias = (plain.get(f"norm.{name}") for name in ("weight", "bias"))
        return Affine(
            weight.to(wide) if isinstance(weight, Tensor) else ones,
            bias.to(wide) if isinstance(bias, Tensor) else 0 * ones,
        )


def read_layers(model: Any, folded: Sequence[Mapping[str, Matrix]], dtype: torch.dtype) -> tuple[LayerFold, ...]:
    """Return what folds a task's attention, block by block.

    Args:
        model: the base's, of a known family, on the CPU.
        folded: its own folded weights, as of `Folding.weights`.
        dtype: of the bank.
    """
    like = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32))
    found = []
    with torch.no_grad():
        for i, (block, weights) in enumerate(zip(model.blocks, folded, strict=True)):
            branches = tuple(BranchFold.of(branch, like) for branch in read_block(block, f"blocks.{i}").attns)
            base = {key: t for key, t in weights.items() if key.endswith(".weight") and key.partition(".")[0] in _NAMES}
            if not branches[0].gated and branches[0].inner is not None:  # that norm's affine part is the task's own
                base["proj.weight"] = _plain_output(branches, block, dtype)
            found.append(LayerFold(branches, base))  # type: ignore[arg-type]
    return tuple(found)


_NAMES = ("qkv", "proj", "gate")


def _plain_output(branches: Sequence[BranchFold], block: Any, dtype: torch.dtype) -> Tensor:
    """Return the output projection with LayerScale, without the norm of the heads' outputs."""
    parts = []
    for branch, found in zip(branches, read_block(block).attns, strict=True):
        w = found.body.proj.weight.detach().to(branch.shift.dtype)
        parts.append(w if branch.scale is None else w * branch.scale[:, None])
    return torch.cat(parts, 1).to(dtype)
