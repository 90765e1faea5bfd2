"""Read metric pages with the parsers of Prometheus."""

from collections.abc import Mapping

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

Key = tuple[str, frozenset[tuple[str, str]]]


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def read_page(page: bytes, *, is_open: bool = False) -> Mapping[Key, float]:
    """Return every sample. Fails if a sample appears twice or a parser rejects the page."""
    found: dict[Key, float] = {}
    for family in (parse_open if is_open else parse_text)(page.decode()):
        for sample in family.samples:
            assert key(sample.name, **sample.labels) not in found, sample
            found[key(sample.name, **sample.labels)] = float(sample.value)
    return found


def nonzero_samples(page: Mapping[Key, float], name: str) -> dict[tuple[str, ...], float]:
    """Return the non-zero samples of a name, keyed by label values in the order of the label names."""
    return {
        tuple(value for _, value in sorted(labels)): number
        for (metric, labels), number in page.items()
        if metric == name and number
    }
