"""Reading pages of metrics: as Prometheus's own parsers read them."""

from collections.abc import Mapping

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

Key = tuple[str, frozenset[tuple[str, str]]]


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def read_page(page: bytes, *, is_open: bool = False) -> Mapping[Key, float]:
    """Every sample. Fails when one is there twice, or a parser finds fault."""
    found: dict[Key, float] = {}
    for family in (parse_open if is_open else parse_text)(page.decode()):
        for sample in family.samples:
            assert key(sample.name, **sample.labels) not in found, sample
            found[key(sample.name, **sample.labels)] = float(sample.value)
    return found


def counted(page: Mapping[Key, float], name: str) -> dict[tuple[str, ...], float]:
    """The samples of a name that are not 0, by the values of their labels in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(labels)): number
        for (known, labels), number in page.items()
        if known == name and number
    }
