"""One load of one model from files: what the files hold, and what of it the layers hold too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_plugin.errors import counted, shown
from kvcache_plugin.hosts.coverage import assign, lost_scales

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.hosts.coverage import LostScale, StoredScales
    from kvcache_plugin.hosts.loaded import LoadedScales


@dataclass
class Load:
    """What is known of a load until the model is processed.

    :param model: the path or name that the engine was given.
    :param is_draft: whether the model predicts further tokens and is not the model itself.
    :param stored: what the files hold, one item for each place that the model is loaded from.
    :param not_checked: why the files were not compared with the layers, empty when they were.
    :param said: layers that have been logged as corrupt.
    """

    model: str = ""
    is_draft: bool = False
    stored: list[StoredScales] = field(default_factory=list)
    not_checked: str = ""
    said: set[str] = field(default_factory=set)

    def compare(self, layers: Sequence[LoadedScales], engine: str) -> tuple[LostScale, ...]:
        """Compare the files with the layers, and note where that cannot be done.

        :returns: the scales in the files that did not arrive.
        """
        found: list[LostScale] = []
        for stored in self.stored:
            assigned = assign(stored.layers, layers, is_draft=self.is_draft)
            found += lost_scales(assigned, engine)
            if stored.layers and not assigned and not self.is_draft and not self.not_checked:
                self.not_checked = "no layer of the model has a name that the files' scales have"
        return tuple(found)

    def coverage(self, lost: Sequence[LostScale]) -> str:
        """What came of the comparison with the files, in words."""
        if lost:
            return f"scales in the files did not arrive on {counted(len(lost), 'layer')}"
        if self.not_checked:
            return f"the files were not compared with them: {self.not_checked}"
        if not self.stored:
            return "the files were not compared with them"
        unread = [file for stored in self.stored for file in stored.unread]
        if unread:
            return f"the files were not compared with them: {shown(unread[0])} was not read"
        if any(stored.layers for stored in self.stored):
            return "every scale in the files arrived"
        unknown = [name for stored in self.stored for name in stored.unknown]
        alike = f" by a known name ({shown(unknown[0])} looks like one)" if unknown else ""
        return f"the files hold no K/V scale{alike}, and every layer runs with 1.0"
