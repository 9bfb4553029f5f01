"""A finding of the linter."""

from dataclasses import dataclass

REFUSED, SLOW = "refused", "slow"


@dataclass(frozen=True)
class Finding:
    """A problem of one node.

    Attributes:
        node: its name, or that of its first output where it has none.
        op: operator.
        dtype: ONNX's name of the type that it works in.
        problem: what is wrong with it.
        remedy: what to do.
        level: ``refused`` if the parser stops there or what it builds is not dependable, ``slow`` if the fused kernel
            is missed.
    """

    node: str
    op: str
    dtype: str
    problem: str
    remedy: str
    level: str = REFUSED

    def line(self) -> str:
        """Return one line; a name of another program may hold line ends, which are escaped."""
        node = self.node.encode("unicode_escape").decode()
        return f"`{node}` ({self.op}, {self.dtype}) {self.problem}; {self.remedy}"
