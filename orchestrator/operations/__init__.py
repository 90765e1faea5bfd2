"""What operators run: doctor, overview, Flower, the embedded stack, the metrics that autoscalers read."""
