"""Parses a metrics page as Prometheus does."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

type Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class MetricsPage:
    """
    kinds: the type of every metric, by the name that people know it by.
    samples: by name and labels, in their order.
    """

    kinds: dict[str, str]
    samples: dict[tuple[str, Labels], float]

    @classmethod
    def parse(cls, page: str) -> "MetricsPage":
        kinds: dict[str, str] = {}
        samples: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(page):
            kinds[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in samples, f"{key} is there twice"
                samples[key] = sample.value
        return cls(kinds, samples)

    def labels(self, sample: str) -> set[str]:
        """Of all samples of that name together; raises KeyError if there is none."""
        found = [labels for name, labels in self.samples if name == sample]
        if not found:
            raise KeyError(sample)
        return {label for labels in found for label, _ in labels}

    def value(self, sample: str, **labels: str) -> float:
        return self.samples[sample, tuple(sorted(labels.items()))]
