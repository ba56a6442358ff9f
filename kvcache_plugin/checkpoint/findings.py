"""Everything that is found in a checkpoint as a whole, by all rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_plugin.checkpoint import coverage_rules, value_rules

if TYPE_CHECKING:
    from kvcache_plugin.checkpoint.evidence import Evidence
    from kvcache_plugin.checkpoint.report import Finding


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """What the rules find, problems first."""
    rules = (*value_rules.RULES, *coverage_rules.RULES)
    found = [finding for rule in rules for finding in rule(evidence)]
    return tuple(sorted(found, key=lambda finding: finding.severity != "problem"))
