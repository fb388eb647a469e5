"""The division by the modules of a PyTorch program: what `--regions names` works on."""

from __future__ import annotations

from qdqtune.autotune.graphs import Region, leaves_first
from qdqtune.autotune.insertion_points import has_quantizable_operations
from qdqtune.autotune.region_search import RegionSearchBase
from qdqtune.search.regions import discovery


class TorchRegionBuilder(RegionSearchBase):
    """Regions after node names such as `/encoder/layer.0/Conv`."""

    def build_regions(self, linearize: bool = True, only_quantizable: bool = False) -> list[Region]:
        """The regions, those without regions in them first; or with `linearize=False` only those at the top."""
        self.regions = [Region.of(top) for top in discovery.find(self.graph, "names").root.children]
        regions = leaves_first(self.regions) if linearize else self.regions
        return [r for r in regions if not only_quantizable or has_quantizable_operations(r, self.graph)]
