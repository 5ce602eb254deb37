"""A layout: how many ways each axis of the mesh splits the work. Pure integers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from meshwright.errors import Finding, LayoutError

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, outermost first, and the ZeRO stage that runs on `dp_shard` and `cp` together.

    `ep` is borrowed from the data axes (experts live on data ranks), so it is not a factor of the world size: neighbours
    along dp_shard, then dp_replicate, hold the experts of a layer together.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        findings = [
            Finding(f"layout.{f.name}", f"{getattr(self, f.name)!r} is not a whole number >= {0 if f.name == 'zero' else 1}")
            for f in fields(self)
            if not isinstance(getattr(self, f.name), int)
            or isinstance(getattr(self, f.name), bool)
            or getattr(self, f.name) < (0 if f.name == "zero" else 1)
        ]
        if not findings and self.zero > 3:
            findings.append(Finding("layout.zero", f"{self.zero} is not a ZeRO stage", "Use 0, 1, 2 or 3"))
        if findings:
            raise LayoutError(findings=findings)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that a ZeRO stage shards over: those along cp have the same weights too, and part of the same gradient."""
        return self.dp_shard * self.cp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of every mesh axis, outermost first; sizes of 1 included so that names always exist."""
        return (
            ("pp", self.pp),
            ("dp_replicate", self.dp_replicate),
            ("dp_shard", self.dp_shard),
            ("cp", self.cp),
            ("tp", self.tp),
        )

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
