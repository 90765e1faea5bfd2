"""Tools for operators: doctor, overview, Flower, the embedded stack, the metrics for autoscalers."""
