"""The build-up rule of Park and Kim 2022 (section 4): blocks of a pre-activation ResNet that become attention blocks.

Blocks are replaced alternately from the end of a stage: n blocks with m of attention are n - 2m convolution blocks,
then m pairs of a convolution and an attention block. A stage thus ends with attention, and its first block, which
halves the map, is never replaced.

The paper's second rule (an attention block that does not help moves to the end of an earlier stage) needs training
runs: its outcome is given as numbers per stage. A number for the whole model is distributed from the last stage.
"""

from collections.abc import Sequence

from vtk.errors import UsageError


def placement(blocks: int, attention: int) -> tuple[bool, ...]:
    """Return for each block of a stage whether it is an attention block.

    Args:
        blocks: n.
        attention: m, at most n // 2.

    Raises:
        UsageError: ``attention`` is out of range.
    """
    if not 0 <= attention <= blocks // 2:
        raise UsageError(f"a stage of {blocks} blocks can have 0 to {blocks // 2} attention blocks, not {attention}")
    return (False,) * (blocks - 2 * attention) + (False, True) * attention


def per_stage(blocks: Sequence[int], attention: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of attention blocks of each stage.

    Args:
        blocks: of each stage.
        attention: of each stage, or of the model: then the last stage is filled first. For (3, 4, 6, 4) blocks, 6 gives
            (0, 1, 3, 2), the paper's model for ImageNet; its model for CIFAR-100 needs (0, 1, 1, 2).

    Raises:
        UsageError: numbers that do not fit the blocks.
    """
    if isinstance(attention, int):
        most = sum(n // 2 for n in blocks)
        if isinstance(attention, bool) or not 0 <= attention <= most:
            raise UsageError(
                f"`msa_blocks` is {attention}; allowed is 0 to {most} for stages of {_words(blocks)} blocks"
            )
        left, found = attention, []
        for n in reversed(blocks):
            found.append(min(left, n // 2))
            left -= found[-1]
        return tuple(reversed(found))
    numbers = isinstance(attention, (list, tuple)) and all(type(m) is int for m in attention)
    if not numbers or len(attention) != len(blocks):
        raise UsageError(
            f"`msa_blocks` is {attention!r}; give one number, or one for each of the {len(blocks)} stages, such as "
            f"{list(per_stage(blocks, sum(n // 2 for n in blocks)))}"
        )
    for stage, (n, m) in enumerate(zip(blocks, attention, strict=True), 1):
        try:
            placement(n, m)
        except UsageError as error:
            raise UsageError(f"`msa_blocks` {list(attention)}: stage {stage}: {error}") from error
    return tuple(attention)


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
